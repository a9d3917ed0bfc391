"""y = silu(gate) * up."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tq.activation import QuantizedActivation
from tq.kernels.launch import call
from tq.kernels.producer import Bound, Producer, Replaced, register_producer
from tq.kernels.producers import activations
from tq.kernels.producers.quantize import followed_by_quantizer
from tq.kernels.rules import AMAX_MULTIPLYING
from tq.kernels.schemes import Scheme, vllm_min_scale


def bind(x: torch.Tensor, *, rounding: str = "activation_and_product") -> Bound:
    return activations.bind_mul(x, activations.silu, rounding)


def replaces(scheme: Scheme) -> Replaced:
    if scheme.quantizer == "_C.per_token_group_fp8_quant" and scheme.rule is AMAX_MULTIPLYING:
        return Replaced("_C.silu_and_mul_per_block_quant", {"rounding": "none"}, vllm_min_scale(scheme.code))
    options = {"rounding": "activation_and_product"}
    if scheme.quantizer == "_C.static_scaled_fp8_quant":
        return Replaced("_C.silu_and_mul_quant", options)
    if scheme.quantizer == "_C.scaled_fp4_quant":
        return Replaced("_C.silu_and_mul_nvfp4_quant", {"rounding": "product"})
    return followed_by_quantizer("_C.silu_and_mul", options, scheme)


SILU_MUL = register_producer(
    Producer(
        "silu_mul",
        load=activations.load_act_mul,
        reference=partial(activations.reference_mul, activations.reference_silu),
        bind=bind,
        check=partial(activations.check_mul, "silu_mul"),
        replaces=replaces,
        example=activations.example_mul,
        width="intermediate",
        parts=2,
    )
)


def silu_mul(x: torch.Tensor, *, scheme: str, rounding: str | None = None, **options: Any) -> QuantizedActivation:
    """y = gate / (1 + exp(-gate)) * up, with gate = x[..., :N] and up = x[..., N:]; data = encode(y / scale).

    Shapes: x [..., 2N] bf16, fp16 or fp32, last stride 1; data [..., N], N at most 32768.
    Rounding: "none" keeps fp32, "product" rounds y to x's dtype, "activation_and_product" rounds silu(gate) too; None
    is what the replaced op does. Options and errors common to all producers are those of `tq.kernels.launch.call`.
    Source: vLLM 0.33 `_C.silu_and_mul_quant` (fp8_tensor), `_C.silu_and_mul_per_block_quant` (fp8_group64,
    fp8_group128), elsewhere `_C.silu_and_mul` followed by the quantizer; the exponential may differ in its last bits.
    """
    return call(SILU_MUL, (x,), scheme, {"rounding": rounding, **options})
