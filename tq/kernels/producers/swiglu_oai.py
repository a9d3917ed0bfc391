"""y = gate * sigmoid(alpha * gate) * (up + 1), gate and up clamped: the activation of gpt-oss."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.activation import QuantizedActivation
from tq.kernels.device import Rows, load_rows, widen
from tq.kernels.launch import call
from tq.kernels.producer import Bound, Producer, Reference, as_rows, constant, register_producer
from tq.kernels.producers import activations
from tq.kernels.producers.activations import multiply, sigmoid
from tq.kernels.producers.quantize import followed_by_quantizer


class Args(NamedTuple):
    """up: None where gate holds pairs (gate, up)."""

    gate: Rows
    up: Rows | None
    limit: float
    alpha: float
    ROUNDING: tl.constexpr


@triton.jit
def load_pairs(rows, row, col, mask):
    """rows[row, 2 * col] and rows[row, 2 * col + 1] as fp32, each pair by one load."""
    place = col[:, :, None] * 2 + tl.arange(0, 2)[None, None, :]
    mask, _ = tl.broadcast(mask[:, :, None], place)
    pairs = tl.load(rows.data + ((row * rows.stride)[:, :, None] + place), mask=mask, other=0.0)
    return tl.split(widen(pairs))


@triton.jit
def load_swiglu_oai(args, row, col, mask):
    if args.up is None:
        gate, up = load_pairs(args.gate, row, col, mask)
    else:
        gate = load_rows(args.gate, row, col, mask)
        up = load_rows(args.up, row, col, mask)
    # Not by minimum and maximum, which would lose a NaN.
    gate = tl.where(gate > args.limit, args.limit, gate)
    up = tl.where(up > args.limit, args.limit, tl.where(up < -args.limit, -args.limit, up))
    return multiply(args, gate * sigmoid(gate * args.alpha), up + 1.0)


def bind(
    x: torch.Tensor, *, limit: float = 7.0, alpha: float = 1.702, interleaved: bool = True, rounding: str = "product"
) -> Bound:
    gate, up = (as_rows(x), None) if interleaved else activations.halves(x)
    args = Args(gate, up, limit, alpha, constant(rounding))
    return Bound(args, activations.half_shape(x), x.dtype, x.device)


def check(
    x: torch.Tensor, *, limit: float = 7.0, alpha: float = 1.702, interleaved: bool = True, rounding: str
) -> None:
    activations.check_mul("swiglu_oai", x, rounding=rounding)
    if not limit > 0.0:
        raise ValueError(f"swiglu_oai: limit must be positive, got {limit}; infinity clamps nothing")
    if not math.isfinite(alpha):
        raise ValueError(f"swiglu_oai: alpha must be finite, got {alpha}")


def reference(
    x: torch.Tensor,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    interleaved: bool = True,
    rounding: str,
    precision: torch.dtype = torch.float32,
) -> Reference:
    values = x.reshape(-1, x.shape[-1]).to(precision)
    gate, up = (values[:, ::2], values[:, 1::2]) if interleaved else values.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activations.reference_product(gate / (1.0 + torch.exp(-alpha * gate)), up + 1.0, rounding, x.dtype)


SWIGLU_OAI = register_producer(
    Producer(
        "swiglu_oai",
        load=load_swiglu_oai,
        reference=reference,
        bind=bind,
        check=check,
        replaces=partial(followed_by_quantizer, "_C.swigluoai_and_mul", {"rounding": "product"}),
        example=activations.example_mul,
        width="intermediate",
        parts=2,
    )
)


def swiglu_oai(
    x: torch.Tensor,
    *,
    scheme: str,
    limit: float | None = None,
    alpha: float | None = None,
    interleaved: bool | None = None,
    rounding: str | None = None,
    **options: Any,
) -> QuantizedActivation:
    """y = g / (1 + exp(-alpha * g)) * (u + 1), g = min(gate, limit), u = min(max(up, -limit), limit);
    data = encode(y / scale).

    Shapes: x [..., 2N] bf16, fp16 or fp32, last stride 1; data [..., N], N at most 32768. interleaved (the default):
    gate = x[..., ::2] and up = x[..., 1::2]; else the first and the second half. limit is 7 and alpha 1.702 by default.
    NaN stays NaN.
    Rounding: "none" keeps fp32, "product" rounds y to x's dtype, "activation_and_product" rounds what (u + 1) is
    multiplied with too; None is what the replaced op does. Raises ValueError for a limit that is not positive or an
    alpha that is not finite; options and errors common to all producers are those of `tq.kernels.launch.call`.
    Source: vLLM 0.33 `_C.swigluoai_and_mul`, which multiplies before it divides, followed by the quantizer.
    """
    given = {"limit": limit, "alpha": alpha, "interleaved": interleaved, "rounding": rounding, **options}
    return call(SWIGLU_OAI, (x,), scheme, given)
