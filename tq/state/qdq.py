"""The template that moves states: from a place, rounded on the way, to a place. In place, gather and scatter are it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tq.kernels.device import round_to
from tq.state.bind import bind_format, bind_slots, bind_states, check_shape, run
from tq.state.cache import Place, as_block, as_groups, begin, elements_of, find_head, is_first
from tq.state.formats import fit, round_groups


@triton.jit
def qdq(tile, format, cut):
    """A tile of whole groups, encoded and decoded; as it is for AS_IT_IS."""
    if format.restore is not None:
        groups = as_groups(tile, cut)
        scale, back = fit(groups, format)
        tile = as_block(round_groups(groups, scale, back, format), cut)
    return tile


@triton.jit
def moved(tile, dtype: tl.constexpr, target_dtype: tl.constexpr, format, cut):
    """qdq(tile) as the target holds it, rounded before and after to the dtype of the cache; its bits where nothing is
    to be done."""
    if format.restore is None and tile.dtype == target_dtype:
        made = tile
    else:
        made = round_to(tile.to(tl.float32), dtype)
        made = round_to(qdq(made, format, cut), dtype).to(target_dtype)
    return made


@triton.jit
def move_kernel(source, target, format, cut):
    """target = qdq(source), zeros where the source has none."""
    request, head, part = begin(cut)
    read, present = find_head(source, request, head, cut)
    write, wanted = find_head(target, request, head, cut)
    source_dtype: tl.constexpr = source.data.dtype.element_ty
    target_dtype: tl.constexpr = target.data.dtype.element_ty
    # What lies beside a cache has its dtype or fp32, so of the two the other one than fp32 is the cache's.
    if source_dtype == tl.float32:
        dtype: tl.constexpr = target_dtype
    else:
        dtype: tl.constexpr = source_dtype
    if wanted:
        at, readable = elements_of(part, present, cut)
        tile = tl.load(read + at, mask=readable, other=0)
        # Asked for after the state, whose way is longer.
        if is_first(target, request):
            at, writable = elements_of(part, wanted, cut)
            tl.store(write + at, moved(tile, dtype, target_dtype, format, cut), mask=writable)


def qdq_(
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    code: str = "int8",
    granularity: str = "head",
    layout: str = "value_first",
    null_slot: int | None = 0,
    has_initial_state: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """state[slots] = decode(encode(state[slots] * s)) / s with s = MAX / amax for every group; returns `state`.

    Shapes: state [S, heads, values, keys] ("value_first": vLLM) or [S, heads, keys, values] ("key_first") in fp32, bf16
    or fp16, heads dense, slots at any distance; slots [B] int32 or int64.
    Slots: negative ones, `null_slot` and those past the cache are skipped. has_initial_state [B] bool: requests without
    one are skipped, whatever their slot holds. num_accepted_tokens [B] int32 or int64: slots are then [B, T] and
    request i means slots[i, num_accepted_tokens[i] - 1]; a number out of [1, T] is skipped. A slot of several requests
    is rounded once, by the first of them. No other byte of the cache is read or written.
    Formats: code "int8" (MAX 127), "int8_narrow" (the same without -128, which no value reaches) or "fp8_e4m3" (MAX
    448); granularity "head", "value_channel", "key_channel", "tile" (all keys of 64 value channels), "group16",
    "group32" or "group64" (that many value channels of one key channel).
    Rounding: nearest-even, in fp32, then to the state's dtype. INT8 divides by amax and by s; FP8 multiplies by the
    reciprocals of both, rounded to fp32 first. A group of amax <= 2^-24 becomes zeros, each with its element's sign; a
    group with a NaN or an infinity becomes NaN.
    One launch; no allocation, no synchronization; may be captured in a CUDA graph.
    Source: bit-equal to ModelOpt's TensorQuantizer with dynamic amax, except that a NaN in one group leaves the other
    groups as they are.
    Raises TypeError or ValueError for arguments that do not fit, NotImplementedError for a head of more than 65536
    elements or a device without kernels, before anything is launched.
    """
    op = "state.qdq_"
    cache = bind_slots(op, bind_states(op, "state", state), slots, null_slot, has_initial_state, num_accepted_tokens)
    check_code(op, code)
    launch = bind_format(op, cache, code, granularity, layout)
    run(move_kernel, slots.shape[0], launch, state.device, cache, cache)
    return state


def gather(
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    code: str | None = None,
    granularity: str = "head",
    layout: str = "value_first",
    null_slot: int | None = 0,
    has_initial_state: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[i] = qdq(state[slots[i]]), and zeros for a request that has no slot or no state yet.

    Shapes: out [B, heads, rows, columns] of the state's dtype or fp32, a new tensor for None. code None: no rounding.
    Otherwise as `qdq_`, of which this is the form for prefill: the cache is left as it is, and what a slot without
    state holds, NaN included, is not read. A slot may be gathered by several requests.
    """
    op = "state.gather"
    cache = bind_slots(op, bind_states(op, "state", state), slots, null_slot, has_initial_state, num_accepted_tokens)
    launch = bind_format(op, cache, code, granularity, layout)
    shape = (slots.shape[0], *state.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=state.dtype, device=state.device)
    run(move_kernel, slots.shape[0], launch, state.device, cache, bind_beside(op, "out", out, cache, shape))
    return out


def scatter_(
    state: torch.Tensor,
    slots: torch.Tensor,
    values: torch.Tensor,
    *,
    code: str | None = None,
    granularity: str = "head",
    layout: str = "value_first",
    null_slot: int | None = 0,
    num_accepted_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """state[slots[i]] = qdq(values[i]); returns `state`.

    Shapes: values [B, heads, rows, columns] of the state's dtype or fp32; they are rounded to the state's dtype first.
    code None: no rounding beyond that. Slots, formats, rounding and errors are those of `qdq_`; of several requests
    with one slot the first is written.
    """
    op = "state.scatter_"
    cache = bind_slots(op, bind_states(op, "state", state), slots, null_slot, None, num_accepted_tokens)
    launch = bind_format(op, cache, code, granularity, layout)
    beside = bind_beside(op, "values", values, cache, (slots.shape[0], *state.shape[1:]))
    run(move_kernel, slots.shape[0], launch, state.device, beside, cache)
    return state


def check_code(op: str, code: str | None) -> None:
    """Raises ValueError for None where something must be rounded."""
    if code is None:
        raise ValueError(f"{op}: code must be named, got None; without one there is nothing to do")


def bind_beside(op: str, name: str, tensor: torch.Tensor, cache: Place, shape: tuple[int, ...]) -> Place:
    """States outside of the cache, one a request: of its dtype or fp32."""
    place = bind_states(op, name, tensor, cache.data.device)
    check_shape(op, name, tensor, shape)
    if tensor.dtype not in (torch.float32, cache.data.dtype):
        raise TypeError(f"{op}: {name} must be {cache.data.dtype} as the state is or float32, got {tensor.dtype}")
    return place
