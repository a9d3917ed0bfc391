"""y = max(x, 0)^2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tq.activation import QuantizedActivation
from tq.kernels.producer import Bound, Producer, register_producer
from tq.kernels.producers import activations
from tq.kernels.producers.quantize import followed_by_quantizer


def bind(x: torch.Tensor, *, rounding: str = "output") -> Bound:
    return activations.bind_act(x, activations.relu2, rounding)


RELU2 = register_producer(
    Producer(
        "relu2",
        load=activations.load_act,
        reference=partial(activations.reference_act, lambda value: value.relu().square()),
        bind=bind,
        check=partial(activations.check_act, "relu2"),
        replaces=partial(followed_by_quantizer, "_C.relu_squared", {"rounding": "output"}),
        width="intermediate",
    )
)


def relu2(x: torch.Tensor, *, scheme: str, rounding: str | None = None, **options: Any) -> QuantizedActivation:
    """y = max(x, 0)^2; data = encode(y / scale).

    Shapes: x [..., N] bf16, fp16 or fp32, last stride 1; N at most 32768. NaN stays NaN.
    Rounding: "none" keeps fp32, "output" rounds y to x's dtype; None is what the replaced op does. Options and errors
    common to all producers are those of `tq.kernels.launch.call`.
    Source: vLLM 0.33 `_C.relu_squared`, for which NaN is 0, followed by the quantizer.
    """
    return RELU2(x, scheme=scheme, rounding=rounding, **options)
