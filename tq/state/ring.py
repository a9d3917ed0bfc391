"""The steps of a state since it was last rounded: S = decay S0 + sum of u_i k_i^T, kept as its terms.

Entry i holds k_i, u_i = beta (v - S k) and G_i, the sum of log decays of the entries up to it, so that what has become
of it after entry j is exp(G_j - G_i) k_i: no quotient of decays, which could overflow. Every program has counts of its
own, one for each value channel, so that no program changes what another one still reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.kernels.device import round_to
from tq.kernels.producer import INPUT_DTYPES, check_choice, constant
from tq.kernels.target import INTERPRETED
from tq.state.bind import bind_states, check_shape, check_tensor, padded
from tq.state.packing import contract

LONGEST = 128  # entries; counts are bytes
LEAST = 16  # entries that a matrix product takes
# Three bf16 of each fp32, of which the six largest products are added: fp32 but for the order of sums.
PRECISION = tl.constexpr("ieee" if INTERPRETED else "bf16x6")
GATES = ("head", "key_channel")


@dataclass(frozen=True)
class Ring:
    """keys [S, key heads, L, K] and updates [S, heads, L, V] bf16, fp16 or fp32; decays [S, heads, L, 1 or K] fp32;
    counts [S, heads, V] uint8, each the entries in use. drafts: entries that must be free before a step; with D of them
    a state is rounded once in L - D + 1 tokens."""

    keys: torch.Tensor
    updates: torch.Tensor
    decays: torch.Tensor
    counts: torch.Tensor
    drafts: int = 1

    @classmethod
    def zeros(
        cls,
        slots: int,
        heads: int,
        values: int,
        keys: int,
        *,
        length: int = 16,
        gate: str = "head",
        key_heads: int | None = None,
        drafts: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> Ring:
        """Empty rings. gate "head": a decay a head, as GDN has; "key_channel": as KDA has. key_heads: heads for None.
        dtype: of k and u; bf16 costs 0.1 % of the output (perf/results/state_accuracy.json)."""
        check_choice("Ring.zeros", "gate", gate, GATES)
        decays = (slots, heads, length, 1 if gate == "head" else keys)
        return cls(
            torch.zeros(slots, key_heads or heads, length, keys, dtype=dtype, device=device),
            torch.zeros(slots, heads, length, values, dtype=dtype, device=device),
            torch.zeros(decays, dtype=torch.float32, device=device),
            torch.zeros(slots, heads, values, dtype=torch.uint8, device=device),
            drafts,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.updates, self.decays, self.counts


class DeviceRing(NamedTuple):
    """A ring as a kernel takes it; strides are elements between slots. GROUP: value heads that share a key head.
    DECAYS: decays of an entry. DRAFTS: entries that must be free."""

    keys: Any
    keys_stride: int
    updates: Any
    updates_stride: int
    decays: Any
    decays_stride: int
    counts: Any
    counts_stride: int
    GROUP: tl.constexpr
    LENGTH: tl.constexpr
    PADDED: tl.constexpr
    DECAYS: tl.constexpr
    DRAFTS: tl.constexpr


NO_RING = DeviceRing(None, 0, None, 0, None, 0, None, 0, *map(constant, (1, 1, 1, 1, 1)))


@triton.jit
def values_of(block, cut):
    """(value channels of a block, whether they exist)"""
    value = block * cut.BLOCK_ROWS + tl.arange(0, cut.BLOCK_ROWS)
    return value, value < cut.ROWS


@triton.jit
def read_count(ring, slot, head, part, exists, cut):
    """Entries in use, int32; 0 of a state that does not exist. That of the first of the part's value channels, whose
    counts are all the same."""
    at = ring.counts + (slot * ring.counts_stride + head * cut.ROWS) + part * cut.BLOCK_ROWS
    return tl.minimum(tl.load(at, mask=exists, other=0).to(tl.int32), ring.LENGTH)


@triton.jit
def write_count(ring, slot, head, part, count, cut):
    value, inside = values_of(part, cut)
    at = ring.counts + (slot * ring.counts_stride + head * cut.ROWS) + value
    tl.store(at, (tl.zeros([cut.BLOCK_ROWS], tl.int32) + count).to(tl.uint8), mask=inside)


@triton.jit
def decays_of(ring, cut):
    """(channels of an entry's decay [1, 1 or BLOCK_COLS], whether they exist)"""
    if ring.DECAYS == 1:
        channel = tl.arange(0, 1)[None, :]
    else:
        channel = tl.arange(0, cut.BLOCK_COLS)[None, :]
    return channel, channel < ring.DECAYS


@triton.jit
def entry_of_decays(ring, slot, head, entry):
    return ring.decays + (slot * ring.decays_stride + (head * ring.LENGTH + entry) * ring.DECAYS)


@triton.jit
def entry_of_keys(ring, slot, head, entry, cut):
    return ring.keys + (slot * ring.keys_stride + (head // ring.GROUP * ring.LENGTH + entry) * cut.COLS)


@triton.jit
def entry_of_updates(ring, slot, head, entry, cut):
    return ring.updates + (slot * ring.updates_stride + (head * ring.LENGTH + entry) * cut.ROWS)


@triton.jit
def total_of(ring, slot, head, count, cut):
    """Sum of the log decays of `count` entries, [1, 1 or BLOCK_COLS]; that of the last of them, 0 of none."""
    at = entry_of_decays(ring, slot, head, count - 1)
    if ring.DECAYS == 1:
        total = tl.zeros([1, 1], tl.float32) + tl.load(at, mask=count > 0, other=0.0)
    else:
        channel = tl.arange(0, cut.BLOCK_COLS)
        # Of no entries none is loaded: no channel is below 0.
        total = tl.load(at + channel, mask=channel < tl.minimum(count, 1) * cut.COLS, other=0.0)[None, :]
    return total


@triton.jit
def write_entry(ring, slot, head, part, entry, k, total, cut):
    """k [1, BLOCK_COLS] and the sum of log decays. All programs of a key head write its k."""
    key = tl.arange(0, cut.BLOCK_COLS)[None, :]
    dtype: tl.constexpr = ring.keys.dtype.element_ty
    tl.store(entry_of_keys(ring, slot, head, entry, cut) + key, round_to(k, dtype).to(dtype), mask=key < cut.COLS)
    channel, inside = decays_of(ring, cut)
    tl.store(entry_of_decays(ring, slot, head, entry) + channel, total, mask=inside)


@triton.jit
def write_update(ring, slot, head, block, entry, update, cut):
    """u [BLOCK_ROWS] of a block."""
    value, inside = values_of(block, cut)
    dtype: tl.constexpr = ring.updates.dtype.element_ty
    tl.store(entry_of_updates(ring, slot, head, entry, cut) + value, round_to(update, dtype).to(dtype), mask=inside)


@triton.jit
def load_entries(ring, slot, head, count, cut):
    """k_i [PADDED, BLOCK_COLS] of the entries in use, zeros of others, in their dtype."""
    entry, key = tl.arange(0, ring.PADDED)[:, None], tl.arange(0, cut.BLOCK_COLS)[None, :]
    at = entry_of_keys(ring, slot, head, entry, cut) + key
    return tl.load(at, mask=(entry < count) & (key < cut.COLS), other=0.0)


@triton.jit
def load_sums(ring, slot, head, count, cut):
    """G_i [PADDED, 1] or [PADDED, BLOCK_COLS] of the entries in use, zeros of others."""
    entry = tl.arange(0, ring.PADDED)
    if ring.DECAYS == 1:
        sums = tl.load(entry_of_decays(ring, slot, head, entry), mask=entry < count, other=0.0)[:, None]
    else:
        channel, inside = decays_of(ring, cut)
        at = entry_of_decays(ring, slot, head, entry[:, None]) + channel
        sums = tl.load(at, mask=(entry[:, None] < count) & inside, other=0.0)
    return sums


@triton.jit
def load_updates(ring, slot, head, block, count, cut):
    """u_i [BLOCK_ROWS, PADDED] of a block and of the entries in use, zeros of others, in their dtype."""
    entry = tl.arange(0, ring.PADDED)[None, :]
    value, inside = values_of(block, cut)
    at = entry_of_updates(ring, slot, head, entry, cut) + value[:, None]
    return tl.load(at, mask=(entry < count) & inside[:, None], other=0.0)


@triton.jit
def decays_since(sums, total):
    """exp(total - G_i)"""
    return tl.exp(total - sums)


@triton.jit
def with_entries(keys, decays, vector):
    """exp(total - G_i) k_i vector for the vector [1, BLOCK_COLS], [PADDED]."""
    if decays.shape[1] == 1:
        sums = contract(keys, vector) * tl.reshape(decays, [keys.shape[0]])
    else:
        sums = contract(keys * decays, vector)
    return sums


@triton.jit
def of_updates(updates, values, tile):
    """tile + updates [rows, entries] values [entries, columns], fp32 but for the order of sums."""
    if updates.dtype == tl.bfloat16 and not INTERPRETED:
        # Of six products of parts three are left, as one factor has but one part.
        first = values.to(tl.bfloat16)
        rest = values - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        tile = tl.dot(updates, first, tl.dot(updates, second, tl.dot(updates, third, tile)))
    else:
        tile = tl.dot(updates.to(tl.float32), values, tile, input_precision=PRECISION)
    return tile


@triton.jit
def fold(tile, ring, slot, head, block, count, total, cut):
    """tile + sum of u_i (exp(total - G_i) k_i)^T over the entries in use, [BLOCK_ROWS, BLOCK_COLS]."""
    keys = load_entries(ring, slot, head, count, cut).to(tl.float32)
    sums, updates = load_sums(ring, slot, head, count, cut), load_updates(ring, slot, head, block, count, cut)
    return of_updates(updates, keys * decays_since(sums, total), tile)


def bind_ring(op: str, ring: Ring, codes: torch.Tensor) -> DeviceRing:
    """Checks a ring beside codes [S, heads, V, K]."""
    slots, heads, values, keys = codes.shape
    device = codes.device
    check_tensor(op, "ring.keys", ring.keys, INPUT_DTYPES, device)
    if ring.keys.dim() != 4 or not 1 <= ring.keys.shape[2] <= LONGEST or heads % max(ring.keys.shape[1], 1):
        raise ValueError(
            f"{op}: ring.keys must be [{slots}, key heads, L, {keys}] with at most {LONGEST} entries and the key heads "
            f"dividing {heads}, got shape {tuple(ring.keys.shape)}"
        )
    key_heads, length = ring.keys.shape[1:3]
    check_shape(op, "ring.keys", ring.keys, (slots, key_heads, length, keys))
    check_tensor(op, "ring.updates", ring.updates, (ring.keys.dtype,), device)
    check_shape(op, "ring.updates", ring.updates, (slots, heads, length, values))
    check_tensor(op, "ring.decays", ring.decays, (torch.float32,), device)
    width = ring.decays.shape[-1] if ring.decays.dim() else 0
    if tuple(ring.decays.shape) not in ((slots, heads, length, 1), (slots, heads, length, keys)):
        raise ValueError(
            f"{op}: ring.decays must be [{slots}, {heads}, {length}, 1 or {keys}], got {tuple(ring.decays.shape)}"
        )
    check_tensor(op, "ring.counts", ring.counts, (torch.uint8,), device)
    check_shape(op, "ring.counts", ring.counts, (slots, heads, values))
    if not isinstance(ring.drafts, int) or not 1 <= ring.drafts <= length:
        raise ValueError(f"{op}: ring.drafts must be 1 to {length}, the length of the ring, got {ring.drafts!r}")
    places = [
        bind_states(op, f"ring.{name}", tensor, device, (*INPUT_DTYPES, torch.uint8))
        for name, tensor in (
            ("keys", ring.keys),
            ("updates", ring.updates),
            ("decays", ring.decays),
            ("counts", ring.counts.unsqueeze(1)),
        )
    ]
    strides = [number for place in places for number in (place.data, place.stride)]
    constants = heads // key_heads, length, max(padded(length), LEAST), width, ring.drafts
    return DeviceRing(*strides, *map(constant, constants))
