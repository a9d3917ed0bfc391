"""The entries of rings: counted, and folded into the state when it is rounded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tq.state.bind import check_shape, check_tensor, run
from tq.state.cache import begin, slot_of
from tq.state.packed import PackedState, bind_packed
from tq.state.packing import factored, load_packed, multiplied, store_product
from tq.state.ring import fold, read_count, total_of, write_count


@triton.jit
def settle(packed, ring, slot, head, part, count, format, cut, folds):
    """The state with all entries of the ring in it, rounded once; the ring is empty then. By the blocks of `folds`,
    which take fewer registers."""
    total = total_of(ring, slot, head, count, cut)
    decay = tl.exp(total)
    for i in range(cut.BLOCK_ROWS // folds.BLOCK_ROWS):
        block = part * (cut.BLOCK_ROWS // folds.BLOCK_ROWS) + i
        codes, residuals, scale = load_packed(packed, slot, head, block, count >= 0, folds)
        tile, factor = factored(packed, codes, residuals, scale, decay, format, folds)
        tile = fold(multiplied(tile, factor), ring, slot, head, block, count, total, folds)
        ones = tl.full([folds.BLOCK_ROWS], 1.0, tl.float32)
        store_product(packed, slot, head, block, count >= 0, tile, ones, format, folds)


@triton.jit
def commit_kernel(packed, ring, accepted, FLUSH: tl.constexpr, format, cut):
    """Counts the accepted entries; rounds the state where too few are left free, or wherever there are any (FLUSH)."""
    request, head, part = begin(cut)
    slot, exists = slot_of(packed.slots, request)
    if exists:
        count = read_count(ring, slot, head, part, exists, cut)
        most = ring.LENGTH - count
        if accepted is not None:
            taken = tl.load(accepted + request).to(tl.int32)
            count += tl.minimum(tl.maximum(taken, 0), tl.minimum(most, ring.DRAFTS))
        full = count + ring.DRAFTS > ring.LENGTH
        if FLUSH:
            full = count > 0
        if full:
            settle(packed, ring, slot, head, part, count, format, cut, cut)
            count = count * 0
        write_count(ring, slot, head, part, count, cut)


def commit_(
    state: PackedState, slots: torch.Tensor, accepted: torch.Tensor, *, null_slot: int | None = 0
) -> PackedState:
    """The first accepted[i] tokens of the last `verify` of slots[i] are now of its state; returns `state`.

    Shapes: slots, accepted [B] int32 or int64; numbers out of [0, drafts] count as the nearest in it. Rounds a state
    with fewer entries free than drafts. Slots as in `gdn_decode_packed`. One launch, no allocation, no synchronization.
    """
    op = "state.commit_"
    check_tensor(op, "accepted", accepted, (torch.int32, torch.int64))
    check_shape(op, "accepted", accepted, tuple(slots.shape))
    return count_entries(op, state, slots, null_slot, accepted, False)


def flush_(state: PackedState, slots: torch.Tensor, *, null_slot: int | None = 0) -> PackedState:
    """Rounds the states that have entries in their rings, which are empty then; returns `state`. Slots as in
    `commit_`."""
    return count_entries("state.flush_", state, slots, null_slot, None, True)


def count_entries(
    op: str, state: PackedState, slots: torch.Tensor, null_slot: int | None, accepted: torch.Tensor | None, flush: bool
) -> PackedState:
    """Launches the kernel of `commit_` and `flush_`."""
    bound = bind_packed(op, state, slots, null_slot)
    if state.ring is None:
        raise NotImplementedError(f"{op}: the state must have a ring, got one that each step rounds")
    if accepted is not None and accepted.device != state.codes.device:
        raise ValueError(f"{op}: accepted must be on {state.codes.device} as the state is, got {accepted.device}")
    run(commit_kernel, slots.shape[0], bound.launch, state.codes.device, bound.packed, bound.ring, accepted, flush)
    return state
