"""Two levels of scales: E4M3 for each group, under one fp32 scale of the tensor (NVFP4)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tq.kernels.codes import E4M3, Code, decode_e4m3, encode_e4m3
from tq.kernels.device import exact_reciprocal
from tq.kernels.rules.amax import largest
from tq.kernels.rules.base import ScaleInputs, ScaleRule, load_given


@triton.jit
def load_global(inputs, expert):
    """The inverse of the tensor's scale, a multiplier, and its reciprocal."""
    multiplier = load_given(inputs.global_scale_inv, inputs, expert)
    return multiplier, exact_reciprocal(tl.full([1, 1, 1], 0.0, tl.float32) + multiplier)


@triton.jit
def fit_global(maxima, given, code):
    """E4M3(global_scale_inv * (amax * (1 / MAX))), saturating at 448."""
    return (decode_e4m3(encode_e4m3(given[0] * (largest(maxima) * (1.0 / code.MAX)))),)


@triton.jit
def scaled_by_global(y, fitted, maxima, given, code):
    """y * (1 / (scale * (1 / global_scale_inv))); 0 where the scale is 0."""
    positive = fitted[0] > 0.0
    factor = tl.where(positive, fitted[0], 1.0) * given[1]
    return y * tl.where(positive, exact_reciprocal(factor), 0.0)


@triton.jit
def value_global(decoded, fitted, given):
    """decoded * (scale * (1 / global_scale_inv))"""
    return decoded * (fitted[0] * given[1])


def global_of(inputs: ScaleInputs, like: torch.Tensor) -> torch.Tensor:
    """The inverse of the tensor's scale, or that of each row's expert, to go with `like` [M, ...]."""
    if inputs.global_scale_inv is None:
        raise ValueError("nvfp4: global_scale_inv must be given, got None")
    return inputs.global_scale_inv.reshape(-1, *(1 for _ in like.shape[1:]))


def reference_fit_global(maxima: tuple[torch.Tensor, ...], inputs: ScaleInputs, code: Code) -> tuple[torch.Tensor, ...]:
    inverse = torch.ones_like(maxima[0]) / torch.full_like(maxima[0], code.max)
    scale = E4M3.reference_decode(E4M3.reference_encode(global_of(inputs, inverse) * (maxima[0] * inverse)))
    return (scale,)


def reference_scaled_by_global(
    y: torch.Tensor, fitted: tuple[torch.Tensor, ...], maxima: Any, inputs: ScaleInputs, code: Code
) -> torch.Tensor:
    factor = fitted[0] * (torch.ones_like(fitted[0]) / global_of(inputs, fitted[0]))
    return y * torch.where(fitted[0] > 0.0, torch.ones_like(factor) / factor, 0.0)


def reference_value_global(
    decoded: torch.Tensor, fitted: tuple[torch.Tensor, ...], inputs: ScaleInputs
) -> torch.Tensor:
    return decoded * (fitted[0] * (torch.ones_like(fitted[0]) / global_of(inputs, fitted[0])))


GLOBAL = ScaleRule(
    load_global,
    fit_global,
    scaled_by_global,
    reference_fit_global,
    reference_scaled_by_global,
    value=value_global,
    reference_value=reference_value_global,
    store=encode_e4m3,
    restore=decode_e4m3,
    reference_store=E4M3.reference_encode,
    reference_restore=lambda stored: stored.view(torch.float8_e4m3fn).float(),
    stored=torch.float8_e4m3fn,
    least_min_scale=0.0,
    needs=("global_scale_inv",),
    takes=(),
)
