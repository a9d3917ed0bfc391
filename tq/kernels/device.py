"""Device functions shared by every kernel: load and store rows, round to a dtype, divide exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tq.kernels.target import INTERPRETED


class Rows(NamedTuple):
    """A [M, N] tensor whose last stride is 1; `stride` is the distance of two rows in elements."""

    data: torch.Tensor
    stride: int


@triton.jit
def load_rows(rows, row, col, mask):
    """rows[row, col] as fp32. row: int64 [BLOCK_M, 1]; col: int32 [1, BLOCK_N]; 0 where masked."""
    return tl.load(rows.data + (row * rows.stride + col), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_x(args, row, col, mask):
    """The `load` of a producer that starts from x alone."""
    return load_rows(args.x, row, col, mask)


@triton.jit
def apply_nothing(args, loaded, means, row, col, mask):
    """The `apply` of a producer whose `load` makes y."""
    return loaded


@triton.jit
def load_vector(pointer, col, mask):
    """pointer[col] as fp32 [1, BLOCK_N]. Every row reads the same values, so they stay in the cache."""
    return tl.load(pointer + col, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def store_rows(rows, row, col, value, mask):
    """rows[row, col] = value, rounded to nearest-even in the dtype of `rows`."""
    dtype: tl.constexpr = rows.data.dtype.element_ty
    tl.store(rows.data + (row * rows.stride + col), round_to(value, dtype).to(dtype), mask=mask)


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """fp32 -> `dtype` -> fp32, nearest-even. The interpreter truncates to bf16, so there the bits are rounded first."""
    if dtype == tl.float32:
        return value
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        finite = (bits & 0x7F800000) != 0x7F800000
        return tl.where(finite, rounded, bits).to(tl.float32, bitcast=True)
    return value.to(dtype).to(tl.float32)


@triton.jit
def reciprocal(value):
    """1 / value within 4 units in the last place, for a positive value; 0 for infinity. Two instructions, a division
    ten."""
    root = tl.rsqrt(value)
    return root * root


@triton.jit
def exact_reciprocal(value):
    """1 / value rounded once to fp32 (IEEE), by two Newton steps on `reciprocal`: half the cost of a division.

    For a mantissa of all ones the result's must be 1 and the steps may end at 0; they miss nowhere else (every fp32
    mantissa was tried, at even and odd exponents). The interpreter's fma rounds twice, so it divides.
    """
    if INTERPRETED:
        return tl.div_rn(tl.full(value.shape, 1.0, tl.float32), value)
    inverse = reciprocal(value)
    inverse = tl.fma(tl.fma(-value, inverse, 1.0), inverse, inverse)
    inverse = tl.fma(tl.fma(-value, inverse, 1.0), inverse, inverse)
    all_ones = (value.to(tl.uint32, bitcast=True) & 0x7FFFFF) == 0x7FFFFF
    return (inverse.to(tl.uint32, bitcast=True) | all_ones.to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.jit
def quotient(value, divisor, inverse):
    """As `divide`, but with any sign of a zero, and any value for an infinite one."""
    if INTERPRETED:
        return tl.div_rn(value, tl.broadcast_to(divisor, value.shape))
    estimate = value * inverse
    return tl.fma(tl.fma(-estimate, divisor, value), inverse, estimate)


@triton.jit
def divide(value, divisor, inverse):
    """value / divisor rounded once to fp32 (IEEE), for a positive divisor and `inverse`, 1 / divisor rounded to fp32.

    With q = RN(v*r), the remainder v - q*d is exact in an fma, and RN(q + r*(v - q*d)) is the correctly rounded
    quotient: found equal to the IEEE division for every mantissa of bf16 and fp16 values with every fp32 mantissa of
    the divisor. Holds while nothing leaves the normal range; scales are kept in [2^-80, FLT_MAX/448] for that. An
    infinite value gives NaN. The interpreter's fma rounds twice, so it divides.
    """
    corrected = quotient(value, divisor, inverse)
    if INTERPRETED:
        return tl.where(tl.abs(value) == float("inf"), float("nan"), corrected)
    # The remainder of -0 is +0, and so would be the sum: the sign is the value's (the divisor is positive).
    sign = value.to(tl.uint32, bitcast=True) & 0x80000000
    return ((corrected.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(value):
    """|value| with NaN as 0, for a maximum: compiled, `tl.max` skips a NaN by itself; interpreted, it keeps it."""
    if INTERPRETED:
        return tl.where(value == value, tl.abs(value), 0.0)
    return tl.abs(value)


@triton.jit
def round_to_integer(value):
    """The nearest integer, ties to even, of a value within 2^22; beyond, 2^22 with its sign."""
    bounded = tl.minimum(tl.maximum(value, -4194304.0), 4194304.0)
    return (bounded + 12582912.0) - 12582912.0
