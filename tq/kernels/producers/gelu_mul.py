"""y = gelu(gate) * up."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tq.activation import QuantizedActivation
from tq.kernels.launch import call
from tq.kernels.producer import Bound, Producer, check_choice, register_producer
from tq.kernels.producers import activations
from tq.kernels.producers.quantize import followed_by_quantizer


def bind(x: torch.Tensor, *, approximate: str = "none", rounding: str = "activation_and_product") -> Bound:
    return activations.bind_mul(x, activations.GELUS[approximate], rounding)


def check(x: torch.Tensor, *, approximate: str = "none", rounding: str) -> None:
    activations.check_mul("gelu_mul", x, rounding=rounding)
    check_choice("gelu_mul", "approximate", approximate, tuple(activations.GELUS))


GELU_MUL = register_producer(
    Producer(
        "gelu_mul",
        load=activations.load_act_mul,
        reference=partial(activations.reference_mul, activations.reference_gelu),
        bind=bind,
        check=check,
        replaces=partial(followed_by_quantizer, "_C.gelu_(tanh_)and_mul", {"rounding": "activation_and_product"}),
        example=activations.example_mul,
        width="intermediate",
        parts=2,
    )
)


def gelu_mul(
    x: torch.Tensor, *, scheme: str, approximate: str | None = None, rounding: str | None = None, **options: Any
) -> QuantizedActivation:
    """y = gelu(gate) * up, with gate = x[..., :N] and up = x[..., N:]; data = encode(y / scale). By `approximate`,

    "none" (the default): gelu(g) = g / 2 * (1 + erf(g / sqrt(2)));
    "tanh": gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g^3))), finite for every finite g.

    Shapes: x [..., 2N] bf16, fp16 or fp32, last stride 1; data [..., N], N at most 32768.
    Rounding: "none" keeps fp32, "product" rounds y to x's dtype, "activation_and_product" rounds gelu(gate) too; None
    is what the replaced op does. Raises ValueError for another `approximate`; options and errors common to all
    producers are those of `tq.kernels.launch.call`.
    Source: vLLM 0.33 `_C.gelu_and_mul` and `_C.gelu_tanh_and_mul` followed by the quantizer. That of tanh takes 1 +
    tanh of what is almost -1: below about -3 this form is nearer to the formula, by less than 2^-23 * |g|.
    """
    return call(GELU_MUL, (x,), scheme, {"approximate": approximate, "rounding": rounding, **options})
