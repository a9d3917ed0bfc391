"""Device time of a call: CUDA-graph replay over rotated inputs, so that nothing is timed that the host adds and nothing
is read from a cache that an engine would not find there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

ROTATED_BYTES = 200 << 20  # several times the L2 of any GPU
LARGE_BYTES = 64 << 20  # a call that moves so much is judged by the bandwidth
CALLS_PER_REPLAY = 48
REPLAYS = 12


def copies_of(call_bytes: int) -> int:
    """How many input sets a measurement rotates through."""
    return max(2, min(CALLS_PER_REPLAY, ROTATED_BYTES // max(call_bytes, 1)))


def device_time_us(
    calls: Sequence[Callable[[], Any]], replays: int = REPLAYS, calls_per_replay: int = CALLS_PER_REPLAY
) -> tuple[float, float]:
    """(median, spread) of the device time of one call in microseconds; the calls are rotated inside one graph, each at
    least once.

    spread: half the distance of the quartiles of the replays.
    """
    length = max(calls_per_replay // len(calls), 1) * len(calls)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        kept = []
        with torch.cuda.graph(graph, stream=stream):
            for i in range(length):
                kept.append(calls[i % len(calls)]())
        times = []
        for _ in range(replays + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / length)
    quartiles = statistics.quantiles(times[2:], n=4)
    return quartiles[1], (quartiles[2] - quartiles[0]) / 2


@lru_cache
def measured_bandwidth(device: int = 0) -> float:
    """Bytes per second, read plus written, of an element-wise pass over a buffer that fills the GPU: the ceiling."""
    source = torch.randn(1 << 29, device=f"cuda:{device}", dtype=torch.float32).view(torch.bfloat16)
    target = torch.empty_like(source)
    time_us, _ = device_time_us([lambda: torch.neg(source, out=target)], replays=6)
    return 2 * source.numel() * source.element_size() / time_us * 1e6


def launch_floor_us() -> float:
    """Device time of a graph node that does nothing worth mentioning."""
    one = torch.zeros(1, device="cuda")
    return device_time_us([lambda: one.add_(1.0)])[0]
