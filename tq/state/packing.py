"""Codes and scales on the device: loaded, stored, and multiplied without a product for each element.

A scale of whole rows multiplies sums over keys, one of key channels the vector that the codes are multiplied with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tq.state.cache import Slots, as_block, as_groups, elements_of
from tq.state.formats import fit, invert


class DevicePacked(NamedTuple):
    """A packed state as a kernel takes it: bytes and scales, the elements between slots, and the slots meant."""

    codes: Any
    codes_stride: int
    scales: Any
    scales_stride: int
    slots: Slots


@triton.jit
def scales_of(part, exists, cut):
    """(offset in the head, whether it exists) of the scales of a part, [groups of rows, 1, groups of columns, 1]."""
    rows: tl.constexpr = cut.BLOCK_ROWS // cut.GROUP_ROWS
    cols: tl.constexpr = cut.BLOCK_COLS // cut.GROUP_COLS
    all_rows: tl.constexpr = (cut.ROWS + cut.GROUP_ROWS - 1) // cut.GROUP_ROWS
    all_cols: tl.constexpr = (cut.COLS + cut.GROUP_COLS - 1) // cut.GROUP_COLS
    row = (part * rows + tl.arange(0, rows))[:, None, None, None]
    col = tl.arange(0, cols)[None, None, :, None]
    return row * all_cols + col, (row < exists.to(tl.int32) * all_rows) & (col < all_cols)


@triton.jit
def head_of_scales(packed, slot, head, cut):
    """Address of the scales of a head."""
    rows: tl.constexpr = (cut.ROWS + cut.GROUP_ROWS - 1) // cut.GROUP_ROWS
    cols: tl.constexpr = (cut.COLS + cut.GROUP_COLS - 1) // cut.GROUP_COLS
    return packed.scales + (slot * packed.scales_stride + head * (rows * cols))


@triton.jit
def load_packed(packed, slot, head, part, exists, format, cut):
    """(values of the codes [BLOCK_ROWS, BLOCK_COLS], scales [groups, 1, groups, 1]) of a part; zeros of none."""
    at, inside = elements_of(part, exists, cut)
    codes = tl.load(
        packed.codes + (slot * packed.codes_stride + head * (cut.ROWS * cut.COLS)) + at, mask=inside, other=0
    )
    at, inside = scales_of(part, exists, cut)
    scale = tl.load(head_of_scales(packed, slot, head, cut) + at, mask=inside, other=0.0)
    return format.unpack(codes), scale


@triton.jit
def store_packed(packed, slot, head, part, exists, tile, format, cut):
    """A tile of whole groups, rounded once."""
    groups = as_groups(tile, cut)
    scale, back = fit(groups, format)
    codes = format.pack(as_block(groups * scale, cut))
    at, inside = elements_of(part, exists, cut)
    tl.store(packed.codes + (slot * packed.codes_stride + head * (cut.ROWS * cut.COLS)) + at, codes, mask=inside)
    at, inside = scales_of(part, exists, cut)
    tl.store(head_of_scales(packed, slot, head, cut) + at, invert(back), mask=inside)


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
def contract(codes, scale, decay, vector, cut):
    """sum over keys of codes * scale * decay * vector, [BLOCK_ROWS], for decay [1, 1 or BLOCK_COLS] and vector [1,
    BLOCK_COLS]: what all keys share multiplies the sums, the rest the vector, nothing the elements."""
    if cut.GROUP_COLS == cut.BLOCK_COLS:
        if decay.shape[1] == 1:
            sums = tl.sum(codes * vector, 1) * (of_rows(scale, cut) * tl.reshape(decay, [1]))
        else:
            sums = tl.sum(codes * (decay * vector), 1) * of_rows(scale, cut)
    else:
        sums = tl.sum(codes * of_keys(scale, decay * vector, cut), 1)
    return sums


@triton.jit
def decayed(codes, scale, decay, cut):
    """codes * scale * decay, for decay [1, 1 or BLOCK_COLS]."""
    if cut.GROUP_COLS == cut.BLOCK_COLS:
        tile = codes * (of_rows(scale, cut)[:, None] * decay)
    else:
        tile = codes * of_keys(scale, decay, cut)
    return tile
