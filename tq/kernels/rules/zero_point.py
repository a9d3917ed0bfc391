"""Scales with a zero point: given, or from the range of the values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from tq.kernels.codes import Code
from tq.kernels.device import exact_reciprocal, round_to_integer
from tq.kernels.rules.amax import load_amax
from tq.kernels.rules.base import FLT_MAX, ScaleInputs, load_given
from tq.kernels.rules.given import STATIC, reference_fit_static, reference_scaled_by_reciprocal

# A zero point stays below 2^16 and exact: a row whose values differ by less than 0.4 % of their largest has a wider
# range.
ZERO_POINT_LIMIT = 2.0**-16


@triton.jit
def load_static_zero_point(inputs, expert):
    """The given scale and zero point."""
    zero_point = load_given(inputs.zero_point, inputs, expert)
    return load_given(inputs.scale, inputs, expert), zero_point.to(tl.float32)


@triton.jit
def fit_static_zero_point(maxima, given, code):
    """What is given, whatever y is."""
    none = tl.zeros(maxima[0].shape, tl.float32)
    return none + given[0], none + given[1]


@triton.jit
def highest(value):
    """value, NaN as the lowest."""
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def lowest(value):
    """-value, NaN as the lowest."""
    return tl.where(value == value, -value, float("-inf"))


@triton.jit
def fit_range(maxima, given, code):
    """scale = max((max - min) / 255, amax * 2^-16, min_scale), zero point = round(-128 - min / scale)."""
    limit = tl.minimum(given[0], 1.7014117331926443e38)  # half of FLT_MAX: the range stays finite
    high = tl.maximum(tl.minimum(maxima[0], limit), -limit)
    low = -tl.maximum(tl.minimum(maxima[1], limit), -limit)
    empty = high < low  # nothing but NaN
    high = tl.where(empty, 0.0, high)
    low = tl.where(empty, 0.0, low)
    scale = tl.div_rn(high - low, tl.full(high.shape, 255.0, tl.float32))
    amax = tl.maximum(tl.abs(high), tl.abs(low))
    scale = tl.maximum(tl.maximum(scale, amax * 1.52587890625e-05), given[1])
    return scale, round_to_integer(-128.0 - tl.div_rn(low, scale))


@triton.jit
def scaled_with_zero_point(y, fitted, maxima, given, code):
    """round(y * (1 / scale)) + zero point; NaN is the zero point."""
    quotient = y * exact_reciprocal(fitted[0])
    return tl.where(quotient == quotient, round_to_integer(quotient), 0.0) + fitted[1]


@triton.jit
def value_with_zero_point(decoded, fitted, given):
    """(decoded - zero point) * scale"""
    return (decoded - fitted[1]) * fitted[0]


def reference_fit_static_zero_point(
    maxima: tuple[torch.Tensor, ...], inputs: ScaleInputs, code: Code
) -> tuple[torch.Tensor, ...]:
    if inputs.zero_point is None:
        raise ValueError("fit_static_zero_point: zero_point must be given, got None")
    zero_point = inputs.zero_point.float().reshape(-1, 1).expand_as(maxima[0])
    return *reference_fit_static(maxima, inputs, code), zero_point


def reference_extremes(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """max(y) and max(-y) over the last axis; NaN does not count."""
    nothing = torch.full_like(y, -torch.inf)
    return torch.where(y.isnan(), nothing, y).amax(-1), torch.where(y.isnan(), nothing, -y).amax(-1)


def reference_fit_range(maxima: tuple[torch.Tensor, ...], inputs: ScaleInputs, code: Code) -> tuple[torch.Tensor, ...]:
    limit = torch.full_like(maxima[0], FLT_MAX / 2)
    if inputs.scale_ub is not None:
        limit = torch.minimum(limit, inputs.scale_ub.reshape(()))
    high, low = (torch.maximum(torch.minimum(extreme, limit), -limit) for extreme in (maxima[0], maxima[1]))
    empty = high < -low
    high, low = high.masked_fill(empty, 0.0), (-low).masked_fill(empty, 0.0)
    scale = (high - low) / torch.full_like(high, 255.0)
    scale = torch.maximum(scale, torch.maximum(high.abs(), low.abs()) * ZERO_POINT_LIMIT).clamp(min=inputs.min_scale)
    return scale, torch.round(-128.0 - low / scale)


def reference_scaled_with_zero_point(y: torch.Tensor, fitted: tuple[torch.Tensor, ...], *rest: Any) -> torch.Tensor:
    quotient = reference_scaled_by_reciprocal(y, fitted).clamp(-(2.0**22), 2.0**22)
    return torch.round(quotient.nan_to_num(nan=0.0)) + fitted[1]


STATIC_ZERO_POINT = replace(
    STATIC,
    load=load_static_zero_point,
    fit=fit_static_zero_point,
    scaled=scaled_with_zero_point,
    value=value_with_zero_point,
    reference_fit=reference_fit_static_zero_point,
    reference_scaled=reference_scaled_with_zero_point,
    reference_value=lambda decoded, fitted, inputs: (decoded - fitted[1]) * fitted[0],
    zero_point=True,
    needs=("scale", "zero_point"),
)
RANGE = replace(
    STATIC_ZERO_POINT,
    load=load_amax,
    fit=fit_range,
    reference_fit=reference_fit_range,
    peaks=(highest, lowest),
    reference_peaks=reference_extremes,
    needs=(),
    takes=("scale_ub",),
)
