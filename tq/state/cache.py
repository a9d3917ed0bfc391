"""The state cache on the device: the slot of a request, the matrix of a head in it, and how that is cut into programs.

A head is a [ROWS, COLS] matrix, dense in memory: values by keys (value-first) or keys by values (key-first). Heads of a
slot follow one another; slots may lie any distance apart, since engines keep other state between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.kernels.device import wait_for_inputs

EARLIER = tl.constexpr(256)  # requests compared at a time in `is_first`


class Slots(NamedTuple):
    """Which slot each request has. ids: int32 or int64, at request * stride + column * column_stride.

    num_accepted: tokens accepted of each request, the column plus one; None: column 0. present: bytes, 0 for a request
    that has no state yet; None: all have. size: slots of the cache. null: a slot that is none, -1 for no such slot.
    """

    ids: torch.Tensor | None
    stride: int
    column_stride: int
    columns: int
    num_accepted: torch.Tensor | None
    present: torch.Tensor | None
    size: int
    null: int


# A kernel asks whether `ids` is None: Triton 3.6 cannot ask that of a tuple that has a None inside.
IN_ORDER = Slots(None, 0, 0, 0, None, None, 0, 0)


class Place(NamedTuple):
    """Where states lie: `stride` elements apart, in the order of `slots`, or one a request for IN_ORDER."""

    data: Any
    stride: int
    slots: Slots


NOWHERE = Place(None, 0, IN_ORDER)


class Cut(NamedTuple):
    """How a head is cut: PARTS programs of BLOCKS blocks of BLOCK_ROWS rows, each of whole groups of GROUP_ROWS x
    GROUP_COLS. STAGES: blocks of a program that are on their way or worked on at once. PIECE: bytes of a row that
    lie in neighbouring threads, 16 in each. OVERLAPS: the kernel is launched while the one ahead of it still runs."""

    HEADS: tl.constexpr
    ROWS: tl.constexpr
    COLS: tl.constexpr
    BLOCK_ROWS: tl.constexpr
    BLOCK_COLS: tl.constexpr
    GROUP_ROWS: tl.constexpr
    GROUP_COLS: tl.constexpr
    PARTS: tl.constexpr
    BLOCKS: tl.constexpr
    STAGES: tl.constexpr
    PIECE: tl.constexpr
    OVERLAPS: tl.constexpr


@triton.jit
def begin(cut):
    """(request, head, part) of this program, from where on its inputs may be read; the request is int64, since its
    offset leaves 32 bits."""
    wait_for_inputs(cut.OVERLAPS)
    program = tl.program_id(0)
    head = program // cut.PARTS
    return (head // cut.HEADS).to(tl.int64), head % cut.HEADS, program % cut.PARTS


@triton.jit
def find_slot(slots, request, asked):
    """(slot, whether it is one) of each request, int64 and bool; none where not asked for."""
    address = slots.ids + request * slots.stride
    if slots.num_accepted is not None:
        column = tl.load(slots.num_accepted + request, mask=asked, other=0).to(tl.int64) - 1
        asked = asked & (column >= 0) & (column < slots.columns)
        address += column * slots.column_stride
    slot = tl.load(address, mask=asked, other=-1).to(tl.int64)
    asked = asked & (slot >= 0) & (slot < slots.size) & (slot != slots.null)
    if slots.present is not None:
        asked = asked & (tl.load(slots.present + request, mask=asked, other=0) != 0)
    return slot, asked


@triton.jit
def slot_of(slots, request):
    """(slot, whether it is one) of this program's request."""
    slot, exists = request, request >= 0
    if slots.ids is not None:
        slot, exists = find_slot(slots, request, exists)
    return slot, exists


@triton.jit
def find_head(place, request, head, cut):
    """(address of a head, whether it exists)"""
    slot, exists = slot_of(place.slots, request)
    return place.data + (slot * place.stride + head * (cut.ROWS * cut.COLS)), exists


@triton.jit
def is_first(place, request):
    """Whether no earlier request has the slot of this one, so that of several requests exactly one writes it."""
    repeated = request < 0
    if place.slots.ids is not None:
        slot, _exists = find_slot(place.slots, request, request >= 0)
        start = request * 0
        while start < request:
            other = start + tl.arange(0, EARLIER)
            others, exist = find_slot(place.slots, other, other < request)
            repeated = repeated | (tl.max((exist & (others == slot)).to(tl.int32), 0) > 0)
            start += EARLIER
    return repeated == 0


@triton.jit
def elements_of(block, exists, cut):
    """(offset in the head, whether it exists) of the elements of a block, [BLOCK_ROWS, BLOCK_COLS]; none of a head that
    does not exist (said by a row number: the interpreter makes no mask of a broadcast bool)."""
    row = (block * cut.BLOCK_ROWS + tl.arange(0, cut.BLOCK_ROWS))[:, None]
    col = tl.arange(0, cut.BLOCK_COLS)[None, :]
    return row * cut.COLS + col, (row < exists.to(tl.int32) * cut.ROWS) & (col < cut.COLS)


