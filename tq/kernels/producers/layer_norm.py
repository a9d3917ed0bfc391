"""y = (z - mean(z)) / sqrt(mean((z - mean(z))^2) + eps) * weight + bias, with z = x or x + residual."""

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
REPLACED = "aten.(add + )layer_norm", {"rounding": "after_weight", "round_residual": True}


def bind(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    rounding: str = "after_weight",
    round_residual: bool = True,
) -> Bound:
    return norms.bind_norm(x, weight, eps, residual, residual_out, rounding, round_residual, bias=bias)


def example(rows: int, hidden_size: int, dtype: torch.dtype, device: Any) -> tuple[tuple, dict[str, Any]]:
    arguments, options = norms.example_norm(0.0, rows, hidden_size, dtype, device)
    return arguments, {**options, "bias": (0.1 * torch.randn(hidden_size, device=device)).to(dtype)}


LAYER_NORM = register_producer(
    Producer(
        "layer_norm",
        load=norms.load_sum,
        moments=norms.CENTERED,
        apply=norms.normalize,
        shared=norms.load_weights,
        bind=bind,
        check=partial(norms.check_norm, "layer_norm", ROUNDINGS),
        reference=partial(norms.reference_norm, True, 0.0),
        replaces=partial(followed_by_quantizer, *REPLACED),
        mutates=("residual_out",),
        example=example,
        optional=("residual", "bias"),
    )
)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    *,
    scheme: str,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    rounding: str | None = None,
    round_residual: bool | None = None,
    **options: Any,
) -> QuantizedActivation | tuple[QuantizedActivation, torch.Tensor]:
    """y = (z - mean(z)) / sqrt(mean((z - mean(z))^2) + eps) * weight + bias, z = x + residual;
    data = encode(y / scale), residual_out = z.

    Shapes: bias [N] as the weight; the others, what is returned, round_residual and errors as `tq.rms_norm`. Mean and
    variance are summed in fp32 in an order of their own, the variance from the distances to the mean.
    Rounding: "none" keeps fp32, "after_weight" rounds y, bias included, to x's dtype; None is what the replaced op
    does.
    Source: torch's `layer_norm`, which vLLM 0.33 calls, after an addition where there is a residual, followed by vLLM's
    quantizer.
    """
    given = {
        "bias": bias,
        "residual": residual,
        "residual_out": residual_out,
        "rounding": rounding,
        "round_residual": round_residual,
        **options,
    }
    return call(LAYER_NORM, (x, weight, eps), scheme, given)
