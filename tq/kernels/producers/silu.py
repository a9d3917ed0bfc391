"""y = silu(x)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tq.activation import QuantizedActivation
from tq.kernels.launch import call
from tq.kernels.producer import Bound, Producer, register_producer
from tq.kernels.producers import activations
from tq.kernels.producers.quantize import followed_by_quantizer


def bind(x: torch.Tensor, *, rounding: str = "output") -> Bound:
    return activations.bind_act(x, activations.silu, rounding)


SILU = register_producer(
    Producer(
        "silu",
        load=activations.load_act,
        reference=partial(activations.reference_act, activations.reference_silu),
        bind=bind,
        check=partial(activations.check_act, "silu"),
        replaces=partial(followed_by_quantizer, "aten.silu", {"rounding": "output"}),
        width="intermediate",
    )
)


def silu(x: torch.Tensor, *, scheme: str, rounding: str | None = None, **options: Any) -> QuantizedActivation:
    """y = x / (1 + exp(-x)); data = encode(y / scale).

    Shapes: x [..., N] bf16, fp16 or fp32, last stride 1; N at most 32768.
    Rounding: "none" keeps fp32, "output" rounds y to x's dtype; None is what the replaced op does. Options and errors
    common to all producers are those of `tq.kernels.launch.call`.
    Source: torch's `silu`, which vLLM 0.33 calls, followed by vLLM's quantizer; the exponential may differ in its last
    bits.
    """
    return call(SILU, (x,), scheme, {"rounding": rounding, **options})
