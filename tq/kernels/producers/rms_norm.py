"""y = z / sqrt(mean(z^2) + eps) * weight, with z = x or x + residual."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tq.activation import QuantizedActivation
from tq.kernels.launch import call
from tq.kernels.producer import Bound, Producer, Replaced, register_producer
from tq.kernels.producers import norms
from tq.kernels.rules import AMAX_MULTIPLYING
from tq.kernels.schemes import Scheme, vllm_min_scale

ROUNDINGS = ("none", "after_weight", "before_and_after_weight")


def bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    rounding: str = "before_and_after_weight",
    round_residual: bool = False,
) -> Bound:
    return norms.bind_norm(x, weight, eps, residual, residual_out, rounding, round_residual)


def replaces(scheme: Scheme) -> Replaced:
    if scheme.quantizer == "_C.static_scaled_fp8_quant":
        options = {"rounding": "after_weight", "round_residual": True}
        return Replaced("_C.rms_norm_static_fp8_quant", options)
    options = {"rounding": "before_and_after_weight", "round_residual": False}
    if scheme.quantizer == "_C.dynamic_per_token_scaled_fp8_quant":
        return Replaced("_C.rms_norm_dynamic_per_token_quant", options)
    if scheme.quantizer == "_C.per_token_group_fp8_quant" and scheme.rule is AMAX_MULTIPLYING:
        return Replaced("_C.rms_norm_per_block_quant", options, vllm_min_scale(scheme.code))
    # No fused op has these scales: what the norm and the quantizer give one after the other.
    options = {"rounding": "after_weight", "round_residual": True}
    return Replaced(f"_C.(fused_add_)rms_norm + {scheme.quantizer}", options)


RMS_NORM = register_producer(
    Producer(
        "rms_norm",
        load=norms.load_sum,
        moments=norms.RMS,
        apply=norms.normalize,
        shared=norms.load_weights,
        bind=bind,
        check=partial(norms.check_norm, "rms_norm", ROUNDINGS),
        reference=partial(norms.reference_norm, False, 0.0),
        replaces=replaces,
        mutates=("residual_out",),
        example=partial(norms.example_norm, 0.0),
        optional=("residual",),
    )
)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    scheme: str,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    rounding: str | None = None,
    round_residual: bool | None = None,
    **options: Any,
) -> QuantizedActivation | tuple[QuantizedActivation, torch.Tensor]:
    """y = z / sqrt(mean(z^2) + eps) * weight, z = x + residual; data = encode(y / scale), residual_out = z.

    Shapes: x, residual, residual_out [..., N], weight [N], each bf16, fp16 or fp32 of its own, last stride 1; N at most
    32768. Returns the activation, and with `residual` a pair with the new residual: a new tensor, or residual_out,
    which may be `residual` itself.
    Rounding: "none" keeps fp32; "after_weight" rounds y to x's dtype; "before_and_after_weight" rounds the normalized
    value and its product to the weight's dtype, then y to x's. round_residual: the norm is of z rounded as it is
    stored, else of the fp32 sum. None is what the replaced op does. The mean is summed in fp32 in an order of its own.
    Raises ValueError for eps <= 0 or shapes, strides or devices that do not fit; options and errors common to all
    producers are those of `tq.kernels.launch.call`.
    Source: vLLM 0.33 `_C.(fused_add_)rms_norm_static_fp8_quant` (fp8_tensor), `_C.rms_norm_dynamic_per_token_quant`
    (fp8_token), `_C.rms_norm_per_block_quant` (fp8_group64, fp8_group128); elsewhere the plain norm followed by the
    quantizer.
    """
    given = {
        "residual": residual,
        "residual_out": residual_out,
        "rounding": rounding,
        "round_residual": round_residual,
        **options,
    }
    return call(RMS_NORM, (x, weight, eps), scheme, given)
