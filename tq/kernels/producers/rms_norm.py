"""y = z / sqrt(mean(z^2) + eps) * weight, with z = x or x + residual."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.activation import QuantizedActivation
from tq.kernels.device import Rows, load_rows, load_vector, round_to, store_rows
from tq.kernels.producer import (
    INPUT_DTYPES,
    Bound,
    Producer,
    Reference,
    Replaced,
    as_rows,
    check_choice,
    check_like,
    check_rows,
    check_written,
    constant,
    register_producer,
    round_through,
)
from tq.kernels.rules import AMAX_MULTIPLYING
from tq.kernels.schemes import VLLM_MIN_SCALE, Scheme

ROUNDINGS = ("none", "after_weight", "before_and_after_weight")


class Args(NamedTuple):
    x: Rows
    weight: torch.Tensor
    eps: float
    residual: Rows | None
    residual_out: Rows | None
    ROUNDING: tl.constexpr
    ROUND_RESIDUAL: tl.constexpr


@triton.jit
def load_sum(args, row, col, mask):
    """z, and the weight: asked for now, it is there when the mean is."""
    z = load_rows(args.x, row, col, mask)
    if args.residual is not None:
        z += load_rows(args.residual, row, col, mask)
    return z, load_vector(args.weight, col, mask)


@triton.jit
def rounded_sum(args, z):
    """z as the mean and the norm see it."""
    if args.ROUND_RESIDUAL:
        return round_to(z, args.residual.data.dtype.element_ty)
    return z


@triton.jit
def add_square(args, loaded, means, total):
    z = rounded_sum(args, loaded[0])
    return tl.fma(z, z, total)


@triton.jit
def normalize(args, loaded, means, row, col, mask):
    z, weight = loaded
    if args.residual_out is not None:
        store_rows(args.residual_out, row, col, z, mask)
    y = rounded_sum(args, z) * tl.rsqrt(means[0] + args.eps)
    weight_dtype: tl.constexpr = args.weight.dtype.element_ty
    if args.ROUNDING == "before_and_after_weight":
        y = round_to(y, weight_dtype)
    y *= weight
    if args.ROUNDING == "before_and_after_weight":
        y = round_to(y, weight_dtype)
    return y if args.ROUNDING == "none" else round_to(y, args.x.data.dtype.element_ty)


def bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    rounding: str = "before_and_after_weight",
    round_residual: bool = False,
) -> Bound:
    if residual is None:
        args = Args(as_rows(x), weight, eps, None, None, constant(rounding), constant(False))
        return Bound(args, x.shape, x.dtype, x.device)
    if residual_out is None:
        residual_out = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    sums = as_rows(residual), as_rows(residual_out)
    args = Args(as_rows(x), weight, eps, *sums, constant(rounding), constant(round_residual))
    return Bound(args, x.shape, x.dtype, x.device, (residual_out,))


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    rounding: str,
    round_residual: bool,
) -> None:
    op = "rms_norm"
    check_rows(op, "x", x)
    check_like(op, "weight", weight, x.shape[-1:], x.device)
    if weight.dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: weight must be bfloat16, float16 or float32, got {weight.dtype}; cast it first")
    if weight.stride(0) != 1:
        raise ValueError(f"{op}: stride of weight must be 1, got {weight.stride(0)}; pass weight.contiguous()")
    if not eps > 0.0:
        raise ValueError(f"{op}: eps must be positive, got {eps}; a zero row has no norm without it")
    check_choice(op, "rounding", rounding, ROUNDINGS)
    if residual is not None:
        check_rows(op, "residual", residual, like=x)
    elif residual_out is not None:
        raise ValueError(f"{op}: residual_out needs residual, got None; pass the residual to add")
    if residual is not None and residual_out is not None:
        rows = check_rows(op, "residual_out", residual_out, like=x)
        check_written(op, "residual_out", residual_out, rows, residual.dtype)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    rounding: str,
    round_residual: bool,
    precision: torch.dtype = torch.float32,
) -> Reference:
    z = x.reshape(-1, x.shape[-1]).to(precision)
    side_outputs: tuple[torch.Tensor, ...] = ()
    if residual is not None:
        z = z + residual.reshape(-1, x.shape[-1]).to(precision)
        side_outputs = (z.to(residual.dtype).view(x.shape),)
        if round_residual:
            z = round_through(z, residual.dtype)
    y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    if rounding == "before_and_after_weight":
        y = round_through(y, weight.dtype)
    y = y * weight.to(precision)
    if rounding == "before_and_after_weight":
        y = round_through(y, weight.dtype)
    return Reference(y if rounding == "none" else round_through(y, x.dtype), side_outputs)


def replaces(scheme: Scheme) -> Replaced:
    if scheme.quantizer == "_C.static_scaled_fp8_quant":
        options = {"rounding": "after_weight", "round_residual": True}
        return Replaced("_C.rms_norm_static_fp8_quant", options)
    options = {"rounding": "before_and_after_weight", "round_residual": False}
    if scheme.quantizer == "_C.dynamic_per_token_scaled_fp8_quant":
        return Replaced("_C.rms_norm_dynamic_per_token_quant", options)
    if scheme.quantizer == "_C.per_token_group_fp8_quant" and scheme.rule is AMAX_MULTIPLYING:
        return Replaced("_C.rms_norm_per_block_quant", options, VLLM_MIN_SCALE)
    # No fused op has these scales: what the norm and the quantizer give one after the other.
    options = {"rounding": "after_weight", "round_residual": True}
    return Replaced(f"_C.(fused_add_)rms_norm + {scheme.quantizer}", options)


def example(rows: int, hidden_size: int, dtype: torch.dtype, device: Any) -> tuple[tuple, dict[str, Any]]:
    x, residual = torch.randn(2, rows, hidden_size, device=device).to(dtype)
    weight = (1.0 + 0.1 * torch.randn(hidden_size, device=device)).to(dtype)
    return (x, weight, 1e-6), {"residual": residual}


RMS_NORM = register_producer(
    Producer(
        "rms_norm",
        load=load_sum,
        moments=(add_square,),
        apply=normalize,
        bind=bind,
        check=check,
        reference=reference,
        replaces=replaces,
        mutates=("residual_out",),
        example=example,
        optional=("residual",),
    )
)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    scheme: str,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    rounding: str | None = None,
    round_residual: bool | None = None,
    **options: Any,
) -> QuantizedActivation | tuple[QuantizedActivation, torch.Tensor]:
    """y = z / sqrt(mean(z^2) + eps) * weight, z = x + residual; data = encode(y / scale), residual_out = z.

    Shapes: x, residual, residual_out [..., N], weight [N], each bf16, fp16 or fp32 of its own, last stride 1; N at most
    32768. Returns the activation, and with `residual` a pair with the new residual: a new tensor, or residual_out,
    which may be `residual` itself.
    Rounding: "none" keeps fp32; "after_weight" rounds y to x's dtype; "before_and_after_weight" rounds the normalized
    value and its product to the weight's dtype, then y to x's. round_residual: the norm is of z rounded as it is
    stored, else of the fp32 sum. None is what the replaced op does. The mean is summed in fp32 in an order of its own.
    Raises ValueError for eps <= 0 or shapes, strides or devices that do not fit; options and errors common to all
    producers are those of `tq.kernels.launch.call`.
    Source: vLLM 0.33 `_C.(fused_add_)rms_norm_static_fp8_quant` (fp8_tensor), `_C.rms_norm_dynamic_per_token_quant`
    (fp8_token), `_C.rms_norm_per_block_quant` (fp8_group64, fp8_group128); elsewhere the plain norm followed by the
    quantizer.
    """
    return RMS_NORM(
        x,
        weight,
        eps,
        scheme=scheme,
        residual=residual,
        residual_out=residual_out,
        rounding=rounding,
        round_residual=round_residual,
        **options,
    )
