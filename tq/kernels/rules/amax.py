"""Scales from the largest magnitude."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tq.kernels.codes import Code
from tq.kernels.device import divide, exact_reciprocal
from tq.kernels.rules.base import FLT_MAX, ScaleInputs, ScaleRule
from tq.kernels.rules.given import reference_scaled_by_reciprocal, scaled_by_reciprocal


@triton.jit
def load_amax(inputs, expert):
    """The bounds of amax from above and of the scale from below; whether the caller gave the first."""
    limit = 3.4028234663852886e38
    if inputs.scale_ub is not None:
        limit = tl.minimum(tl.load(inputs.scale_ub), limit)
    return limit, inputs.min_scale, inputs.scale_ub is not None


@triton.jit
def largest(maxima):
    """amax, 0 of nothing but NaN: compiled, the maximum of those is NaN, and skipped by this one."""
    return tl.maximum(maxima[0], 0.0)


@triton.jit
def fit_amax(maxima, given, code):
    """max(min(amax, scale_ub, FLT_MAX) / MAX, min_scale), the division IEEE."""
    amax = tl.minimum(largest(maxima), given[0])
    return (tl.maximum(divide(amax, tl.full(amax.shape, code.MAX, tl.float32), 1.0 / code.MAX), given[1]),)


@triton.jit
def scaled_by_division(y, fitted, maxima, given, code):
    """y / scale, IEEE; NaN of an infinity. Where the caller gave amax a bound, a finite y is kept within twice the
    code's range: its quotient could leave fp32, of which `divide` makes NaN."""
    if given[2]:
        limit = fitted[0] * (2.0 * code.MAX)
        y = tl.where(tl.abs(y) < float("inf"), tl.minimum(tl.maximum(y, -limit), limit), y)
    return divide(y, fitted[0], exact_reciprocal(fitted[0]))


@triton.jit
def scaled_by_inverse(y, fitted, maxima, given, code):
    """y * (MAX / amax), amax within its bounds: not the reciprocal of the rounded scale."""
    amax = tl.maximum(tl.minimum(largest(maxima), given[0]), given[1] * code.MAX)
    return y * tl.div_rn(tl.full(amax.shape, code.MAX, tl.float32), amax)


def bounded(amax: torch.Tensor, inputs: ScaleInputs) -> torch.Tensor:
    """min(amax, scale_ub, FLT_MAX)"""
    amax = amax.clamp(max=FLT_MAX)
    return amax if inputs.scale_ub is None else torch.minimum(amax, inputs.scale_ub.reshape(()))


def reference_fit_amax(maxima: tuple[torch.Tensor, ...], inputs: ScaleInputs, code: Code) -> tuple[torch.Tensor, ...]:
    amax = bounded(maxima[0], inputs)
    # A tensor divides; a number would be turned into a multiplication by its reciprocal on a GPU.
    return ((amax / torch.full_like(amax, code.max)).clamp(min=inputs.min_scale),)


def reference_scaled_by_division(y: torch.Tensor, fitted: tuple[torch.Tensor, ...], *rest: Any) -> torch.Tensor:
    return torch.where(y.isinf(), torch.nan, y / fitted[0])


def reference_scaled_by_inverse(
    y: torch.Tensor, fitted: tuple[torch.Tensor, ...], maxima: tuple[torch.Tensor, ...], inputs: ScaleInputs, code: Code
) -> torch.Tensor:
    least = np.float32(inputs.min_scale) * np.float32(code.max)
    amax = bounded(maxima[0], inputs).clamp(min=float(least))
    return y * (torch.full_like(amax, code.max) / amax)


# vLLM's per-token FP8 quantizer divides, its group quantizers multiply by the reciprocal of the scale, its per-token
# INT8 quantizer multiplies by MAX / amax; on a tie of the code they differ.
AMAX_DIVIDING = ScaleRule(load_amax, fit_amax, scaled_by_division, reference_fit_amax, reference_scaled_by_division)
AMAX_MULTIPLYING = replace(AMAX_DIVIDING, scaled=scaled_by_reciprocal, reference_scaled=reference_scaled_by_reciprocal)
AMAX_INVERTING = replace(AMAX_DIVIDING, scaled=scaled_by_inverse, reference_scaled=reference_scaled_by_inverse)
