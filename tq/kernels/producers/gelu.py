"""y = gelu(x)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tq.activation import QuantizedActivation
from tq.kernels.launch import call
from tq.kernels.producer import Bound, Producer, check_choice, register_producer
from tq.kernels.producers import activations
from tq.kernels.producers.quantize import followed_by_quantizer


def bind(x: torch.Tensor, *, approximate: str = "none", rounding: str = "output") -> Bound:
    return activations.bind_act(x, activations.GELUS[approximate], rounding)


def check(x: torch.Tensor, *, approximate: str = "none", rounding: str) -> None:
    activations.check_act("gelu", x, rounding=rounding)
    check_choice("gelu", "approximate", approximate, tuple(activations.GELUS))


GELU = register_producer(
    Producer(
        "gelu",
        load=activations.load_act,
        reference=partial(activations.reference_act, activations.reference_gelu),
        bind=bind,
        check=check,
        replaces=partial(followed_by_quantizer, "aten.gelu", {"rounding": "output"}),
        width="intermediate",
    )
)


def gelu(
    x: torch.Tensor, *, scheme: str, approximate: str | None = None, rounding: str | None = None, **options: Any
) -> QuantizedActivation:
    """y = x * P(normal <= x), by `approximate` in the two forms of `tq.gelu_mul`; data = encode(y / scale).

    Shapes: x [..., N] bf16, fp16 or fp32, last stride 1; N at most 32768.
    Rounding: "none" keeps fp32, "output" rounds y to x's dtype; None is what the replaced op does. Raises ValueError
    for an `approximate` other than "none" and "tanh"; options and errors common to all producers are those of
    `tq.kernels.launch.call`.
    Source: torch's `gelu`, which vLLM 0.33 calls, followed by vLLM's quantizer.
    """
    return call(GELU, (x,), scheme, {"approximate": approximate, "rounding": rounding, **options})
