"""What a decode step of an engine is spent on: on the GPU, and on the host at the boundaries that tq fuses."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from perf.engine_turns import PROMPT_TOKENS, generate

# Steps that are looked at: after those that prompts are read in, before the first request ends.
FIRST, STEPS, NEW_TOKENS = 12, 8, 28


# Microseconds: the GPU pauses for less between kernels of a graph, and for more while the host prepares a step.
PAUSE = 20.0


def covered(spans: Iterable[tuple[float, float]], pause: float = 0.0) -> float:
    """Length of the union of spans (start, end), gaps of up to `pause` filled."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - (reached if start - reached <= pause else start))
        reached = max(reached, end)
    return total


def busy(llm: Any, name: str, batch: int, prompt_tokens: int = PROMPT_TOKENS) -> dict[str, Any]:
    """How long the GPU works in a decode step, and on what, microseconds: the rest of a step is the host's.

    gpu_us: the time in which anything runs; span_us: pauses between kernels included. Kernels that start early
    (`launch_pdl`) wait while the one before them runs, so that the sum of `kernels`, the greatest, may be more.
    """
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])

    def after_step(count: int) -> None:
        if count in (FIRST, FIRST + STEPS):
            torch.cuda.synchronize()
            (profiler.start if count == FIRST else profiler.stop)()

    generate(llm, batch, NEW_TOKENS, prompt_tokens=prompt_tokens, after_step=after_step)
    kernels: dict[str, float] = defaultdict(float)
    spans = []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            spans.append((event.time_range.start, event.time_range.end))
            kernels[event.name[:60]] += (event.time_range.end - event.time_range.start) / STEPS
    greatest = sorted(kernels, key=lambda kernel: -kernels[kernel])[:8]
    return {
        "busy": name,
        "batch": batch,
        "gpu_us": round(covered(spans) / STEPS, 1),
        "span_us": round(covered(spans, PAUSE) / STEPS, 1),
        "launches": round(len(spans) / STEPS, 1),
        "kernels": {kernel: round(kernels[kernel], 1) for kernel in greatest},
    }


def host(llm: Any, model: torch.nn.Module, name: str, batch: int) -> dict[str, Any]:
    """Host time of the boundaries of a decode step, microseconds: producers and quantizers, by wrapping each."""
    from vllm.model_executor.layers.fusion import fused_act_quant

    from tq.contract import report
    from tq.contract.scales import kernel_of

    spent: dict[str, float] = defaultdict(float)

    def timed(kind: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            spent[kind] += time.perf_counter() - begin
            return result

        return call

    producers = {model.get_submodule(boundary.name): boundary.producer for boundary in report().boundaries}
    quantizers = {getattr(kernel_of(module), "quant_fp8", None) for module in model.modules()} - {None}
    wrapped = [*producers.items(), *((quantizer, "quantizers") for quantizer in quantizers)]
    for module, kind in wrapped:
        module.forward = timed(kind, module.forward)
    rows = fused_act_quant._FUSED_ACT_QUANT
    before = dict(rows)
    rows.update({key: timed("silu_mul", row) for key, row in before.items()})
    marks: dict[int, tuple[float, dict[str, float]]] = {}

    def after_step(count: int) -> None:
        if count in (FIRST, FIRST + STEPS):
            marks[count] = time.perf_counter(), dict(spent)

    generate(llm, batch, NEW_TOKENS, after_step=after_step)
    rows.update(before)
    for module, _ in wrapped:
        del module.forward
    (begin, few), (end, many) = marks.values()
    each = {kind: round((many[kind] - few.get(kind, 0.0)) / STEPS * 1e6) for kind in many}
    return {"host": name, "batch": batch, "step_us": round((end - begin) / STEPS * 1e6), "boundaries_us": each}
