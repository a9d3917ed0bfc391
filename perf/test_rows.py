"""pytest-benchmark sweep over the registries: `pytest perf --benchmark-group-by=group`. Without a GPU, a smoke run.

The benchmark times the replay of a graph of calls; `extra_info` has the device time of one call, the bytes it must move
and the share of the GPU's measured bandwidth that this is.
"""

from __future__ import annotations

import pytest
import torch

from tq.bench.cases import Case, bytes_of, cases, in_turn
from tq.bench.peers import PEERS
from tq.bench.timing import copies_of, device_time_us, measured_bandwidth

ON_GPU = torch.cuda.is_available()
CASES = list(cases() if ON_GPU else in_turn(cases(tokens=(3,))))


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name}-{c.scheme}-{c.rows}x{c.hidden_size}")
def test_rows(benchmark, case: Case, peer: str) -> None:
    benchmark.group = f"{case.name} {case.scheme} {case.rows}x{case.hidden_size}"
    if not ON_GPU:
        if peer.startswith("inductor"):
            pytest.skip("a GPU baseline")
        made = PEERS[peer](case.prepare(torch.bfloat16, "cpu"))
        if made is None:
            pytest.skip(f"{peer} cannot run this here")
        benchmark.pedantic(made.call, rounds=1)
        return
    first = case.prepare(torch.bfloat16, "cuda")
    calls = [PEERS[peer](first)]
    if calls[0] is None:
        pytest.skip(f"{peer} cannot run this here")
    calls += [PEERS[peer](case.prepare(torch.bfloat16, "cuda")) for _ in range(copies_of(bytes_of(first)) - 1)]
    time_us, spread = device_time_us([made.call for made in calls])
    benchmark.extra_info.update(
        device_us=time_us,
        spread_us=spread,
        bytes=bytes_of(first),
        bandwidth_share=bytes_of(first) / time_us * 1e6 / measured_bandwidth(),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [made.call() for made in calls]  # noqa: F841 - outputs of a graph live as long as it

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark.pedantic(replay, rounds=5, warmup_rounds=1)
