"""Codes and scales on the device: loaded, stored, and as a tile and a factor of each row whose product is the state.

A scale of whole rows is such a factor: it multiplies sums over keys, and no element. One of key channels multiplies the
elements, as a decay of key channels does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tq.kernels.device import reciprocal
from tq.state.cache import Slots, as_block, as_groups, load_bytes, store_bytes
from tq.state.formats import fit, invert, largest_magnitude, largest_of_groups

# Residuals are -7 to 7 of so many parts of a code, which is half a code at most.
RESIDUALS = tl.constexpr(14.0)


class DevicePacked(NamedTuple):
    """A packed state as a kernel takes it: bytes and scales, residuals or None, the elements between slots, and the
    slots meant. ROTATION: log2 of the value channels that a Hadamard matrix mixes."""

    codes: Any
    codes_stride: int
    scales: Any
    scales_stride: int
    residuals: Any
    residuals_stride: int
    slots: Slots
    ROTATION: tl.constexpr


@triton.jit
def scales_of(block, exists, cut):
    """(offset in the head, whether it exists) of the scales of a block, [groups of rows, 1, groups of columns, 1]."""
    rows: tl.constexpr = cut.BLOCK_ROWS // cut.GROUP_ROWS
    cols: tl.constexpr = cut.BLOCK_COLS // cut.GROUP_COLS
    all_rows: tl.constexpr = (cut.ROWS + cut.GROUP_ROWS - 1) // cut.GROUP_ROWS
    all_cols: tl.constexpr = (cut.COLS + cut.GROUP_COLS - 1) // cut.GROUP_COLS
    row = (block * rows + tl.arange(0, rows))[:, None, None, None]
    col = tl.arange(0, cols)[None, None, :, None]
    return row * all_cols + col, (row < exists.to(tl.int32) * all_rows) & (col < all_cols)


@triton.jit
def head_of_scales(packed, slot, head, cut):
    """Address of the scales of a head."""
    rows: tl.constexpr = (cut.ROWS + cut.GROUP_ROWS - 1) // cut.GROUP_ROWS
    cols: tl.constexpr = (cut.COLS + cut.GROUP_COLS - 1) // cut.GROUP_COLS
    return packed.scales + (slot * packed.scales_stride + head * (rows * cols))


@triton.jit
def head_of_codes(packed, slot, head, cut):
    """Address of the codes of a head."""
    return packed.codes + (slot * packed.codes_stride + head * (cut.ROWS * cut.COLS))


@triton.jit
def head_of_residuals(packed, slot, head, cut):
    """Address of the residuals of a head."""
    return packed.residuals + (slot * packed.residuals_stride + head * (cut.ROWS * cut.COLS // 2))


@triton.jit
def pairs_of(block, exists, cut):
    """As `elements_of`, of pairs of neighbouring columns, [BLOCK_ROWS, BLOCK_COLS / 2]."""
    row = (block * cut.BLOCK_ROWS + tl.arange(0, cut.BLOCK_ROWS))[:, None]
    pair = tl.arange(0, cut.BLOCK_COLS // 2)[None, :]
    return row * (cut.COLS // 2) + pair, (row < exists.to(tl.int32) * cut.ROWS) & (pair < cut.COLS // 2)


@triton.jit
def load_packed(packed, slot, head, block, exists, cut):
    """(codes [BLOCK_ROWS, BLOCK_COLS], residuals as int8, scales [groups, 1, groups, 1]) of a block; zeros of none.
    Codes again for residuals where there are none."""
    codes = load_bytes(head_of_codes(packed, slot, head, cut), block, exists, cut)
    residuals = codes
    if packed.residuals is not None:
        at, inside = pairs_of(block, exists, cut)
        pair = tl.load(head_of_residuals(packed, slot, head, cut) + at, mask=inside, other=0)
        first, second = (pair << 4).to(tl.int8, bitcast=True) >> 4, pair.to(tl.int8, bitcast=True) >> 4
        residuals = tl.reshape(tl.join(first, second), [cut.BLOCK_ROWS, cut.BLOCK_COLS])
    return codes, residuals, load_scales(packed, slot, head, block, exists, cut)


@triton.jit
def load_scales(packed, slot, head, block, exists, cut):
    """Scales [groups, 1, groups, 1] of a block; zeros of none."""
    at, inside = scales_of(block, exists, cut)
    return tl.load(head_of_scales(packed, slot, head, cut) + at, mask=inside, other=0.0)


@triton.jit
def store_scaled(packed, slot, head, block, exists, scaled, to_state, format, cut):
    """Codes of elements divided by their scales, what rounding left, and the scales [groups, 1, groups, 1]."""
    store_bytes(head_of_codes(packed, slot, head, cut), block, exists, format.pack(scaled), cut)
    if packed.residuals is not None:
        rest = format.round((scaled - format.round(scaled)) * RESIDUALS).to(tl.int32)
        first, second = tl.split(tl.reshape(rest, [cut.BLOCK_ROWS, cut.BLOCK_COLS // 2, 2]))
        at, inside = pairs_of(block, exists, cut)
        pair = (first & 15) | ((second & 15) << 4)
        tl.store(head_of_residuals(packed, slot, head, cut) + at, pair.to(tl.uint8), mask=inside)
    at, inside = scales_of(block, exists, cut)
    tl.store(head_of_scales(packed, slot, head, cut) + at, to_state, mask=inside)


@triton.jit
def store_packed(packed, slot, head, block, exists, tile, format, cut):
    """A tile of whole groups, rounded once, with the scale of `qdq_`."""
    groups = as_groups(tile, cut)
    scale, back = fit(groups, format)
    store_scaled(packed, slot, head, block, exists, as_block(groups * scale, cut), invert(back), format, cut)


@triton.jit
def fit_product(amax, factor, format):
    """As `fit`, of groups whose largest magnitude is amax * factor: (what amax is divided by, the state's scale). They
    are within some units in the last place of those of `fit`, and cost a third."""
    known = amax * factor
    usable = (known > 5.9604644775390625e-08) & (known < float("inf"))
    most: tl.constexpr = format.code.MAX
    scale = tl.where(usable, most * reciprocal(amax), 0.0)
    return scale, tl.where(usable, known * (1.0 / most), tl.where(known < 1.0, 1.0, float("nan")))


@triton.jit
def store_product(packed, slot, head, block, exists, tile, factor, format, cut):
    """As `store_packed` of tile * factor, the factors [BLOCK_ROWS] positive where rows have scales of their own, and 1
    elsewhere."""
    if cut.GROUP_ROWS == 1 and cut.GROUP_COLS == cut.BLOCK_COLS:
        amax = tl.reshape(largest_magnitude(tile, 1), [cut.BLOCK_ROWS])
        scale, back = fit_product(amax, factor, format)
        scaled, back = tile * scale[:, None], tl.reshape(back, [cut.BLOCK_ROWS, 1, 1, 1])
    else:
        groups = as_groups(tile, cut)
        scale, back = fit_product(largest_of_groups(groups), 1.0, format)
        scaled = as_block(groups * scale, cut)
    store_scaled(packed, slot, head, block, exists, scaled, back, format, cut)


@triton.jit
def of_rows(scale, cut):
    """Scales [groups, 1, 1, 1] of whole rows -> one a row, [BLOCK_ROWS]."""
    rows: tl.constexpr = cut.BLOCK_ROWS // cut.GROUP_ROWS
    return tl.reshape(tl.broadcast_to(scale, [rows, cut.GROUP_ROWS, 1, 1]), [cut.BLOCK_ROWS])


@triton.jit
def of_keys(scale, vector, cut):
    """scale * vector, the scales [groups, 1, groups, 1] of parts of rows and [1, 1 or BLOCK_COLS], as a block: one
    product for a group of rows."""
    rows: tl.constexpr = cut.BLOCK_ROWS // cut.GROUP_ROWS
    cols: tl.constexpr = cut.BLOCK_COLS // cut.GROUP_COLS
    vector = tl.reshape(tl.broadcast_to(vector, [1, cut.BLOCK_COLS]), [1, 1, cols, cut.GROUP_COLS])
    return as_block(tl.broadcast_to(scale * vector, [rows, cut.GROUP_ROWS, cols, cut.GROUP_COLS]), cut)


@triton.jit
def factored(packed, codes, residuals, scale, decay, format, cut):
    """(codes + residuals / 14) * scale * decay, for decay [1, 1 or BLOCK_COLS], as (tile [BLOCK_ROWS, BLOCK_COLS],
    factor [BLOCK_ROWS]) whose product it is."""
    values = format.unpack(codes)
    if packed.residuals is not None:
        values += residuals.to(tl.float32) * (1.0 / RESIDUALS)
    if cut.GROUP_COLS == cut.BLOCK_COLS:
        factor = of_rows(scale, cut)
        if decay.shape[1] == 1:
            factor *= tl.reshape(decay, [1])
        else:
            values *= decay
    else:
        values *= of_keys(scale, decay, cut)
        factor = tl.full([cut.BLOCK_ROWS], 1.0, tl.float32)
    return values, factor


@triton.jit
def butterfly(x, HALF: tl.constexpr):
    """a + b and a - b in place of the rows a and b that lie HALF apart, of [rows] or [rows, columns]."""
    width: tl.constexpr = HALF * (x.numel // x.shape[0])
    pairs = tl.reshape(x, [x.shape[0] // (2 * HALF), 2, width])
    first, second = tl.split(tl.permute(pairs, [0, 2, 1]))
    pairs = tl.permute(tl.join(first + second, first - second), [0, 2, 1])
    return tl.reshape(pairs, x.shape)


@triton.jit
def rotated(x, ROTATION: tl.constexpr):
    """H x for the orthonormal Hadamard matrix H of each 2^ROTATION rows, its own inverse."""
    for stage in tl.static_range(ROTATION):
        x = butterfly(x, 1 << stage)
    if ROTATION > 0:
        x *= 2.0 ** (-0.5 * ROTATION)
    return x


@triton.jit
def contract(tile, vector):
    """sum over columns of tile [rows, columns] * vector [1, columns], [rows]. Four neighbours are added by fma, one
    after the other; a tree would take a sum and a product more for every four."""
    if tile.shape[1] < 4:
        sums = tl.sum(tile * vector, 1)
    else:
        x02, x13 = tl.split(tl.reshape(tile, [tile.shape[0], tile.shape[1] // 4, 2, 2]))
        y02, y13 = tl.split(tl.reshape(vector, [1, tile.shape[1] // 4, 2, 2]))
        x0, x2 = tl.split(x02)
        x1, x3 = tl.split(x13)
        y0, y2 = tl.split(y02)
        y1, y3 = tl.split(y13)
        sums = tl.sum(x3 * y3 + (x2 * y2 + (x1 * y1 + x0 * y0)), 1)
    return sums


@triton.jit
def multiplied(tile, factor):
    """The product that `factored` leaves open."""
    return tile * factor[:, None]


@triton.jit
def updated(tile, factor, update, k, cut):
    """tile * factor + update k^T as `store_product` takes it: (tile, factor)."""
    if cut.GROUP_ROWS == 1 and cut.GROUP_COLS == cut.BLOCK_COLS:
        # The row over its factor costs an element one instruction. A factor that is nothing beside the update, or
        # nothing at all, is held where both the quotient and its inverse are numbers: what is left of the old row is
        # less than half a unit of any code.
        factor = tl.maximum(tl.maximum(factor, tl.abs(update) * 8.673617379884035e-19), 7.888609052210118e-31)
        tile += (update * reciprocal(factor))[:, None] * k
    else:
        tile = multiplied(tile, factor) + update[:, None] * k
        factor = tl.full([cut.BLOCK_ROWS], 1.0, tl.float32)
    return tile, factor
