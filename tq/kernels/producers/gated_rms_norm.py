"""y = norm(x) * act(gate) or norm(x * act(gate)), norm(z) = z / sqrt(mean(z^2) + eps) * weight, by groups of a row."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.activation import QuantizedActivation
from tq.kernels.device import Rows, load_narrow, load_rows, round_to, widen
from tq.kernels.launch import call
from tq.kernels.producer import (
    Bound,
    Producer,
    Reference,
    as_rows,
    check_choice,
    check_rows,
    constant,
    register_producer,
    round_through,
)
from tq.kernels.producers.activations import sigmoid, silu
from tq.kernels.producers.norms import check_eps, check_vector
from tq.kernels.producers.quantize import followed_by_quantizer

OP = "gated_rms_norm"
ROUNDINGS = ("none", "output")


class Args(NamedTuple):
    """SHARED: size of a group where all groups share their weights, else 0."""

    x: Rows
    gate: Rows
    weight: torch.Tensor
    eps: float
    activate: Any
    SHARED: tl.constexpr
    NORM_FIRST: tl.constexpr
    ROUNDING: tl.constexpr


@triton.jit
def sigmoid_act(value, parameters):
    return sigmoid(value)


@triton.jit
def load_gated(args, row, col, mask):
    """What is normalized, and what the norm is multiplied with."""
    x = load_rows(args.x, row, col, mask)
    gate = args.activate(load_rows(args.gate, row, col, mask), ())
    if not args.NORM_FIRST:
        x *= gate
    return x, gate


@triton.jit
def add_square(args, loaded, means, total):
    return tl.fma(loaded[0], loaded[0], total)


@triton.jit
def load_weight(args, col, mask):
    place = col
    if args.SHARED > 0:
        place = col % args.SHARED
    return load_narrow(args.weight, place, mask)


@triton.jit
def normalize(args, loaded, means, row, col, mask):
    x, gate = loaded[0]
    y = x * tl.rsqrt(means[0] + args.eps) * widen(loaded[1])
    if args.NORM_FIRST:
        y *= gate
    return y if args.ROUNDING == "none" else round_to(y, args.x.data.dtype.element_ty)


ACTIVATIONS = {"silu": silu, "sigmoid": sigmoid_act}


def bind(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    rounding: str = "output",
) -> Bound:
    shared = 0 if weight.shape[0] == x.shape[-1] else weight.shape[0]
    constants = map(constant, (shared, norm_before_gate, rounding))
    args = Args(as_rows(x), as_rows(gate), weight, eps, ACTIVATIONS[activation], *constants)
    mean_group = 0 if group_size == x.shape[-1] else group_size or 0
    return Bound(args, x.shape, x.dtype, x.device, mean_group=mean_group)


def check(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    rounding: str,
) -> None:
    check_rows(OP, "x", x)
    check_rows(OP, "gate", gate, like=x)
    hidden_size = x.shape[-1]
    if group_size is not None and group_size != hidden_size:
        if group_size <= 0 or group_size & (group_size - 1) or hidden_size % group_size:
            raise ValueError(
                f"{OP}: group_size must be a power of two that divides the hidden size {hidden_size}, or the hidden "
                f"size, got {group_size}; None is the whole row"
            )
    shared = isinstance(weight, torch.Tensor) and weight.shape == (group_size,)
    check_vector(OP, "weight", weight, weight.shape if shared else x.shape[-1:], x.device)
    check_eps(OP, eps)
    check_choice(OP, "activation", activation, tuple(ACTIVATIONS))
    check_choice(OP, "rounding", rounding, ROUNDINGS)


def reference(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    rounding: str,
    precision: torch.dtype = torch.float32,
) -> Reference:
    z, factor = (each.reshape(-1, x.shape[-1]).to(precision) for each in (x, gate))
    factor = (factor if activation == "silu" else 1.0) / (1.0 + torch.exp(-factor))
    z = z if norm_before_gate else z * factor
    groups = z.unflatten(-1, (-1, group_size or x.shape[-1]))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    y = y * weight.to(precision).repeat(x.shape[-1] // weight.shape[0])
    y = y * factor if norm_before_gate else y
    return Reference(y if rounding == "none" else round_through(y, x.dtype))


def example(rows: int, hidden_size: int, dtype: torch.dtype, device: Any) -> tuple[tuple, dict[str, Any]]:
    """In groups of at most 128, where a power of two of 8 or more divides the hidden size."""
    x, gate = torch.randn(2, rows, hidden_size, device=device).to(dtype)
    weight = (1.0 + 0.1 * torch.randn(hidden_size, device=device)).to(dtype)
    group_size = min(hidden_size & -hidden_size, 128)
    return (x, gate, weight, 1e-6), {"group_size": group_size} if group_size >= 8 else {}


GATED_RMS_NORM = register_producer(
    Producer(
        OP,
        load=load_gated,
        moments=(add_square,),
        apply=normalize,
        shared=load_weight,
        bind=bind,
        check=check,
        reference=reference,
        replaces=partial(followed_by_quantizer, "vllm.fla_rms_norm_gated", {"rounding": "output"}),
        example=example,
    )
)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    scheme: str,
    group_size: int | None = None,
    norm_before_gate: bool | None = None,
    activation: str | None = None,
    rounding: str | None = None,
    **options: Any,
) -> QuantizedActivation:
    """y = norm(x) * act(gate), or norm(x * act(gate)) where norm_before_gate is False, with norm(z) =
    z / sqrt(mean(z^2) + eps) * weight; data = encode(y / scale).

    Shapes: x, gate [..., N], each bf16, fp16 or fp32 of its own, last stride 1; N at most 32768. The mean is over each
    `group_size` consecutive elements (a power of two that divides N), or over the row for None. weight [N], or
    [group_size] where all groups share it (Qwen3-Next: one for all heads).
    activation: "silu" (the default), g / (1 + exp(-g)), or "sigmoid", 1 / (1 + exp(-g)). norm_before_gate: True by
    default.
    Rounding: "none" keeps fp32, "output" rounds y to x's dtype; None is what the replaced op does. The mean is summed
    in fp32 in an order of its own. Raises ValueError for eps <= 0 or sizes, shapes, strides or devices that do not fit;
    options and errors common to all producers are those of `tq.kernels.launch.call`.
    Source: vLLM 0.33 RMSNormGated (`forward_static`, all in fp32, rounded once; `fla_rms_norm_gated` on a GPU),
    followed by the quantizer.
    """
    given = {
        "group_size": group_size,
        "norm_before_gate": norm_before_gate,
        "activation": activation,
        "rounding": rounding,
        **options,
    }
    return call(GATED_RMS_NORM, (x, gate, weight, eps), scheme, given)
