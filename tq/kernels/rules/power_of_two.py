"""Scales that are powers of two, stored as fp32 or as their exponents (UE8M0)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl

from tq.kernels.codes import Code
from tq.kernels.rules.amax import bounded, largest, load_amax
from tq.kernels.rules.base import ScaleInputs, ScaleRule


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) for a biased exponent in [0, 254]; the least is a subnormal number."""
    return tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def fit_exponent(maxima, given, code, ADDED: tl.constexpr):
    """The exponent of amax after ADDED carried into it, less the code's largest exponent, as a power of two."""
    top: tl.constexpr = (code.MAX_BITS >> 23) - 127
    bits = tl.minimum(largest(maxima), given[0]).to(tl.int32, bitcast=True)
    exponent = ((bits + ADDED) >> 23) - top
    least = (tl.zeros(bits.shape, tl.float32) + given[1]).to(tl.int32, bitcast=True)
    return (power_of_two(tl.maximum(exponent, (least + 0x7FFFFF) >> 23)),)


@triton.jit
def fit_ceil(maxima, given, code):
    """The smallest power of two that is at least amax / MAX and min_scale, from the bits: exact where a logarithm is
    not."""
    return fit_exponent(maxima, given, code, 0x7FFFFF - (code.MAX_BITS & 0x7FFFFF))


@triton.jit
def fit_round(maxima, given, code):
    """2^(floor(log2(amax rounded to the code's mantissa)) - largest exponent of the code)"""
    return fit_exponent(maxima, given, code, code.HALF_BITS)


@triton.jit
def fit_floor(maxima, given, code):
    """2^(floor(log2(amax)) - largest exponent of the code)"""
    return fit_exponent(maxima, given, code, 0)


@triton.jit
def scaled_by_power_of_two(y, fitted, maxima, given, code):
    """y / scale, exactly: the exponent of the reciprocal is 254 less the one of the scale."""
    return y * (0x7F000000 - (fitted[0].to(tl.int32, bitcast=True) & 0x7F800000)).to(tl.float32, bitcast=True)


@triton.jit
def store_ue8m0(scale):
    """The biased exponent of a power of two, one byte."""
    return (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def restore_ue8m0(stored):
    """2^(byte - 127)"""
    return power_of_two(stored.to(tl.int32))


def reference_fit_exponent(
    maxima: tuple[torch.Tensor, ...], inputs: ScaleInputs, code: Code, rounding: str
) -> tuple[torch.Tensor, ...]:
    amax = bounded(maxima[0], inputs).double()
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    if rounding == "ceil":
        mantissa, exponent = torch.frexp(amax / code.max)
        exponent = exponent - (mantissa == 0.5).int()
    else:
        exponent = exponent - math.frexp(code.max)[1]
        if rounding == "round":
            exponent = exponent + (mantissa >= 1.0 - 2.0 ** -(code.mantissa_bits + 2)).int()
    exponent = torch.where(amax == 0.0, -127, exponent)
    if inputs.min_scale > 0.0:
        fraction, least = math.frexp(np.float32(inputs.min_scale))
        exponent = exponent.clamp(min=least - int(fraction == 0.5))
    return (torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127)).float(),)


def reference_store_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    return (torch.frexp(scale.double()).exponent + 126).to(torch.uint8)


def reference_restore_ue8m0(stored: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(stored.shape, dtype=torch.float64, device=stored.device), stored.int() - 127).float()


POWER_OF_TWO = ScaleRule(
    load_amax,
    fit_ceil,
    scaled_by_power_of_two,
    partial(reference_fit_exponent, rounding="ceil"),
    lambda y, fitted, *rest: y / fitted[0],
    least_min_scale=0.0,
)
UE8M0 = replace(
    POWER_OF_TWO,
    store=store_ue8m0,
    restore=restore_ue8m0,
    reference_store=reference_store_ue8m0,
    reference_restore=reference_restore_ue8m0,
    stored=torch.uint8,
)
UE8M0_ROUND = replace(UE8M0, fit=fit_round, reference_fit=partial(reference_fit_exponent, rounding="round"))
UE8M0_FLOOR = replace(UE8M0, fit=fit_floor, reference_fit=partial(reference_fit_exponent, rounding="floor"))
