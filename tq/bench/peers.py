"""What tq is measured against: named baselines that run the same call, or None where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from tq.kernels.codes import E4M3FNUZ
from tq.kernels.launch import run
from tq.kernels.plan import Prepared, replaced
from tq.kernels.rules import ScaleInputs


class Peer(NamedTuple):
    """call: does the work once. outputs: what it wrote, as (codes uint8 [M, N], scales or None, residual or None)."""

    call: Callable[[], Any]
    outputs: Callable[[], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


def tq_peer(prepared: Prepared) -> Peer:
    """The kernel itself, into outputs that exist already."""
    residual = prepared.bound.side_outputs[0] if prepared.bound.side_outputs else None
    codes = prepared.codes.flatten(0, -2)
    return Peer(lambda: run(prepared), lambda: (codes, prepared.scales, residual))


@lru_cache
def vllm_library() -> Any | None:
    """torch.ops._C with vLLM's CUDA library loaded, or None where there is none."""
    try:
        import vllm._custom_ops  # noqa: F401 - loads the library

        torch.ops._C.rms_norm_static_fp8_quant  # noqa: B018 - raises where this build has no CUDA ops
        return torch.ops._C
    except (ImportError, AttributeError):
        return None


class Job(NamedTuple):
    """What vLLM's ops are called with: x, the other arguments and the residual of the producer, and the outputs."""

    x: torch.Tensor
    rest: list[Any]
    residual: torch.Tensor | None
    out: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    inputs: ScaleInputs
    group: int


# Ops by the names that `replaces` gives. Those of a group quantizer take bounds, and whether scales are powers of two,
# column-major, and TMA-aligned.
QUANTIZERS: dict[str, Callable[[Any, Job, torch.Tensor], Any]] = {
    "_C.static_scaled_fp8_quant": lambda c, job, y: c.static_scaled_fp8_quant(job.out, y, job.inputs.scale, None),
    "_C.dynamic_per_token_scaled_fp8_quant": lambda c, job, y: c.dynamic_per_token_scaled_fp8_quant(
        job.out, y, job.scales, None
    ),
    "_C.per_token_group_fp8_quant": lambda c, job, y: c.per_token_group_fp8_quant(
        y, job.out, job.scales, job.group, 1e-10, -448.0, 448.0, *column_flags(job.scales)
    ),
    "_C.per_token_group_fp8_quant_packed": lambda c, job, y: c.per_token_group_fp8_quant_packed(
        y, job.out, job.scales, job.group, 1e-10, -448.0, 448.0
    ),
    "_C.static_scaled_int8_quant": lambda c, job, y: c.static_scaled_int8_quant(
        job.out, y, job.inputs.scale, job.inputs.zero_point
    ),
    "_C.dynamic_scaled_int8_quant": lambda c, job, y: c.dynamic_scaled_int8_quant(
        job.out, y, job.scales, job.zero_points
    ),
}
FUSED: dict[str, Callable[[Any, Job], Any]] = {
    "_C.rms_norm_static_fp8_quant": lambda c, job: (
        c.rms_norm_static_fp8_quant(job.out, job.x, job.rest[0], job.inputs.scale, job.rest[1])
        if job.residual is None
        else c.fused_add_rms_norm_static_fp8_quant(
            job.out, job.x, job.residual, job.rest[0], job.inputs.scale, job.rest[1]
        )
    ),
    "_C.rms_norm_dynamic_per_token_quant": lambda c, job: c.rms_norm_dynamic_per_token_quant(
        job.out, job.x, job.rest[0], job.scales, job.rest[1], None, job.residual
    ),
    "_C.rms_norm_per_block_quant": lambda c, job: c.rms_norm_per_block_quant(
        job.out, job.x, job.rest[0], job.scales, job.rest[1], None, job.residual, job.group, False
    ),
    "_C.silu_and_mul_quant": lambda c, job: c.silu_and_mul_quant(job.out, job.x, job.inputs.scale),
    "_C.silu_and_mul_per_block_quant": lambda c, job: c.silu_and_mul_per_block_quant(
        job.out, job.x, job.scales, job.group, None, False
    ),
}
# Ops that write y, from which a quantizer goes on; a norm with a residual has x in y and works in place.
UNFUSED: dict[str, Callable[[Any, Job, torch.Tensor], Any]] = {
    "_C.silu_and_mul": lambda c, job, y: c.silu_and_mul(y, job.x),
    "_C.gelu_(tanh_)and_mul": lambda c, job, y: c.gelu_and_mul(y, job.x),
    "_C.(fused_add_)rms_norm": lambda c, job, y: (
        c.rms_norm(y, job.x, job.rest[0], job.rest[1])
        if job.residual is None
        else c.fused_add_rms_norm(y, job.residual, job.rest[0], job.rest[1])
    ),
}


