"""What tq is measured against: named baselines that run the same call, or None where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tq.kernels.codes import E4M3
from tq.kernels.launch import run
from tq.kernels.plan import Prepared
from tq.kernels.rules import AMAX_DIVIDING, AMAX_MULTIPLYING, STATIC


class Peer(NamedTuple):
    """call: does the work once. outputs: what it wrote, as (codes uint8 [M, N], scales or None, residual or None)."""

    call: Callable[[], Any]
    outputs: Callable[[], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


def tq_peer(prepared: Prepared) -> Peer:
    """The kernel itself, into outputs that exist already."""
    residual = prepared.bound.side_outputs[0] if prepared.bound.side_outputs else None
    codes = prepared.codes.view(prepared.plan.rows, prepared.plan.hidden_size)
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


def vllm_peer(prepared: Prepared) -> Peer | None:
    """vLLM's CUDA op for this producer and scheme, its outputs allocated beforehand as in vLLM's graphs."""
    library = vllm_library()
    scheme, x = prepared.plan.scheme, prepared.arguments[0]
    plain = scheme.code is E4M3 and scheme.rule in (STATIC, AMAX_DIVIDING, AMAX_MULTIPLYING)
    if library is None or x.device.type != "cuda" or not plain or scheme.group not in (0, 64, 128):
        return None
    shape = (prepared.plan.rows, prepared.plan.hidden_size)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((prepared.plan.rows, scheme.groups(prepared.plan.hidden_size)), device=x.device)
    residual = prepared.options.get("residual")
    residual = None if residual is None else residual.clone()
    call = _vllm_call(library, prepared, out, scales, residual)
    if call is None:
        return None
    return Peer(call, lambda: (out.view(torch.uint8), scales if scheme.dynamic else None, residual))


def _vllm_call(
    c: Any, prepared: Prepared, out: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor | None
) -> Callable[[], Any] | None:
    scale, group, kind = prepared.inputs.scale, prepared.plan.scheme.group, prepared.plan.scheme.granularity
    x, *rest = prepared.arguments
    match prepared.plan.producer.name, kind:
        case "rms_norm", "tensor" if residual is None:
            return lambda: c.rms_norm_static_fp8_quant(out, x, rest[0], scale, rest[1])
        case "rms_norm", "tensor":
            return lambda: c.fused_add_rms_norm_static_fp8_quant(out, x, residual, rest[0], scale, rest[1])
        case "rms_norm", "token":
            return lambda: c.rms_norm_dynamic_per_token_quant(out, x, rest[0], scales, rest[1], None, residual)
        case "rms_norm", "group":
            return lambda: c.rms_norm_per_block_quant(out, x, rest[0], scales, rest[1], None, residual, group, False)
        case "silu_mul", "tensor":
            return lambda: c.silu_and_mul_quant(out, x, scale)
        case "silu_mul", "group":
            return lambda: c.silu_and_mul_per_block_quant(out, x, scales, group, None, False)
        case "silu_mul", "token":
            product = torch.empty(out.shape, dtype=x.dtype, device=x.device)

            def unfused() -> None:
                c.silu_and_mul(product, x)
                c.dynamic_per_token_scaled_fp8_quant(out, product, scales, None)

            return unfused
        case "quantize", "tensor":
            return lambda: c.static_scaled_fp8_quant(out, x, scale, None)
        case "quantize", "token":
            return lambda: c.dynamic_per_token_scaled_fp8_quant(out, x, scales, None)
        case "quantize", "group":
            flags = 1e-10, -448.0, 448.0, False, False, False
            return lambda: c.per_token_group_fp8_quant(x, out, scales, group, *flags)
    return None


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
