"""Decode steps on packed states: both products with the old codes, then what is new.

With S0 = codes * scales and a decay a, S k = S0 (a k) and S q = S0 (a q) + u (k q) for the new u: scales and decay
multiply vectors or sums, and codes are turned into numbers once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tq.state.bind import FOLDED, check_shape, joined, run
from tq.state.cache import begin, slot_of
from tq.state.commit import settle
from tq.state.decode import NULL_SLOT
from tq.state.digits import beside, digits_of, products, sums
from tq.state.packed import PackedState, bind_packed
from tq.state.packing import (
    RESIDUALS,
    contract,
    factored,
    load_packed,
    of_rows,
    rotated,
    store_product,
    updated,
)
from tq.state.ring import (
    decays_since,
    load_entries,
    load_sums,
    load_updates,
    of_updates,
    read_count,
    total_of,
    with_entries,
    write_count,
    write_entry,
    write_update,
)
from tq.state.step import Activations, bind_gdn, bind_kda, load_gates, load_keys, load_values, store_output, vectors_of


@triton.jit
def products_with(packed, codes, residuals, scale, decay, vectors, columns, format, cut):
    """(codes + residuals / 14) * scale * decay times k and times q, [BLOCK_ROWS] each, and the sums of even and of odd
    columns [BLOCK_ROWS, 8]."""
    if format.INTEGERS and cut.GROUP_COLS == cut.BLOCK_COLS and cut.BLOCK_COLS >= 32:
        factor = of_rows(scale, cut)
        if decay.shape[1] == 1:
            factor *= tl.reshape(decay, [1])
            k, q = vectors.k, vectors.q
        else:
            all_decays = tl.reshape(decay, [cut.BLOCK_COLS])
            k, q = vectors.k * all_decays, vectors.q * all_decays
        digits, weights = digits_of(k, q, vectors.most_k, vectors.most_q, cut.PIECE)
        of_codes = products(codes.to(tl.int8, bitcast=True), digits, weights, cut.PIECE)
        if packed.residuals is not None:
            of_codes += products(residuals, digits, weights * (1.0 / RESIDUALS), cut.PIECE)
        known, result = sums(of_codes * factor[:, None] + columns)
    else:
        tile, factor = factored(packed, codes, residuals, scale, decay, format, cut)
        known, result = sums(columns)
        known += contract(tile, vectors.k[None, :]) * factor
        result += contract(tile, vectors.q[None, :]) * factor
    return known, result


@triton.jit
def load_block(packed, given, row, slot, head, block, cut):
    """(codes, residuals, scales, v) of a block, as they are in memory."""
    codes, residuals, scale = load_packed(packed, slot, head, block, slot >= 0, cut)
    return codes, residuals, scale, load_values(given, row, head, block, cut)


@triton.jit
def round_block(packed, given, loaded, vectors, decay, beta, row, slot, head, block, format, cut):
    """A step of a block, rounded and stored."""
    codes, residuals, scale, v = loaded
    nothing = tl.zeros([cut.BLOCK_ROWS, 8], tl.float32)
    known, result = products_with(packed, codes, residuals, scale, decay, vectors, nothing, format, cut)
    update = (rotated(v.to(tl.float32), packed.ROTATION) - known) * beta
    store_output(given, row, head, block, rotated(result + update * vectors.both, packed.ROTATION), cut)
    tile, factor = factored(packed, codes, residuals, scale, decay, format, cut)
    tile, factor = updated(tile, factor, update, vectors.k[None, :], cut)
    store_product(packed, slot, head, block, slot >= 0, tile, factor, format, cut)


@triton.jit
def step_rounded(packed, given, keys, gates, row, slot, head, part, format, cut):
    """A step of the blocks of a head. A single one is asked for first, since its way is the longest."""
    if cut.BLOCKS == 1:
        loaded = load_block(packed, given, row, slot, head, part, cut)
    vectors = vectors_of(keys, given)
    log_decay, beta = given.step.gates_of(gates, given.gates)
    decay = tl.exp(log_decay)
    if cut.BLOCKS == 1:
        round_block(packed, given, loaded, vectors, decay, beta, row, slot, head, part, format, cut)
    else:
        for i in tl.range(cut.BLOCKS, num_stages=cut.STAGES):
            block = part * cut.BLOCKS + i
            each = load_block(packed, given, row, slot, head, block, cut)
            round_block(packed, given, each, vectors, decay, beta, row, slot, head, block, format, cut)


@triton.jit
def step_in_ring(packed, ring, given, keys, gates, row, slot, head, part, entry, total, format, cut):
    """A step of a block as an entry of the ring after those before it; the new sum of log decays."""
    codes, residuals, scale, v = load_block(packed, given, row, slot, head, part, cut)
    entries = load_entries(ring, slot, head, entry, cut)
    sums_of_entries = load_sums(ring, slot, head, entry, cut)
    updates = load_updates(ring, slot, head, part, entry, cut)
    vectors = vectors_of(keys, given)
    log_decay, beta = given.step.gates_of(gates, given.gates)
    total += log_decay
    k, q = vectors.k[None, :], vectors.q[None, :]
    write_entry(ring, slot, head, part, entry, k, total, cut)
    decays, entries = decays_since(sums_of_entries, total), entries.to(tl.float32)
    columns = beside(with_entries(entries, decays, k), with_entries(entries, decays, q))
    columns = of_updates(updates, columns, tl.zeros([cut.BLOCK_ROWS, 8], tl.float32))
    known, result = products_with(packed, codes, residuals, scale, tl.exp(total), vectors, columns, format, cut)
    update = (rotated(v.to(tl.float32), packed.ROTATION) - known) * beta
    store_output(given, row, head, part, rotated(result + update * vectors.both, packed.ROTATION), cut)
    write_update(ring, slot, head, part, entry, update, cut)
    tl.debug_barrier()  # the next token, or the rounding, reads the entry in other threads
    return total


@triton.jit
def decode_packed_kernel(packed, ring, given, TOKENS: tl.constexpr, COMMIT: tl.constexpr, folds, format, cut):
    """TOKENS steps of the state of each request, one after the other. Without a ring the state is rounded and stored by
    each; with one they are entries of it, which COMMIT counts."""
    request, head, part = begin(cut)
    row = request * TOKENS
    # All is asked for before anything is waited for.
    keys, gates = load_keys(given, row, head, cut), load_gates(given, row, head, cut)
    slot, exists = slot_of(packed.slots, request)
    if exists:
        if ring.keys is None:
            step_rounded(packed, given, keys, gates, row, slot, head, part, format, cut)
        else:
            count = tl.minimum(read_count(ring, slot, head, part, exists, cut), ring.LENGTH - ring.DRAFTS)
            total = total_of(ring, slot, head, count, cut)
            for token in tl.static_range(TOKENS):
                if token > 0:
                    keys, gates = load_keys(given, row + token, head, cut), load_gates(given, row + token, head, cut)
                at = row + token, slot, head, part, count + token
                total = step_in_ring(packed, ring, given, keys, gates, *at, total, format, cut)
            if COMMIT:
                count += TOKENS
                if count + ring.DRAFTS > ring.LENGTH:
                    settle(packed, ring, slot, head, part, count, format, cut, folds)
                    count = count * 0
                write_count(ring, slot, head, part, count, cut)
    else:
        nothing = tl.zeros([cut.BLOCK_ROWS], tl.float32)
        for token in tl.static_range(TOKENS):
            for i in range(cut.BLOCKS):
                store_output(given, row + token, head, part * cut.BLOCKS + i, nothing, cut)


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
    _, cut, _, _, shape = bound.launch
    folds = joined(cut, slots.shape[0], shape, FOLDED)
    cut = joined(cut, slots.shape[0], shape)
    constants = tokens, state.ring is not None and verify is None
    arguments = bound.packed, bound.ring, given, *constants, folds
    launch = bound.launch._replace(cut=cut)
    run(decode_packed_kernel, slots.shape[0], launch, state.codes.device, *arguments, fusion=True)