def column_flags(scales: torch.Tensor) -> tuple[bool, bool, bool]:
    """Of a power-of-two scheme's scales, the only ones here that are not row-major."""
    aligned = scales.stride(0) == 1
    return aligned, aligned, aligned


def run_both(c: Any, job: Job, y: torch.Tensor, first: Callable[..., Any], second: Callable[..., Any]) -> None:
    """y, and y quantized."""
    first(c, job, y)
    second(c, job, y)


def vllm_peer(prepared: Prepared) -> Peer | None:
    """vLLM's CUDA op for this pair, or its two in turn; outputs allocated beforehand as in vLLM's graphs."""
    c, plan = vllm_library(), prepared.plan
    if c is None or plan.device.type != "cuda" or (plan.scheme.code is E4M3FNUZ and torch.version.hip is None):
        return None
    op = replaced(plan.producer, plan.scheme).op
    first, _, quantizer = op.rpartition(" + ")
    out = torch.empty(plan.shape, dtype=plan.scheme.code.torch_dtype, device=plan.device)
    scales = (
        out
        if prepared.scales is None
        else torch.empty_strided(
            prepared.scales.shape, prepared.scales.stride(), dtype=prepared.scales.dtype, device=plan.device
        )
    )
    zero_points = None if prepared.zero_points is None else torch.empty_like(prepared.zero_points)
    residual = prepared.options.get("residual")
    residual = None if residual is None else residual.clone()
    x, *rest = prepared.arguments
    job = Job(x, rest, residual, out, scales, zero_points, prepared.inputs, plan.scheme.group)
    if op in FUSED:
        call = partial(FUSED[op], c, job)
    elif quantizer in QUANTIZERS and plan.producer.name == "quantize":
        call = partial(QUANTIZERS[quantizer], c, job, x)
    elif quantizer in QUANTIZERS and first in UNFUSED:
        y = torch.empty(plan.shape, dtype=plan.dtype, device=plan.device) if residual is None else x.clone()
        call = partial(run_both, c, job, y, UNFUSED[first], QUANTIZERS[quantizer])
    else:
        return None
    return Peer(call, lambda: (out.view(torch.uint8), None if scales is out else scales, residual))


def inductor_peer(prepared: Prepared) -> Peer:
    """torch.compile of the producer's and the scheme's torch formulas, for static shapes."""
    producer, scheme = prepared.plan.producer, prepared.plan.scheme
    options = {k: v for k, v in prepared.options.items() if k not in producer.mutates}

    def formula(arguments: tuple, options: dict[str, Any], inputs: Any) -> tuple:
        y, side_outputs = producer.reference(*arguments, **options, precision=torch.float32)
        codes, fitted = scheme.reference(y, inputs)
        return codes, scheme.rule.reference_store(fitted[0]), side_outputs

    compiled = torch.compile(formula, dynamic=False, fullgraph=True)

    def call() -> tuple:
        return compiled(prepared.arguments, options, prepared.inputs)

    def outputs() -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        codes, scales, side_outputs = call()
        return codes.view(torch.uint8), scales if scheme.dynamic else None, side_outputs[0] if side_outputs else None

    return Peer(call, outputs)


PEERS: dict[str, Callable[[Prepared], Peer | None]] = {"tq": tq_peer, "vllm": vllm_peer, "inductor": inductor_peer}
