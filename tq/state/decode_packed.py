"""Decode steps on packed states: both products with the old codes, then what is new.

With S0 = codes * scales and a decay a, S k = S0 (a k) and S q = S0 (a q) + u (k q) for the new u: scales and decay
multiply vectors or sums, and codes are turned into numbers once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tq.state.bind import check_shape, check_tensor, merged, run
from tq.state.cache import begin, slot_of
from tq.state.decode import NULL_SLOT
from tq.state.digits import beside, digits_of, products, sums
from tq.state.packed import PackedState, bind_packed
from tq.state.packing import (
    contract,
    factored,
    load_integers,
    load_packed,
    load_scales,
    multiplied,
    of_rows,
    store_packed,
    store_product,
    updated,
)
from tq.state.ring import (
    PRECISION,
    fold,
    read_count,
    read_keys,
    read_updates,
    total_of,
    values_of,
    with_entries,
    write_count,
    write_entry,
    write_update,
)
from tq.state.step import Activations, bind_gdn, bind_kda, load_values, load_vectors, store_output


@triton.jit
def settle(packed, ring, slot, head, part, count, format, cut):
    """The state with all entries of the ring in it, rounded once; the ring is empty then."""
    total = total_of(ring, slot, head, count, cut)
    decay = tl.exp(total)
    for i in range(cut.BLOCKS):
        block = part * cut.BLOCKS + i
        codes, scale = load_packed(packed, slot, head, block, count >= 0, cut)
        tile, factor = factored(codes, scale, decay, format, cut)
        tile = fold(multiplied(tile, factor), ring, slot, head, block, count, total, cut)
        store_packed(packed, slot, head, block, count >= 0, tile, format, cut)


@triton.jit
def step_rounded(packed, given, row, slot, head, part, format, cut):
    """A step of all blocks of a part, each rounded and stored."""
    # Asked for first, since its way is the longest.
    codes, scale = load_packed(packed, slot, head, part * cut.BLOCKS, slot >= 0, cut)
    q, k, log_decay, beta = load_vectors(given, row, head, cut)
    both = tl.sum(k * q, 0)
    q, k, decay = q[None, :], k[None, :], tl.exp(log_decay)
    for i in range(cut.BLOCKS):
        block = part * cut.BLOCKS + i
        more = (i + 1 < cut.BLOCKS) & (slot >= 0)
        next_codes, next_scale = load_packed(packed, slot, head, block + 1, more, cut)
        value, in_values = values_of(block, cut)
        v = load_values(given, row, head, value, in_values, cut)
        tile, factor = factored(codes, scale, decay, format, cut)
        update = (v - contract(tile, k) * factor) * beta
        result = contract(tile, q) * factor + update * both
        store_output(given, row, head, value, in_values, result, cut)
        tile, factor = updated(tile, factor, update, k, cut)
        store_product(packed, slot, head, block, slot >= 0, tile, factor, format, cut)
        codes, scale = next_codes, next_scale


@triton.jit
def step_in_ring(packed, ring, given, row, slot, head, part, entry, total, format, cut):
    """A step of all blocks of a part as an entry of the ring after those before it; the new sum of log decays."""
    q, k, log_decay, beta = load_vectors(given, row, head, cut)
    both = tl.sum(k * q, 0)
    total += log_decay
    decay = tl.exp(total)
    write_entry(ring, slot, head, part, entry, k[None, :], total, cut)
    keys, decays = read_keys(ring, slot, head, entry, total, cut)
    entries_k = with_entries(keys, decays, k[None, :])
    entries_q = with_entries(keys, decays, q[None, :])
    INTEGERS: tl.constexpr = format.INTEGERS and cut.GROUP_COLS == cut.BLOCK_COLS and cut.BLOCK_COLS >= 32
    if INTEGERS:
        entries = beside(entries_k, entries_q)
        if ring.DECAYS == 1:
            digits, weights = digits_of(k, q)
            weights *= decay
        else:
            all_decays = tl.reshape(decay, [cut.BLOCK_COLS])
            digits, weights = digits_of(k * all_decays, q * all_decays)
    for i in tl.range(cut.BLOCKS, num_stages=cut.STAGES):
        block = part * cut.BLOCKS + i
        value, in_values = values_of(block, cut)
        updates = read_updates(ring, slot, head, block, entry, cut)
        if INTEGERS:
            codes = load_integers(packed, slot, head, block, slot >= 0, cut)
            scale = of_rows(load_scales(packed, slot, head, block, slot >= 0, cut), cut)
            of_codes = products(codes, digits, weights) * scale[:, None]
            known, result = sums(of_codes + tl.dot(updates, entries, input_precision=PRECISION))
        else:
            codes, scale = load_packed(packed, slot, head, block, slot >= 0, cut)
            tile, factor = factored(codes, scale, decay, format, cut)
            known = contract(tile, k[None, :]) * factor + tl.sum(updates * entries_k[None, :], 1)
            result = contract(tile, q[None, :]) * factor + tl.sum(updates * entries_q[None, :], 1)
        v = load_values(given, row, head, value, in_values, cut)
        update = (v - known) * beta
        store_output(given, row, head, value, in_values, result + update * both, cut)
        write_update(ring, slot, head, block, entry, update, cut)
    tl.debug_barrier()  # the next token, or the rounding, reads the entry in other threads
    return total


@triton.jit
def decode_packed_kernel(packed, ring, given, TOKENS: tl.constexpr, COMMIT: tl.constexpr, format, cut):
    """TOKENS steps of the state of each request, one after the other. Without a ring the state is rounded and stored by
    each; with one they are entries of it, which COMMIT counts."""
    request, head, part = begin(cut)
    slot, exists = slot_of(packed.slots, request)
    if exists:
        if ring.keys is None:
            step_rounded(packed, given, request, slot, head, part, format, cut)
        else:
            count = tl.minimum(read_count(ring, slot, head, part, exists, cut), ring.LENGTH - ring.DRAFTS)
            total = total_of(ring, slot, head, count, cut)
            for token in tl.static_range(TOKENS):
                row = request * TOKENS + token
                total = step_in_ring(packed, ring, given, row, slot, head, part, count + token, total, format, cut)
            if COMMIT:
                count += TOKENS
                if count + ring.DRAFTS > ring.LENGTH:
                    settle(packed, ring, slot, head, part, count, format, cut)
                    count = count * 0
                write_count(ring, slot, head, part, count, cut)
    else:
        for token in tl.static_range(TOKENS):
            for i in range(cut.BLOCKS):
                value, in_values = values_of(part * cut.BLOCKS + i, cut)
                nothing = tl.zeros([cut.BLOCK_ROWS], tl.float32)
                store_output(given, request * TOKENS + token, head, value, in_values, nothing, cut)


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
            settle(packed, ring, slot, head, part, count, format, cut)
            count = count * 0
        write_count(ring, slot, head, part, count, cut)


def gdn_decode_packed(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    state: PackedState,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    verify: int | None = None,
) -> tuple[torch.Tensor, PackedState]:
    """The step of `gdn_decode` on S = codes * scales; the new S is rounded once, or is an entry of the state's ring.

    Shapes: those of `gdn_decode`, but for the state. Slots: as there, 0, negative and too large ones give zeros in
    `out` and no update; two requests must not have the same slot. With a ring of L entries and D drafts, S is S0 and
    the steps in the ring, and is rounded by the step that leaves fewer than D entries free: by each of L - D + 1 tokens
    one. verify T, at most D: mixed_qkv, a, b and out are of B T rows, T tokens of each request in order; `out` is that
    of T steps one after the other, bit for bit, and the state stays what it is until `commit_` says how many were
    accepted. Rounding: nearest-even, in fp32, of a step computed in fp32 (k, u of earlier steps in the ring's dtype).
    Returns (out, state). One launch, no allocation, no synchronization; may be captured in a CUDA graph. Raises as
    `gdn_decode`; ValueError also for a ring of other heads or decays, NotImplementedError for verify without one.
    """
    op = "state.gdn_decode_packed"
    bind_packed(op, state, ssm_state_indices, NULL_SLOT, name="the state indices")
    rest = mixed_qkv, a, b, A_log, dt_bias, scale, out, use_qk_l2norm_in_kernel
    decode_packed(op, state, ssm_state_indices, bind_gdn(op, state.codes, *rest), 1, verify)
    return out, state


def kda_decode_packed(
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    state: PackedState,
    state_indices: torch.Tensor,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    *,
    verify: int | None = None,
) -> tuple[torch.Tensor, PackedState]:
    """The step of `kda_decode` on a packed state; its arguments, and the rest as `gdn_decode_packed`."""
    op = "state.kda_decode_packed"
    bind_packed(op, state, state_indices, NULL_SLOT, name="the state indices")
    given = bind_kda(op, state.codes, mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, scale, out)
    decode_packed(op, state, state_indices, given, state.codes.shape[3], verify)
    return given.out, state


def decode_packed(
    op: str, state: PackedState, slots: torch.Tensor, given: Activations, decays: int, verify: int | None
) -> None:
    """Launches the template for any gates; decays: of an entry of the ring."""
    bound = bind_packed(op, state, slots, NULL_SLOT, name="the state indices")
    tokens = 1 if verify is None else verify
    if state.ring is None:
        if verify is not None:
            raise NotImplementedError(
                f"{op}: verify must be None for a state without a ring, got {verify!r}; give it one"
            )
    else:
        if not isinstance(tokens, int) or not 1 <= tokens <= state.ring.drafts:
            raise ValueError(f"{op}: verify must be 1 to the ring's {state.ring.drafts} drafts, got {verify!r}")
        key_heads = bound.packed.codes.shape[1] // given.step.GROUP.value
        wanted = (key_heads, decays)
        if (state.ring.keys.shape[1], state.ring.decays.shape[3]) != wanted:
            raise ValueError(
                f"{op}: the ring must have {key_heads} key heads and {decays} decays of a head, got "
                f"{state.ring.keys.shape[1]} and {state.ring.decays.shape[3]}"
            )
    check_shape(op, "the state indices", slots, (given.qkv.data.shape[0] // tokens,))
    if given.qkv.data.shape[0] % tokens:
        raise ValueError(f"{op}: mixed_qkv must have verify={tokens} rows a request, got {given.qkv.data.shape[0]}")
    constants = tokens, state.ring is not None and verify is None
    arguments = bound.packed, bound.ring, given, *constants
    cut = merged(bound.launch.cut, slots.shape[0], bound.launch.programs)
    launch = bound.launch._replace(cut=cut)
    run(decode_packed_kernel, slots.shape[0], launch, state.codes.device, *arguments, fusion=True)


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
