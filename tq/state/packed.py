"""States kept as codes and scales: what a slot holds, and its ways in, out and over to another slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tq.kernels.device import round_to
from tq.kernels.producer import INPUT_DTYPES, check_choice, constant
from tq.state import bind
from tq.state.bind import (
    Launch,
    bind_format,
    bind_slots,
    bind_states,
    check_shape,
    check_tensor,
    padded,
    run,
)
from tq.state.cache import (
    Place,
    begin,
    elements_of,
    find_head,
    is_first,
    slot_of,
)
from tq.state.formats import GRANULARITIES
from tq.state.packing import DevicePacked, factored, load_packed, multiplied, rotated, store_packed
from tq.state.qdq import move_kernel
from tq.state.ring import NO_RING, DeviceRing, Ring, bind_ring, fold, read_count, total_of, write_count

# ModelOpt's narrow range: amax is 127, and nothing is -128.
CODES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class PackedState:
    """state = H (codes + residuals / 14) * scales (+ the steps in the ring).

    codes [S, heads, values, keys] int8 or float8_e4m3fn; scales [S, heads, groups of values, groups of keys] fp32, one
    for the channels that share it by `granularity` (names as in `qdq_`); heads dense, slots at any distance, so that
    all of a slot may be views of one page. ring: the steps since the state was last rounded, None where each step
    rounds it. residuals [S, heads, values, keys / 2] uint8: what rounding to int8 codes left, rounded to -7 to 7 of 14
    parts of a code, four bits each, those of even keys below; None: lost. hadamard: value channels that the orthonormal
    matrix H mixes, a power of two dividing them all; 0: H = 1. Outliers of a value channel are spread by it, and so is
    a NaN.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    granularity: str = "value_channel"
    ring: Ring | None = None
    residuals: torch.Tensor | None = None
    hadamard: int = 0

    @classmethod
    def zeros(
        cls,
        slots: int,
        heads: int,
        values: int,
        keys: int,
        *,
        code: str = "int8",
        granularity: str = "value_channel",
        device: torch.device | str | None = None,
        ring: Ring | None = None,
        residual: bool = False,
        hadamard: int = 0,
    ) -> PackedState:
        """A new cache of states that are zero. residual: with residuals. Raises ValueError for names that are none, and
        for `hadamard` that does not divide the values."""
        check_choice("PackedState.zeros", "code", code, tuple(CODES))
        check_hadamard("PackedState.zeros", hadamard, values)
        check_choice("PackedState.zeros", "granularity", granularity, tuple(GRANULARITIES))
        codes = torch.zeros(slots, heads, values, keys, dtype=CODES[code], device=device)
        shape = scales_shape(codes, granularity)
        scales = torch.zeros(shape, dtype=torch.float32, device=device)
        halves = (slots, heads, values, keys // 2)
        residuals = torch.zeros(halves, dtype=torch.uint8, device=device) if residual else None
        return cls(codes, scales, granularity, ring, residuals, hadamard)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that a slot holds, slots first."""
        residuals = () if self.residuals is None else (self.residuals,)
        return (self.codes, self.scales, *residuals, *(() if self.ring is None else self.ring.tensors))

    @property
    def slot_bytes(self) -> int:
        """Bytes of all that a slot holds."""
        return sum(each[:1].nbytes for each in self.tensors)


def scales_shape(codes: torch.Tensor, granularity: str) -> tuple[int, ...]:
    """[S, heads, groups of values, groups of keys] of codes [S, heads, values, keys]."""
    shared = GRANULARITIES[granularity]
    slots, heads, values, keys = codes.shape
    return slots, heads, -(-values // (shared.values or values)), -(-keys // (shared.keys or keys))


class Bound(NamedTuple):
    """Checked arguments, and the launch of a kernel that takes them."""

    packed: DevicePacked
    ring: DeviceRing
    launch: Launch


@triton.jit
def pack_kernel(source, packed, ring, format, cut):
    """packed = source, with nothing in the ring."""
    request, head, part = begin(cut)
    read, present = find_head(source, request, head, cut)
    slot, wanted = slot_of(packed.slots, request)
    if wanted:
        at, inside = elements_of(part, present, cut)
        tile = tl.load(read + at, mask=inside, other=0.0).to(tl.float32)
        if is_first(packed, request):
            store_packed(packed, slot, head, part, wanted, rotated(tile, packed.ROTATION), format, cut)
            if ring.keys is not None:
                write_count(ring, slot, head, part, 0, cut)


@triton.jit
def unpack_kernel(packed, ring, target, format, cut):
    """target = packed and the steps in the ring, zeros where there is none."""
    request, head, part = begin(cut)
    slot, present = slot_of(packed.slots, request)
    write, wanted = find_head(target, request, head, cut)
    codes, residuals, scale = load_packed(packed, slot, head, part, present, cut)
    if ring.keys is None:
        tile, factor = factored(packed, codes, residuals, scale, tl.full([1, 1], 1.0, tl.float32), format, cut)
        tile = multiplied(tile, factor)
    else:
        count = read_count(ring, slot, head, part, present, cut)
        total = total_of(ring, slot, head, count, cut)
        tile, factor = factored(packed, codes, residuals, scale, tl.exp(total), format, cut)
        tile = fold(multiplied(tile, factor), ring, slot, head, part, count, total, cut)
    dtype: tl.constexpr = target.data.dtype.element_ty
    at, inside = elements_of(part, wanted, cut)
    tile = rotated(tile, packed.ROTATION)
    tl.store(write + at, round_to(tile, dtype).to(dtype), mask=inside)


def pack_(
    state: PackedState,
    slots: torch.Tensor,
    values: torch.Tensor,
    *,
    null_slot: int | None = 0,
    num_accepted_tokens: torch.Tensor | None = None,
) -> PackedState:
    """codes[slots[i]] = round(values[i] * MAX / amax), scales = amax / MAX for every group; returns `state`.

    Shapes: values [B, heads, values, keys] fp32, bf16 or fp16; slots and what is skipped as in `qdq_`; of several
    requests with one slot the first is written. Rounding: nearest-even, in fp32, with the scale of `qdq_`. A group of
    amax <= 2^-24 becomes zeros, a group with a NaN or an infinity NaN. A ring becomes empty: what it held belongs to an
    earlier request. One launch; no allocation, no synchronization. Raises as `qdq_` does.
    """
    op = "state.pack_"
    bound = bind_packed(op, state, slots, null_slot, None, num_accepted_tokens)
    source = bind_states(op, "values", values, state.codes.device)
    check_shape(op, "values", values, (slots.shape[0], *state.codes.shape[1:]))
    run(pack_kernel, slots.shape[0], bound.launch, state.codes.device, source, bound.packed, bound.ring)
    return state


def unpack(
    state: PackedState,
    slots: torch.Tensor,
    *,
    null_slot: int | None = 0,
    has_initial_state: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i] = codes[slots[i]] * scales[slots[i]], and zeros for a request that has no slot or no state yet.

    Shapes: out [B, heads, values, keys] fp32, bf16 or fp16, a new fp32 tensor for None. Steps in a ring are counted in,
    without a rounding. What a slot without state holds, NaN included, is not read; the cache is left as it is. Slots as
    in `gather`, of which this is the form for packed states. FP8 gives what `gather` gives of the state that was
    packed; INT8 multiplies by 1 / s where `gather` divides by s.
    """
    op = "state.unpack"
    bound = bind_packed(op, state, slots, null_slot, has_initial_state, num_accepted_tokens)
    shape = (slots.shape[0], *state.codes.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=state.codes.device)
    target = bind_states(op, "out", out, state.codes.device)
    check_shape(op, "out", out, shape)
    run(unpack_kernel, slots.shape[0], bound.launch, state.codes.device, bound.packed, bound.ring, target)
    return out


def copy_(
    state: PackedState, sources: torch.Tensor, targets: torch.Tensor, *, null_slot: int | None = 0
) -> PackedState:
    """state[targets[i]] = state[sources[i]], every byte of it, the ring too; returns `state`.

    Shapes: sources, targets [B] int32 or int64; a target that is negative, `null_slot` or past the cache is skipped, a
    source that is one gives zeros. Of several requests with one target the first is written. No slot may be the source
    of one request and the target of another: their order is not defined. A launch for each tensor of the state.
    """
    op = "state.copy_"
    bind_packed(op, state, targets, null_slot)
    check_shape(op, "sources", sources, tuple(targets.shape))
    for tensor in state.tensors:
        view = tensor if tensor.dim() == 4 else tensor.unsqueeze(1)
        if tensor.dtype not in INPUT_DTYPES:
            view = view.view(torch.uint8)
        place = bind_states(op, "the state", view, dtypes=(*INPUT_DTYPES, torch.uint8))
        source = bind_slots(op, place, sources, null_slot, name="sources")
        target = bind_slots(op, place, targets, null_slot, name="targets")
        launch = bind_format(op, place, None, "head", "value_first")
        run(move_kernel, targets.shape[0], launch, state.codes.device, source, target)
    return state


def check_hadamard(op: str, size: int, values: int) -> None:
    """Raises ValueError where `size` of `values` channels cannot be mixed."""
    if not isinstance(size, int) or size < 0 or size & (size - 1) or (size and values % size):
        raise ValueError(f"{op}: hadamard must be 0 or a power of two that divides {values} values, got {size!r}")


def bind_residuals(op: str, state: PackedState) -> tuple[torch.Tensor | None, int]:
    """Checks the options of a packed state; (residuals, elements between slots)."""
    values, keys = state.codes.shape[2:]
    check_hadamard(op, state.hadamard, values)
    if state.residuals is None:
        return None, 0
    if state.codes.dtype != torch.int8:
        raise NotImplementedError(
            f"{op}: residuals must be of int8 codes, got {state.codes.dtype}, whose steps differ; leave them out"
        )
    if keys % 2:
        raise ValueError(f"{op}: keys must be even where states have residuals, got {keys}")
    place = bind_states(op, "residuals", state.residuals, state.codes.device, (torch.uint8,))
    check_shape(op, "residuals", state.residuals, (*state.codes.shape[:3], keys // 2))
    return place.data, place.stride


def bind_packed(
    op: str,
    state: PackedState,
    slots: torch.Tensor,
    null_slot: int | None,
    has_initial_state: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    name: str = "slots",
) -> Bound:
    """Checks a packed state and the slots of a call."""
    if not isinstance(state, PackedState):
        raise TypeError(f"{op}: the state must be a PackedState, got {type(state).__name__}")
    check_tensor(op, "codes", state.codes, tuple(CODES.values()))
    check_choice(op, "granularity", state.granularity, tuple(GRANULARITIES))
    code = next(code for code, dtype in CODES.items() if dtype == state.codes.dtype)
    codes = bind_states(op, "codes", state.codes.view(torch.uint8), dtypes=(torch.uint8,))
    scales: Place = bind_states(op, "scales", state.scales, state.codes.device, (torch.float32,))
    check_shape(op, "scales", state.scales, scales_shape(state.codes, state.granularity))
    place = bind_slots(op, codes, slots, null_slot, has_initial_state, num_accepted_tokens, name)
    residuals = bind_residuals(op, state)
    in_integers = code == "int8" and GRANULARITIES[state.granularity].keys == 0 and state.residuals is None
    shape = bind.packed_tuning if in_integers else bind.wide_tuning
    shape = shape if state.ring is None else bind.ring_tuning
    # All channels that are mixed are of one block.
    shape = shape._replace(part=max(shape.part, state.hadamard * padded(state.codes.shape[3])))
    launch = bind_format(op, place, code, state.granularity, "value_first", shape=shape)
    planes = codes.data, codes.stride, scales.data, scales.stride, *residuals
    packed = DevicePacked(*planes, place.slots, constant(max(state.hadamard, 1).bit_length() - 1))
    return Bound(packed, NO_RING if state.ring is None else bind_ring(op, state.ring, state.codes), launch)