@triton.jit
def bytes_of(block, exists, cut):
    """As `elements_of`, of bytes, [BLOCK_ROWS, pieces, PIECE]: one in pieces of 64 lies in 8 rows of 4 threads, as do
    the products of a tensor core."""
    row = (block * cut.BLOCK_ROWS + tl.arange(0, cut.BLOCK_ROWS))[:, None, None]
    piece = tl.arange(0, cut.BLOCK_COLS // cut.PIECE)[None, :, None]
    col = piece * cut.PIECE + tl.arange(0, cut.PIECE)[None, None, :]
    return row * cut.COLS + col, (row < exists.to(tl.int32) * cut.ROWS) & (col < cut.COLS)


@triton.jit
def load_bytes(pointer, block, exists, cut):
    """The bytes of a block, [BLOCK_ROWS, BLOCK_COLS], zeros of none."""
    at, inside = bytes_of(block, exists, cut)
    return tl.reshape(tl.load(pointer + at, mask=inside, other=0), [cut.BLOCK_ROWS, cut.BLOCK_COLS])


@triton.jit
def store_bytes(pointer, block, exists, tile, cut):
    """The inverse of `load_bytes`."""
    at, inside = bytes_of(block, exists, cut)
    pieces: tl.constexpr = cut.BLOCK_COLS // cut.PIECE
    tl.store(pointer + at, tl.reshape(tile, [cut.BLOCK_ROWS, pieces, cut.PIECE]), mask=inside)


@triton.jit
def quarter_of(block, exists, quarter, cut):
    """As `elements_of`, of a quarter of the columns."""
    row = (block * cut.BLOCK_ROWS + tl.arange(0, cut.BLOCK_ROWS))[:, None]
    col = quarter * (cut.BLOCK_COLS // 4) + tl.arange(0, cut.BLOCK_COLS // 4)[None, :]
    return row * cut.COLS + col, (row < exists.to(tl.int32) * cut.ROWS) & (col < cut.COLS)


@triton.jit
def load_quarters(pointer, block, exists, cut):
    """The elements of a block, [BLOCK_ROWS, BLOCK_COLS], zeros of none. Loaded by quarters of the columns, a row lies
    in a quarter of the threads, and a sum over it takes two exchanges less."""
    if cut.BLOCK_COLS < 16:
        at, inside = elements_of(block, exists, cut)
        tile = tl.load(pointer + at, mask=inside, other=0.0)
    else:
        at, inside = quarter_of(block, exists, 0, cut)
        first = tl.load(pointer + at, mask=inside, other=0.0)
        at, inside = quarter_of(block, exists, 1, cut)
        second = tl.load(pointer + at, mask=inside, other=0.0)
        at, inside = quarter_of(block, exists, 2, cut)
        third = tl.load(pointer + at, mask=inside, other=0.0)
        at, inside = quarter_of(block, exists, 3, cut)
        fourth = tl.load(pointer + at, mask=inside, other=0.0)
        joined = tl.join(tl.join(first, third), tl.join(second, fourth))
        tile = tl.reshape(tl.permute(joined, [0, 2, 3, 1]), [cut.BLOCK_ROWS, cut.BLOCK_COLS])
    return tile


@triton.jit
def store_quarters(pointer, block, exists, tile, cut):
    """The inverse of `load_quarters`."""
    if cut.BLOCK_COLS < 16:
        at, inside = elements_of(block, exists, cut)
        tl.store(pointer + at, tile, mask=inside)
    else:
        joined = tl.reshape(tile, [cut.BLOCK_ROWS, 2, 2, cut.BLOCK_COLS // 4])
        even, odd = tl.split(tl.permute(joined, [0, 3, 1, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        at, inside = quarter_of(block, exists, 0, cut)
        tl.store(pointer + at, first, mask=inside)
        at, inside = quarter_of(block, exists, 1, cut)
        tl.store(pointer + at, second, mask=inside)
        at, inside = quarter_of(block, exists, 2, cut)
        tl.store(pointer + at, third, mask=inside)
        at, inside = quarter_of(block, exists, 3, cut)
        tl.store(pointer + at, fourth, mask=inside)


@triton.jit
def as_groups(tile, cut):
    """[BLOCK_ROWS, BLOCK_COLS] -> [groups, GROUP_ROWS, groups, GROUP_COLS]"""
    rows: tl.constexpr = cut.BLOCK_ROWS // cut.GROUP_ROWS
    cols: tl.constexpr = cut.BLOCK_COLS // cut.GROUP_COLS
    return tl.reshape(tile, [rows, cut.GROUP_ROWS, cols, cut.GROUP_COLS])


@triton.jit
def as_block(groups, cut):
    """The inverse of `as_groups`."""
    return tl.reshape(groups, [cut.BLOCK_ROWS, cut.BLOCK_COLS])
