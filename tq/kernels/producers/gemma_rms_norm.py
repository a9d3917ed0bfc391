"""y = z / sqrt(mean(z^2) + eps) * (1 + weight), with z = x or x + residual."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tq.activation import QuantizedActivation
from tq.kernels.launch import call
from tq.kernels.producer import Bound, Producer, register_producer
from tq.kernels.producers import norms
from tq.kernels.producers.quantize import followed_by_quantizer

ROUNDINGS = ("none", "after_weight")
REPLACED = "vllm_ir.(fused_add_)rms_norm", {"rounding": "after_weight", "round_residual": False}


def bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    rounding: str = "after_weight",
    round_residual: bool = False,
) -> Bound:
    return norms.bind_norm(x, weight, eps, residual, residual_out, rounding, round_residual, weight_offset=1.0)


GEMMA_RMS_NORM = register_producer(
    Producer(
        "gemma_rms_norm",
        load=norms.load_sum,
        moments=norms.RMS,
        apply=norms.normalize,
        shared=norms.load_weights,
        bind=bind,
        check=partial(norms.check_norm, "gemma_rms_norm", ROUNDINGS),
        reference=partial(norms.reference_norm, False, 1.0),
        replaces=partial(followed_by_quantizer, *REPLACED),
        mutates=("residual_out",),
        example=partial(norms.example_norm, 1.0),
        optional=("residual",),
    )
)


def gemma_rms_norm(
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
    """y = z / sqrt(mean(z^2) + eps) * (1 + weight), z = x + residual; data = encode(y / scale), residual_out = z.

    Shapes, what is returned, round_residual and errors: as `tq.rms_norm`. 1 + weight is formed in fp32.
    Rounding: "none" keeps fp32, "after_weight" rounds y to x's dtype; None is what the replaced op does.
    Source: vLLM 0.33 GemmaRMSNorm (its `rms_norm` and `fused_add_rms_norm` with the fp32 weight 1 + weight; the norm is
    of the fp32 sum), followed by the quantizer.
    """
    given = {
        "residual": residual,
        "residual_out": residual_out,
        "rounding": rounding,
        "round_residual": round_residual,
        **options,
    }
    return call(GEMMA_RMS_NORM, (x, weight, eps), scheme, given)
