"""Scales that the caller gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from tq.kernels.codes import Code
from tq.kernels.device import divide, exact_reciprocal
from tq.kernels.rules.base import ScaleInputs, ScaleRule, load_given


@triton.jit
def load_static(inputs, expert):
    """The given scale."""
    return (load_given(inputs.scale, inputs, expert),)


@triton.jit
def fit_static(maxima, given, code):
    """What is given, whatever y is."""
    return (tl.zeros(maxima[0].shape, tl.float32) + given[0],)


@triton.jit
def scaled_by_reciprocal(y, fitted, maxima, given, code):
    """y * (1 / scale), the reciprocal rounded to fp32 first."""
    return y * exact_reciprocal(fitted[0])


@triton.jit
def scaled_by_given_division(y, fitted, maxima, given, code):
    """y / scale, IEEE, up to twice the code's range and there an end of it: a given scale bounds no quotient, and
    `divide` makes NaN of one that leaves fp32."""
    limit = fitted[0] * (2.0 * code.MAX)
    bounded = tl.where(y == y, tl.minimum(tl.maximum(y, -limit), limit), y)
    return divide(bounded, fitted[0], exact_reciprocal(fitted[0]))


def reference_fit_static(maxima: tuple[torch.Tensor, ...], inputs: ScaleInputs, code: Code) -> tuple[torch.Tensor, ...]:
    if inputs.scale is None:
        raise ValueError("fit_static: scale must be given, got None")
    return (inputs.scale.reshape(-1, 1).expand_as(maxima[0]),)


def reference_scaled_by_reciprocal(y: torch.Tensor, fitted: tuple[torch.Tensor, ...], *rest: Any) -> torch.Tensor:
    return y * (torch.ones_like(fitted[0]) / fitted[0])


def reference_scaled_by_given_division(
    y: torch.Tensor, fitted: tuple[torch.Tensor, ...], maxima: Any, inputs: ScaleInputs, code: Code
) -> torch.Tensor:
    limit = fitted[0] * (2.0 * code.max)
    return torch.maximum(torch.minimum(y, limit), -limit) / fitted[0]


# vLLM's static FP8 quantizer multiplies by the reciprocal of the scale, its static INT8 quantizer divides.
STATIC = ScaleRule(
    load_static,
    fit_static,
    scaled_by_reciprocal,
    reference_fit_static,
    reference_scaled_by_reciprocal,
    peaks=(),
    needs=("scale",),
    takes=(),
)
STATIC_DIVIDING = replace(STATIC, scaled=scaled_by_given_division, reference_scaled=reference_scaled_by_given_division)
