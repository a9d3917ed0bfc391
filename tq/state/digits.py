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
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: what is added to it is rounded to an integer


@triton.jit
def in_place(tile, PIECE: tl.constexpr):
    """[rows, keys] with keys in another order, which a sum over them does not see: of a piece of 64 the thread t of a
    row has keys 16 t to 16 t + 15, and a tensor core takes the first 4 of each thread, then the next 4. So the codes of
    a block need not change threads. Rows that are one piece are as they are."""
    rows: tl.constexpr = tile.shape[0]
    if tile.shape[1] > PIECE:
        parts = tl.reshape(tile, [rows, tile.shape[1] // PIECE, PIECE // 16, 2, 2, 4])
        tile = tl.reshape(tl.permute(parts, [0, 1, 3, 4, 2, 5]), [rows, tile.shape[1]])
    return tile


@triton.jit
def word_of(vector, most):
    """Four digits of each as the bytes of a word, of a vector of which no magnitude is above `most`. The low byte of
    ROUND + x is that of the nearest integer of x."""
    rest = vector * (TOP / most)
    first = rest + ROUND
    rest = (rest - (first - ROUND)) * BASE
    second = rest + ROUND
    rest = (rest - (second - ROUND)) * BASE
    third = rest + ROUND
    fourth = (rest - (third - ROUND)) * BASE + ROUND
    low = (first.to(tl.uint32, bitcast=True) & 255) | ((second.to(tl.uint32, bitcast=True) & 255) << 8)
    high = (third.to(tl.uint32, bitcast=True) & 255) | (fourth.to(tl.uint32, bitcast=True) << 8)
    return low | (high << 16)


@triton.jit
def digits_of(k, q, most_k, most_q, PIECE: tl.constexpr):
    """(digits [keys, 8], weights [1, 8]) of k and q [keys], which are no larger than these: digit i of k in column 2 i,
    that of q beside it; keys in the order of `in_place`. Weights are NaN where a bound is. Made with a column in a row:
    a thread of a tensor core takes four keys of a column, which are neighbours so."""
    column = tl.arange(0, 8)[:, None]
    word = tl.where(column % 2 == 0, word_of(k, most_k)[None, :], word_of(q, most_q)[None, :])
    digits = (word >> (column // 2 * 8).to(tl.uint32)).to(tl.uint8).to(tl.int8, bitcast=True)
    column = tl.arange(0, 8)[None, :]
    low = tl.where(column < 6, 1.0 / 64516.0, 1.0 / 16387064.0)
    weight = tl.where(column < 4, tl.where(column < 2, 1.0, 1.0 / 254.0), low)
    weights = weight * (tl.where(column % 2 == 0, most_k, most_q) * (1.0 / TOP))
    return tl.trans(in_place(digits, PIECE)), weights


@triton.jit
def beside(of_k, of_q):
    """[entries] and [entries] as columns 0 and 1 of [entries, 8], zeros behind."""
    column = tl.arange(0, 8)[None, :]
    return tl.where(column == 0, of_k[:, None], tl.where(column == 1, of_q[:, None], 0.0))


@triton.jit
def products(codes, digits, weights, PIECE: tl.constexpr):
    """codes [rows, keys] int8 * (k, q), [rows, 8]: that with k is the sum of the even columns, with q of the odd."""
    return tl.dot(in_place(codes, PIECE), digits, out_dtype=tl.int32).to(tl.float32) * weights


@triton.jit
def sums(columns):
    """([rows], [rows]): the sums of even and of odd columns [rows, 8]."""
    return tl.split(tl.sum(tl.reshape(columns, [columns.shape[0], 4, 2]), 1))
