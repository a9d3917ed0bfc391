"""Device functions shared by every kernel: load and store rows, round to a dtype, divide exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tq.kernels.target import INTERPRETED

# Programs whose signal for the next kernel costs nothing: an H200 takes 1.2 ns for each, one after the other.
MOST_SIGNALS = tl.constexpr(2048)


# Stores $2 at $1 if $3; $0 only because something must be returned.
STORE_8, STORE_32 = (
    tl.constexpr(f"{{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.global.{kind} [$1], $2; mov.u32 $0, 0; }}")
    for kind in ("b8", "b32")
)


class Rows(NamedTuple):
    """A [M, N] tensor whose last stride is 1; `stride` is the distance of two rows in elements."""

    data: torch.Tensor
    stride: int


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """To be called before anything is read or written. A kernel that OVERLAPS is launched while the one ahead of it
    still runs, so that its programs are in place when that has ended, which is waited for here. Then the next kernel
    may be launched in the same way: few programs say so, of many the last ones by ending."""
    if OVERLAPS:
        gdc_wait()
        if tl.num_programs(0) <= MOST_SIGNALS:
            gdc_launch_dependents()


@triton.jit
def widen(value):
    """bf16, fp16 or fp32 -> fp32, exactly. bf16 by its bits: a pair of them in one word costs two instructions, by the
    conversion three."""
    if value.dtype == tl.bfloat16:
        return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def negate(value):
    """-value. `-` is 0 - value in Triton, an instruction of its own; this becomes part of the next one."""
    return value * -1.0


@triton.jit
def load_rows(rows, row, col, mask):
    """rows[row, col] as fp32. row: int64 [BLOCK_M, 1]; col: int32 [1, BLOCK_N]; 0 where masked."""
    return widen(tl.load(rows.data + (row * rows.stride + col), mask=mask, other=0.0))


@triton.jit
def load_x(args, row, col, mask):
    """The `load` of a producer that starts from x alone."""
    return load_rows(args.x, row, col, mask)


@triton.jit
def apply_nothing(args, loaded, means, row, col, mask):
    """The `apply` of a producer whose `load` makes y."""
    return loaded


@triton.jit
def load_narrow(pointer, col, mask):
    """pointer[col], [1, BLOCK_N], in its dtype, to be widened where it is used: until then it takes half the registers.
    Every row reads the same values, so they stay in the cache."""
    return tl.load(pointer + col, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def load_vector(pointer, col, mask):
    """pointer[col] as fp32 [1, BLOCK_N]."""
    return widen(load_narrow(pointer, col, mask))


@triton.jit
def store_rows(rows, row, col, value, mask):
    """rows[row, col] = value, rounded to nearest-even in the dtype of `rows`."""
    dtype: tl.constexpr = rows.data.dtype.element_ty
    tl.store(rows.data + (row * rows.stride + col), narrow(value, dtype), mask=mask)


@triton.jit
def store_shared(address, value, mask):
    """tl.store(address, value, mask), [rows, groups, 1], of what all threads of a group know: they all store it, at
    once. tl.store hands it to one thread for each address first, through shared memory and two barriers."""
    if INTERPRETED or not tl.target_info.cuda_capability_geq(8, 0):
        tl.store(address, value, mask=mask)
    else:
        element: tl.constexpr = address.dtype.element_ty
        integer: tl.constexpr = tl.uint8 if element.primitive_bitwidth == 8 else tl.uint32
        word = value.to(element).to(integer, bitcast=True).to(tl.uint32)
        # A thread has as many copies of each as it has elements of the group, until the last axis is gone.
        tl.inline_asm_elementwise(
            STORE_8 if element.primitive_bitwidth == 8 else STORE_32,
            "=r,l,r,r",
            [tl.max(address.to(tl.uint64, bitcast=True), 2), tl.max(word, 2), tl.max(mask.to(tl.uint32), 2)],
            dtype=tl.uint32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """fp32 -> `dtype`, nearest-even. The interpreter truncates to bf16 and loses its subnormal numbers, so there the
    bits are rounded."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        rounded = tl.where(value != value, bits | 0x400000, rounded)
        return (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@triton.jit
def round_to(value, dtype: tl.constexpr):
    """fp32 -> `dtype` -> fp32, nearest-even. To bf16 in pairs where the GPU can: three instructions for both. One by
    one, ptxas may take a conversion of a quarter of the rate."""
    if dtype == tl.float32:
        rounded = value
    elif dtype == tl.bfloat16 and not INTERPRETED and tl.target_info.cuda_capability_geq(8, 0):
        rounded = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, low, high;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 low, pair, 16;
            and.b32 high, pair, 0xFFFF0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""",
            "=f,=f,f,f",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        rounded = widen(narrow(value, dtype))
    return rounded


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
    inverse = tl.fma(tl.fma(negate(value), inverse, 1.0), inverse, inverse)
    inverse = tl.fma(tl.fma(negate(value), inverse, 1.0), inverse, inverse)
    all_ones = (value.to(tl.uint32, bitcast=True) & 0x7FFFFF) == 0x7FFFFF
    return (inverse.to(tl.uint32, bitcast=True) | all_ones.to(tl.uint32)).to(tl.float32, bitcast=True)


@triton.jit
def divide(value, divisor, inverse):
    """value / divisor rounded once to fp32 (IEEE), for a positive divisor and `inverse`, 1 / divisor rounded to fp32.

    With q = RN(v*r), the remainder q*d - v is exact in an fma, and RN(q - r*(q*d - v)) is the correctly rounded
    quotient: found equal to the IEEE division for every mantissa of bf16 and fp16 values with every fp32 mantissa of
    the divisor. Holds while nothing leaves the normal range; scales are kept in [2^-80, FLT_MAX/448] for that. An
    infinite value gives NaN. A remainder of 0 is +0, subtracted from q = -0 it leaves -0; v - q*d, added, would not.
    The interpreter's fma rounds twice, so it divides.
    """
    if INTERPRETED:
        quotient = tl.div_rn(value, tl.broadcast_to(divisor, value.shape))
        return tl.where(tl.abs(value) == float("inf"), float("nan"), quotient)
    quotient = value * inverse
    return tl.fma(tl.fma(quotient, divisor, negate(value)), negate(inverse), quotient)


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
