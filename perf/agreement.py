"""What fused boundaries of an engine made, beside what vLLM's unfused ops make of the same tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

NORM_ROUNDINGS = ("none", "after_weight", "before_and_after_weight")
ACTIVATION_ROUNDINGS = ("none", "product", "activation_and_product")


class Quantized(NamedTuple):
    """Codes as bytes [M, N], scales [M, G] as the consumer stores them, and the new residual."""

    codes: torch.Tensor
    scales: torch.Tensor
    residual: torch.Tensor | None = None


def quantizer_of(linear: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The quantizer that the kernel of `linear` runs on an input that is not quantized."""
    from vllm import _custom_ops as ops

    from tq.contract import get_input_quant_scales
    from tq.contract.scales import kernel_of

    scales, kernel = get_input_quant_scales(linear), kernel_of(linear)
    if hasattr(kernel, "quant_fp8"):
        return lambda y: kernel.quant_fp8(y, scales.static_scale, scales.scale_ub)
    return lambda y: ops.scaled_int8_quant(y, scales.static_scale, None, symmetric=True)[:2]


def stock(producer: str, args: tuple, kwargs: dict[str, Any], quantize: Callable[..., Any]) -> Quantized:
    """What vLLM's unfused CUDA ops give: the norm or activation in bf16, then the consumer's quantizer."""
    c, x, residual = torch.ops._C, args[0], kwargs.get("residual")
    if producer == "silu_mul":
        y = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
        c.silu_and_mul(y, x)
    elif residual is None:
        y = torch.empty_like(x)
        c.rms_norm(y, x, args[1], args[2])
    else:
        y, residual = x.clone(), residual.clone()
        c.fused_add_rms_norm(y, residual, args[1], args[2])
    codes, scales = quantize(y.view(-1, y.shape[-1]))
    return Quantized(codes.view(torch.uint8), scales, residual)


@torch.compile(dynamic=True)
def inductor_norm(quantize: Any, x: Any, weight: Any, eps: float, scale: Any, residual: Any) -> Any:
    z = x.float() if residual is None else x.float() + residual.float()
    y = (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype) * weight
    codes, _ = quantize(y.to(x.dtype).view(-1, x.shape[-1]), scale)
    return codes if residual is None else (codes, z.to(x.dtype))


@torch.compile(dynamic=True)
def inductor_activation(quantize: Any, x: Any, scale: Any) -> Any:
    half = x.shape[-1] // 2
    y = torch.nn.functional.silu(x[..., :half]) * x[..., half:]
    codes, _ = quantize(y.view(-1, half), scale)
    return codes


def against_inductor(producer: str, args: tuple, kwargs: dict[str, Any], kernel: Any) -> dict[str, int]:
    """Codes other than Inductor's, for each place where tq can round."""
    import tq

    if not hasattr(kernel, "quant_fp8"):
        return {}
    quantize, scale = kernel.quant_fp8.forward_native, kwargs.get("scale")
    if producer == "rms_norm":
        theirs = inductor_norm(quantize, *args, scale, kwargs.get("residual"))
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        options: list[dict[str, Any]] = [{"rounding": rounding, "round_residual": False} for rounding in NORM_ROUNDINGS]
    else:
        theirs = inductor_activation(quantize, args[0], scale)
        options = [{"rounding": rounding} for rounding in ACTIVATION_ROUNDINGS]
    given = {name: value for name, value in kwargs.items() if name not in ("residual_out", "round_residual")}
    found = {}
    for option in options:
        ours = tq.PRODUCERS[producer](*args, **{**given, **option})
        ours = ours[0] if isinstance(ours, tuple) else ours
        found[f"codes_differ_from_inductor_rounding_{option['rounding']}"] = differing(ours.data, theirs)
    return found


def differing(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Elements that differ, of the rows of `ours`: vLLM's may be followed by padding."""
    theirs = theirs[: ours.numel() // ours.shape[-1]]
    if ours.element_size() == 1:
        ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
    return int((ours.reshape(theirs.shape) != theirs).sum())


def same_place(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether scales lie the same way; a stride of a size below 2 says nothing."""
    strides = zip(ours.shape, ours.stride(), theirs.stride(), strict=True)
    return ours.dtype == theirs.dtype and all(mine == other for size, mine, other in strides if size > 1)


def steps(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Greatest distance of two codes in the order of their values; the two zeros of E4M3 are a step apart."""

    def ordinal(codes: torch.Tensor) -> torch.Tensor:
        if codes.dtype == torch.int8:
            return codes.int()
        bits = codes.view(torch.uint8).int()
        return torch.where(bits >= 128, 127 - bits, bits)

    theirs = theirs[: ours.numel() // ours.shape[-1]].view(ours.dtype)
    return int((ordinal(ours.reshape(theirs.shape)) - ordinal(theirs)).abs().max())


def compare(llm: Any, run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Per producer and scheme: calls, codes and scales seen while `run()` generates, and what differs."""
    from tq.contract import observe, report
    from tq.contract.scales import kernel_of

    seen: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    (model,) = llm.apply_model(lambda model: model)
    consumers = {boundary.name: model.get_submodule(boundary.consumer) for boundary in report().boundaries}

    def look(boundary: str, producer: str, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        activation, *others = result if isinstance(result, tuple) else (result,)
        residual = others[0] if "residual" in kwargs else None
        linear = consumers[boundary]
        theirs = stock(producer, args, kwargs, quantizer_of(linear))
        rows = activation.data.numel() // activation.data.shape[-1]
        scales = theirs.scales[:rows] if theirs.scales.dim() == 2 else theirs.scales
        count = seen[producer, f"{activation.scheme} {activation.layout}"]
        count["calls"] += 1
        count["codes"] += activation.data.numel()
        count["codes_differ"] += differing(activation.data, theirs.codes)
        count["worst_step"] = max(count["worst_step"], steps(activation.data, theirs.codes))
        count["scales"] += activation.scale.numel()
        count["scales_differ"] += int((activation.scale.view(scales.shape) != scales).sum())
        count["scales_elsewhere"] += activation.scale.dim() == 2 and not same_place(activation.scale, scales)
        if residual is not None:
            count["residual_differ"] += int((residual != theirs.residual).sum())
        for name, differ in against_inductor(producer, args, kwargs, kernel_of(linear)).items():
            count[name] += differ

    with observe(look):
        run()
    return [{"agreement": producer, "scheme": scheme, **count} for (producer, scheme), count in seen.items()]
