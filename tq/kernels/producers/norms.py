"""y = (z - mean) / sqrt(mean((z - mean)^2) + eps) * (weight + offset) + bias, with z = x or x + residual: what norms of
a row share. For an RMS norm mean and bias are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.kernels.device import Rows, load_narrow, load_rows, round_to, store_rows, widen
from tq.kernels.producer import (
    INPUT_DTYPES,
    Bound,
    Reference,
    as_rows,
    check_choice,
    check_like,
    check_rows,
    check_written,
    constant,
    round_through,
)


class Args(NamedTuple):
    x: Rows
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    residual: Rows | None
    residual_out: Rows | None
    WEIGHT_OFFSET: tl.constexpr
    ROUNDING: tl.constexpr
    ROUND_RESIDUAL: tl.constexpr


@triton.jit
def load_sum(args, row, col, mask):
    """z"""
    z = load_rows(args.x, row, col, mask)
    if args.residual is not None:
        z += load_rows(args.residual, row, col, mask)
    return z


@triton.jit
def load_weights(args, col, mask):
    """The weight, and the bias if there is one."""
    weights = (load_narrow(args.weight, col, mask),)
    if args.bias is not None:
        weights = weights + (load_narrow(args.bias, col, mask),)
    return weights


@triton.jit
def rounded_sum(args, z):
    """z as the mean and the norm see it."""
    if args.ROUND_RESIDUAL:
        return round_to(z, args.residual.data.dtype.element_ty)
    return z


@triton.jit
def add_value(args, loaded, means, total):
    return total + rounded_sum(args, loaded)


@triton.jit
def add_square(args, loaded, means, total):
    """The square of the distance from the mean, if that is an earlier moment."""
    z = rounded_sum(args, loaded)
    if len(means) > 0:
        z -= means[0]
    return tl.fma(z, z, total)


@triton.jit
def normalize(args, loaded, means, row, col, mask):
    """The last moment is the mean of squares; where there is one before it, that is the mean."""
    z, weights = loaded
    weight = widen(weights[0])
    if args.residual_out is not None:
        store_rows(args.residual_out, row, col, z, mask)
    y = rounded_sum(args, z)
    if len(means) > 1:
        y -= means[0]
    y *= tl.rsqrt(means[len(means) - 1] + args.eps)
    dtype: tl.constexpr = args.x.data.dtype.element_ty
    weight_dtype: tl.constexpr = args.weight.dtype.element_ty
    if args.ROUNDING == "before_and_after_weight":
        y = round_to(y, weight_dtype)
    if args.WEIGHT_OFFSET != 0.0:
        weight += args.WEIGHT_OFFSET
    y *= weight
    if args.bias is not None:
        y += widen(weights[1])
    if args.ROUNDING == "before_and_after_weight" and weight_dtype != dtype:
        y = round_to(y, weight_dtype)
    return y if args.ROUNDING == "none" else round_to(y, dtype)


RMS, CENTERED = (add_square,), (add_value, add_square)


def bind_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    rounding: str,
    round_residual: bool,
    *,
    weight_offset: float = 0.0,
    bias: torch.Tensor | None = None,
) -> Bound:
    """The `Bound` of a norm."""
    start, end = (as_rows(x), weight, bias, eps), (constant(weight_offset), constant(rounding))
    if residual is None:
        return Bound(Args(*start, None, None, *end, constant(False)), x.shape, x.dtype, x.device)
    if residual_out is None:
        residual_out = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    args = Args(*start, as_rows(residual), as_rows(residual_out), *end, constant(round_residual))
    return Bound(args, x.shape, x.dtype, x.device, (residual_out,))


def check_vector(op: str, name: str, vector: torch.Tensor, shape: torch.Size, device: torch.device) -> None:
    """Raises unless `vector`, read for every row, has this shape and stride 1."""
    check_like(op, name, vector, shape, device)
    if vector.dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: {name} must be bfloat16, float16 or float32, got {vector.dtype}; cast it first")
    if vector.stride(0) != 1:
        raise ValueError(f"{op}: stride of {name} must be 1, got {vector.stride(0)}; pass {name}.contiguous()")


def check_eps(op: str, eps: float) -> None:
    """Raises unless `eps` is positive."""
    if not eps > 0.0:
        raise ValueError(f"{op}: eps must be positive, got {eps}; a zero row has no norm without it")


def check_norm(
    op: str,
    roundings: tuple[str, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    rounding: str,
    round_residual: bool,
) -> None:
    """What every norm asks of its arguments."""
    check_rows(op, "x", x)
    check_vector(op, "weight", weight, x.shape[-1:], x.device)
    check_eps(op, eps)
    check_choice(op, "rounding", rounding, roundings)
    if bias is not None:
        check_vector(op, "bias", bias, x.shape[-1:], x.device)
    if residual is not None:
        check_rows(op, "residual", residual, like=x)
    elif residual_out is not None:
        raise ValueError(f"{op}: residual_out needs residual, got None; pass the residual to add")
    if residual is not None and residual_out is not None:
        rows = check_rows(op, "residual_out", residual_out, like=x)
        check_written(op, "residual_out", residual_out, rows, residual.dtype)


def reference_norm(
    centered: bool,
    weight_offset: float,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    rounding: str,
    round_residual: bool,
    precision: torch.dtype = torch.float32,
) -> Reference:
    """The torch form of a norm; `centered`: of z less its mean."""
    z = x.reshape(-1, x.shape[-1]).to(precision)
    side_outputs: tuple[torch.Tensor, ...] = ()
    if residual is not None:
        z = z + residual.reshape(-1, x.shape[-1]).to(precision)
        side_outputs = (z.to(residual.dtype).view(x.shape),)
        if round_residual:
            z = round_through(z, residual.dtype)
    if centered:
        z = z - z.mean(-1, keepdim=True)
    y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    if rounding == "before_and_after_weight":
        y = round_through(y, weight.dtype)
    y = y * (weight.to(precision) + weight_offset)
    if bias is not None:
        y = y + bias.to(precision)
    if rounding == "before_and_after_weight":
        y = round_through(y, weight.dtype)
    return Reference(y if rounding == "none" else round_through(y, x.dtype), side_outputs)


def example_norm(
    offset: float, rows: int, hidden_size: int, dtype: torch.dtype, device: Any
) -> tuple[tuple, dict[str, Any]]:
    """x and a residual, unit normal, and a weight about 1, less `offset`."""
    x, residual = torch.randn(2, rows, hidden_size, device=device).to(dtype)
    weight = (1.0 - offset + 0.1 * torch.randn(hidden_size, device=device)).to(dtype)
    return (x, weight, 1e-6), {"residual": residual}
