"""Products of codes with k and q in integers: exact sums of what tensor cores multiply, and no code becomes a number.

A vector is m (d0 / 127 + d1 / (127 * 254) + ...) for a bound m of its magnitudes and four digits of a byte, 2^-31 of m
beyond which nothing is left. The bound is its length, which is there anyway. int32 holds the sums of
128 * 127 times up to 2^17 codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

BASE = tl.constexpr(254.0)
TOP = tl.constexpr(127.0)


@triton.jit
def nearest(x):
    """The nearest integer of |x| <= 2^22, in fp32."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def split_digits(vector, most):
    """Four digits [keys, 2, 2] of [keys], of which no magnitude is above `most`."""
    rest = vector * (TOP / most)
    first = nearest(rest)
    rest = (rest - first) * BASE
    second = nearest(rest)
    rest = (rest - second) * BASE
    third = nearest(rest)
    fourth = nearest((rest - third) * BASE)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def digits_of(k, q, most_k, most_q):
    """(digits [keys, 8], weights [1, 8]) of k and q [keys], which are no larger than these: digit i of k in column 2 i,
    that of q beside it. Weights are NaN where a bound is."""
    digits = tl.reshape(tl.join(split_digits(k, most_k), split_digits(q, most_q)), [k.shape[0], 8])
    column = tl.arange(0, 8)[None, :]
    low = tl.where(column < 6, 1.0 / 64516.0, 1.0 / 16387064.0)
    weight = tl.where(column < 4, tl.where(column < 2, 1.0, 1.0 / 254.0), low)
    weights = weight * (tl.where(column % 2 == 0, most_k, most_q) * (1.0 / TOP))
    return digits.to(tl.int32).to(tl.int8), weights


@triton.jit
def beside(of_k, of_q):
    """[entries] and [entries] as columns 0 and 1 of [entries, 8], zeros behind."""
    column = tl.arange(0, 8)[None, :]
    return tl.where(column == 0, of_k[:, None], tl.where(column == 1, of_q[:, None], 0.0))


@triton.jit
def products(codes, digits, weights):
    """codes [rows, keys] int8 * (k, q), [rows, 8]: that with k is the sum of the even columns, with q of the odd."""
    return tl.dot(codes, digits, out_dtype=tl.int32).to(tl.float32) * weights


@triton.jit
def sums(columns):
    """([rows], [rows]): the sums of even and of odd columns [rows, 8]."""
    return tl.split(tl.sum(tl.reshape(columns, [columns.shape[0], 4, 2]), 1))
