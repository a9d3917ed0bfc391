"""y = act(x), and y = act(gate) * up with gate and up the halves of x: what the activations share.

An activation is a jit function (value, parameters) -> value in fp32 that travels in the arguments of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.kernels.device import Rows, load_rows, reciprocal, round_to
from tq.kernels.producer import Bound, Reference, as_rows, check_choice, check_rows, constant, round_through

ROUNDINGS = ("none", "output")
MUL_ROUNDINGS = ("none", "product", "activation_and_product")


class Args(NamedTuple):
    """up: None where nothing is multiplied. activate: the activation, given gate and `parameters`."""

    gate: Rows
    up: Rows | None
    activate: Any
    parameters: tuple[float, ...]
    ROUNDING: tl.constexpr


@triton.jit
def sigmoid(value):
    """1 / (1 + exp(-value)), for every value: exp2 overflows to infinity, of which the reciprocal is 0. exp2 and
    reciprocal rather than exp and a division: 6 instructions instead of 17."""
    return reciprocal(1.0 + tl.exp2(value * -1.4426950408889634))


@triton.jit
def silu(value, parameters):
    return value * sigmoid(value)


@triton.jit
def gelu_erf(value, parameters):
    return 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))


@triton.jit
def gelu_tanh(value, parameters):
    """value / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (value + 0.044715 * value^3), as value * sigmoid(2 * u): no
    quotient of infinities, and no difference of near numbers where tanh is almost -1."""
    return value * sigmoid(value * (1.5957691216057308 + 0.07135481282553977 * (value * value)))


@triton.jit
def relu2(value, parameters):
    """Not by a maximum, which would lose a NaN."""
    positive = tl.where(value <= 0.0, 0.0, value)
    return positive * positive


@triton.jit
def fatrelu(value, parameters):
    return tl.where(value <= parameters[0], 0.0, value)


@triton.jit
def multiply(args, activation, factor):
    """activation * factor, rounded where the arguments say."""
    dtype: tl.constexpr = args.gate.data.dtype.element_ty
    if args.ROUNDING == "activation_and_product":
        activation = round_to(activation, dtype)
    product = activation * factor
    return product if args.ROUNDING == "none" else round_to(product, dtype)


@triton.jit
def load_act(args, row, col, mask):
    y = args.activate(load_rows(args.gate, row, col, mask), args.parameters)
    return y if args.ROUNDING == "none" else round_to(y, args.gate.data.dtype.element_ty)


@triton.jit
def load_act_mul(args, row, col, mask):
    activation = args.activate(load_rows(args.gate, row, col, mask), args.parameters)
    return multiply(args, activation, load_rows(args.up, row, col, mask))


def bind_act(x: torch.Tensor, activate: Any, rounding: str) -> Bound:
    """The `Bound` of act(x)."""
    return Bound(Args(as_rows(x), None, activate, (), constant(rounding)), x.shape, x.dtype, x.device)


def halves(x: torch.Tensor) -> tuple[Rows, Rows]:
    """The gate and the up of x [..., gate | up]."""
    rows, half = as_rows(x), x.shape[-1] // 2
    return Rows(rows.data[:, :half], rows.stride), Rows(rows.data[:, half:], rows.stride)


def half_shape(x: torch.Tensor) -> torch.Size:
    """[..., N] of x [..., 2N]."""
    return torch.Size((*x.shape[:-1], x.shape[-1] // 2))


def bind_mul(x: torch.Tensor, activate: Any, rounding: str, parameters: tuple[float, ...] = ()) -> Bound:
    """The `Bound` of act(gate) * up."""
    args = Args(*halves(x), activate, parameters, constant(rounding))
    return Bound(args, half_shape(x), x.dtype, x.device)


def check_act(op: str, x: torch.Tensor, *, rounding: str) -> None:
    """What every act(x) asks of its arguments."""
    check_rows(op, "x", x)
    check_choice(op, "rounding", rounding, ROUNDINGS)


def check_mul(op: str, x: torch.Tensor, *, rounding: str) -> None:
    """What every act(gate) * up asks of its arguments."""
    check_rows(op, "x", x, parts=2)
    check_choice(op, "rounding", rounding, MUL_ROUNDINGS)


def reference_act(
    activate: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *,
    rounding: str,
    precision: torch.dtype = torch.float32,
    **parameters: Any,
) -> Reference:
    """The torch form of act(x), `activate` with its own options."""
    y = activate(x.reshape(-1, x.shape[-1]).to(precision), **parameters)
    return Reference(y if rounding == "none" else round_through(y, x.dtype))


def reference_product(activation: torch.Tensor, factor: torch.Tensor, rounding: str, dtype: torch.dtype) -> Reference:
    """The torch form of `multiply`."""
    if rounding == "activation_and_product":
        activation = round_through(activation, dtype)
    product = activation * factor
    return Reference(product if rounding == "none" else round_through(product, dtype))


def reference_mul(
    activate: Callable[..., torch.Tensor],
    x: torch.Tensor,
    *,
    rounding: str,
    precision: torch.dtype = torch.float32,
    **parameters: Any,
) -> Reference:
    """The torch form of act(gate) * up, `activate` with its own options."""
    gate, up = x.reshape(-1, x.shape[-1]).to(precision).chunk(2, -1)
    return reference_product(activate(gate, **parameters), up, rounding, x.dtype)


def reference_silu(value: torch.Tensor) -> torch.Tensor:
    """value / (1 + exp(-value))"""
    return value / (1.0 + torch.exp(-value))


def reference_gelu(value: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The torch form of `gelu_erf` or `gelu_tanh`."""
    if approximate == "tanh":
        return value / (1.0 + torch.exp(-value * (1.5957691216057308 + 0.07135481282553977 * value.square())))
    return 0.5 * value * (1.0 + torch.erf(value * 0.7071067811865476))


def example_mul(rows: int, hidden_size: int, dtype: torch.dtype, device: Any) -> tuple[tuple, dict[str, Any]]:
    """x [rows, 2 * hidden size], unit normal."""
    return (torch.randn(rows, 2 * hidden_size, device=device).to(dtype),), {}


# By the name torch has for it.
GELUS = {"none": gelu_erf, "tanh": gelu_tanh}
