"""y = fatrelu(gate) * up."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from tq.activation import QuantizedActivation
from tq.kernels.launch import call
from tq.kernels.producer import Bound, Producer, register_producer
from tq.kernels.producers import activations
from tq.kernels.producers.quantize import followed_by_quantizer


def bind(x: torch.Tensor, *, threshold: float = 0.0, rounding: str = "product") -> Bound:
    return activations.bind_mul(x, activations.fatrelu, rounding, (threshold,))


def check(x: torch.Tensor, *, threshold: float = 0.0, rounding: str) -> None:
    activations.check_mul("fatrelu_mul", x, rounding=rounding)
    if not math.isfinite(threshold):
        raise ValueError(f"fatrelu_mul: threshold must be finite, got {threshold}")


def reference_fatrelu(gate: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
    return gate.masked_fill(gate <= threshold, 0.0)


FATRELU_MUL = register_producer(
    Producer(
        "fatrelu_mul",
        load=activations.load_act_mul,
        reference=partial(activations.reference_mul, reference_fatrelu),
        bind=bind,
        check=check,
        replaces=partial(followed_by_quantizer, "_C.fatrelu_and_mul", {"rounding": "product"}),
        example=activations.example_mul,
        width="intermediate",
        parts=2,
    )
)


def fatrelu_mul(
    x: torch.Tensor, *, scheme: str, threshold: float | None = None, rounding: str | None = None, **options: Any
) -> QuantizedActivation:
    """y = (gate if gate > threshold else 0) * up, with gate = x[..., :N] and up = x[..., N:]; data = encode(y / scale).

    Shapes: x [..., 2N] bf16, fp16 or fp32, last stride 1; data [..., N], N at most 32768. threshold: 0 by default,
    compared in fp32. A NaN gate stays NaN.
    Rounding: "none" keeps fp32, "product" rounds y to x's dtype, as does "activation_and_product": the activation is
    exact. None is what the replaced op does. Raises ValueError for a threshold that is not finite; options and errors
    common to all producers are those of `tq.kernels.launch.call`.
    Source: vLLM 0.33 `_C.fatrelu_and_mul`, for which a NaN gate is 0, followed by the quantizer.
    """
    return call(FATRELU_MUL, (x,), scheme, {"threshold": threshold, "rounding": rounding, **options})
