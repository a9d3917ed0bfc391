"""What tq is measured against: named baselines that run the same call, or None where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch

from tq.bench.peer import Job, Peer, job_of
from tq.kernels.codes import E4M3FNUZ
from tq.kernels.launch import run
from tq.kernels.plan import Prepared, replaced


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


def column_flags(scales: torch.Tensor | None) -> tuple[bool, bool, bool]:
    """Of a power-of-two scheme's scales, the only ones here that are not row-major."""
    aligned = scales is not None and scales.stride(0) == 1
    return aligned, aligned, aligned


def run_both(c: Any, job: Job, y: torch.Tensor, first: Callable[..., Any], second: Callable[..., Any]) -> None:
    """y, and y quantized."""
    first(c, job, y)
    second(c, job, y)


def ops_peer(c: Any, prepared: Prepared) -> Peer | None:
    """The op of vLLM for this pair, or its two in turn, out of those in `c`."""
    plan = prepared.plan
    if plan.device.type != "cuda" or (plan.scheme.code is E4M3FNUZ and torch.version.hip is None):
        return None
    op = replaced(plan.producer, plan.scheme).op
    first, _, quantizer = op.rpartition(" + ")
    job = job_of(prepared)
    if op in FUSED:
        call = partial(FUSED[op], c, job)
    elif quantizer in QUANTIZERS and plan.producer.name == "quantize":
        call = partial(QUANTIZERS[quantizer], c, job, job.x)
    elif quantizer in QUANTIZERS and first in UNFUSED:
        y = torch.empty(plan.shape, dtype=plan.dtype, device=plan.device) if job.residual is None else job.x.clone()
        call = partial(run_both, c, job, y, UNFUSED[first], QUANTIZERS[quantizer])
    else:
        return None
    return Peer(call, job.outputs)


def vllm_peer(prepared: Prepared) -> Peer | None:
    """vLLM's CUDA op, or its two in turn."""
    c = vllm_library()
    return None if c is None else ops_peer(c, prepared)


@lru_cache
def helion_library() -> Any | None:
    """vLLM's Helion kernels by the names of the ops whose work they do; None where vLLM or Helion is not installed.

    A kernel has configurations for some GPUs only. All have some for the H100, which an H200 gets: its SMs are the
    same, and the one kernel with a table for the H200 has the same in both."""
    try:
        from vllm.kernels.helion import ops, register, utils
    except ImportError:
        return None
    utils._GPU_NAME_ALIASES.setdefault("nvidia_h200", "nvidia_h100")
    ops.import_all_kernels()
    known: dict[str, Any] = {
        name: kernel for name, kernel in register.get_registered_kernels().items() if not kernel._disabled
    }
    if "silu_mul_fp8" in known:  # which makes its output itself
        known["silu_and_mul_quant"] = lambda out, x, scale: out.set_(known["silu_mul_fp8"](x, scale))
    return SimpleNamespace(**known)


def helion_peer(prepared: Prepared) -> Peer | None:
    """vLLM's Helion kernel."""
    c, op = helion_library(), replaced(prepared.plan.producer, prepared.plan.scheme).op
    return ops_peer(c, prepared) if hasattr(c, op.removeprefix("_C.")) else None


@lru_cache
def flashinfer_norms() -> Any | None:
    """`flashinfer.norm`, or None where FlashInfer is not installed."""
    try:
        import flashinfer.norm

        return flashinfer.norm
    except ImportError:
        return None


def flashinfer_peer(prepared: Prepared) -> Peer | None:
    """FlashInfer's RMS norms with a static scale, by CUDA or by CuTe DSL as FlashInfer chooses. It has no other op that
    writes just this: `fused_add_rmsnorm_fp8_block_quant` writes y too, `layernorm_quant` wants fp32 weights."""
    norms, plan = flashinfer_norms(), prepared.plan
    codes = torch.float8_e4m3fn, torch.float8_e5m2
    fits = plan.producer.name == "rms_norm" and plan.scheme.granularity == "tensor"
    if norms is None or plan.device.type != "cuda" or not fits or plan.scheme.code.torch_dtype not in codes:
        return None
    job = job_of(prepared)
    weight, eps = job.rest
    if job.residual is None:
        return Peer(partial(norms.rmsnorm_quant, job.out, job.x, weight, job.inputs.scale, eps), job.outputs)
    given = job.out, job.x, job.residual, weight, job.inputs.scale, eps
    return Peer(partial(norms.fused_add_rmsnorm_quant, *given), job.outputs)


def formula_of(prepared: Prepared) -> Callable[..., tuple]:
    """(arguments, options, inputs) -> codes, scales, side outputs: the torch formulas of the producer and the
    scheme."""
    producer, scheme = prepared.plan.producer, prepared.plan.scheme

    def formula(arguments: tuple, options: dict[str, Any], inputs: Any) -> tuple:
        y, side_outputs = producer.reference(*arguments, **options, precision=torch.float32)
        codes, fitted = scheme.reference(y, inputs)
        return codes, scheme.rule.reference_store(fitted[0]), side_outputs

    return formula


def compiled_peer(prepared: Prepared, compiled: Callable[..., tuple], alias: Callable[[Any], Any]) -> Peer:
    """`compiled` on the aliases of what is given."""
    # Each case is one more specialization of the same function.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1 << 20
    plan = prepared.plan
    options = {k: alias(v) for k, v in prepared.options.items() if k not in plan.producer.mutates}
    call = partial(compiled, tuple(map(alias, prepared.arguments)), options, prepared.inputs)

    def outputs() -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        codes, scales, side_outputs = call()
        return (
            codes.view(torch.uint8),
            scales if plan.scheme.dynamic else None,
            side_outputs[0] if side_outputs else None,
        )

    return Peer(call, outputs)


def inductor_peer(prepared: Prepared) -> Peer:
    """torch.compile of the formulas, for static shapes."""
    compiled = torch.compile(formula_of(prepared), dynamic=False, fullgraph=True)
    return compiled_peer(prepared, compiled, lambda value: value)


def inductor_dynamic_peer(prepared: Prepared) -> Peer:
    """torch.compile of the formulas, for any number of tokens but one, which torch compiles by itself."""
    formula, rows = formula_of(prepared), prepared.plan.rows

    def any_tokens(*given: Any) -> tuple:  # its compiled code is found by this function, not by `formula`
        return formula(*given)

    def alias(value: Any) -> Any:
        """Another tensor in the same memory, to be marked."""
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == rows > 1:
            value = value.detach()
            torch._dynamo.mark_dynamic(value, 0)
        return value

    return compiled_peer(prepared, torch.compile(any_tokens, fullgraph=True), alias)


PEERS: dict[str, Callable[[Prepared], Peer | None]] = {
    "tq": tq_peer,
    "vllm": vllm_peer,
    "inductor": inductor_peer,
    "inductor_dynamic": inductor_dynamic_peer,
    "helion": helion_peer,
    "flashinfer": flashinfer_peer,
}
