"""From arguments to what the state kernels take: checked places, cuts and formats, and the launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton

from tq.kernels.device import Rows
from tq.kernels.launch import check_device
from tq.kernels.producer import INPUT_DTYPES, check_choice, constant
from tq.kernels.target import target_of
from tq.state.cache import IN_ORDER, Cut, Place, Slots
from tq.state.formats import AS_IT_IS, FORMATS, GRANULARITIES, DeviceFormat, Granularity

LAYOUTS = ("value_first", "key_first")
MAX_HEAD = 1 << 16  # elements of a head that one program can hold


class Tuning(NamedTuple):
    """How programs are shaped. part: elements of a block where groups do not need more; max_registers: of a thread,
    None for the compiler's choice; programs: blocks of a head are joined while there are at least so many; looped:
    joined blocks stay what they are and come one after the other, `stages` of them at a time."""

    elements_per_thread: int = 64
    part: int = 4096
    max_registers: int | None = 128
    programs: int = 1024
    looped: bool = False
    stages: int = 1


# As measured on one H200 (perf/notes.md). A limit lets a second program run beside the first where groups are heads.
tuning = Tuning()
packed_tuning = Tuning(part=2048, programs=2048, looped=True, stages=3)
wide_tuning = Tuning(elements_per_thread=32, max_registers=None)
ring_tuning = Tuning(elements_per_thread=32)
PIECE = 64  # bytes of a row in four threads, where one warp goes through blocks
LARGEST_BLOCK = 16384  # elements that joined blocks have at most
FOLDED = 8192  # the same where the entries of a ring are folded into them
REGISTERS = 1 << 16  # of a multiprocessor


class Launch(NamedTuple):
    """A format on a device, a cut, the warps of a program, the most registers of a thread, and how it was shaped."""

    format: DeviceFormat
    cut: Cut
    num_warps: int
    max_registers: int | None
    shape: Tuning


def check_tensor(op: str, name: str, tensor: Any, dtypes: tuple, device: torch.device | None = None) -> None:
    """Raises TypeError unless `tensor` is one of these dtypes, ValueError where it is on another device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}: {tensor!r}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be {wanted}, got {tensor.dtype}; cast it first")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} as the state is, got {tensor.device}; move it there")


def check_shape(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `tensor` has this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{op}: {name} must have shape {shape}, got {tuple(tensor.shape)}")


def check_dense(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the elements of `tensor` follow one another."""
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, got strides {tensor.stride()}; pass {name}.contiguous()")


def bind_states(
    op: str, name: str, state: torch.Tensor, device: torch.device | None = None, dtypes: tuple = INPUT_DTYPES
) -> Place:
    """States [S, heads, rows, columns], each dense and apart from the next."""
    check_tensor(op, name, state, dtypes, device)
    if state.dim() != 4 or 0 in state.shape[1:]:
        raise ValueError(f"{op}: {name} must be [slots, heads, rows, columns], got shape {tuple(state.shape)}")
    size = padded(state.shape[2]) * padded(state.shape[3])
    if size > MAX_HEAD:
        raise NotImplementedError(
            f"{op}: a head of {name} must have at most {MAX_HEAD} elements, padded to powers of two, got {size}"
        )
    if state.shape[0] and not state[0].is_contiguous():
        raise ValueError(f"{op}: heads of {name} must be dense, got strides {state.stride()}; only slots may lie apart")
    if state.shape[0] > 1 and state.stride(0) < state[0].numel():
        raise ValueError(f"{op}: slots of {name} must not overlap, got strides {state.stride()}")
    return Place(state, state.stride(0), IN_ORDER)


def bind_slots(
    op: str,
    place: Place,
    slots: torch.Tensor,
    null_slot: int | None,
    has_initial_state: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    name: str = "slots",
) -> Place:
    """`place` in the order of `slots` [B], or [B, T] with num_accepted_tokens [B]."""
    device = place.data.device
    check_tensor(op, name, slots, (torch.int32, torch.int64), device)
    if slots.dim() != 1 + (num_accepted_tokens is not None):
        wanted = "[B]" if num_accepted_tokens is None else "[B, T] with num_accepted_tokens"
        raise ValueError(f"{op}: {name} must be {wanted}, got shape {tuple(slots.shape)}")
    if null_slot is not None and (not isinstance(null_slot, int) or null_slot < 0):
        raise ValueError(
            f"{op}: null_slot must be a slot or None, got {null_slot!r}; negative slots are skipped always"
        )
    batch = (slots.shape[0],)
    if num_accepted_tokens is not None:
        check_tensor(op, "num_accepted_tokens", num_accepted_tokens, (torch.int32, torch.int64), device)
        check_shape(op, "num_accepted_tokens", num_accepted_tokens, batch)
        check_dense(op, "num_accepted_tokens", num_accepted_tokens)
    if has_initial_state is not None:
        check_tensor(op, "has_initial_state", has_initial_state, (torch.bool,), device)
        check_shape(op, "has_initial_state", has_initial_state, batch)
        check_dense(op, "has_initial_state", has_initial_state)
        has_initial_state = has_initial_state.view(torch.uint8)
    columns, column_stride = (1, 0) if slots.dim() == 1 else (slots.shape[1], slots.stride(1))
    null = -1 if null_slot is None else null_slot
    count = place.data.shape[0]
    strides = slots.stride(0), column_stride
    return place._replace(slots=Slots(slots, *strides, columns, num_accepted_tokens, has_initial_state, count, null))


def bind_rows(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...], state: torch.Tensor) -> Rows:
    """[B, heads], heads side by side."""
    check_tensor(op, name, tensor, INPUT_DTYPES, state.device)
    check_shape(op, name, tensor, shape)
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{op}: last stride of {name} must be 1, got {tensor.stride()}; pass {name}.contiguous()")
    return Rows(tensor, tensor.stride(0))


def bind_vector(op: str, name: str, tensor: torch.Tensor, size: int, state: torch.Tensor) -> torch.Tensor:
    """A dense tensor of so many elements."""
    check_tensor(op, name, tensor, INPUT_DTYPES, state.device)
    if tensor.numel() != size:
        raise ValueError(f"{op}: {name} must have {size} elements, got shape {tuple(tensor.shape)}")
    check_dense(op, name, tensor)
    return tensor


def check_out(op: str, out: torch.Tensor, shape: tuple[int, ...], state: torch.Tensor) -> None:
    check_tensor(op, "out", out, INPUT_DTYPES, state.device)
    check_shape(op, "out", out, shape)
    check_dense(op, "out", out)


def padded(size: int) -> int:
    return triton.next_power_of_2(size)


@lru_cache
def cut_of(heads: int, rows: int, cols: int, group: Granularity, layout: str, part: int, overlaps: bool = False) -> Cut:
    """The cut of heads of [rows, cols] whose groups are `group` into programs of `part` elements or one group more."""
    block_cols = padded(cols)
    by_row, by_col = (group.values, group.keys) if layout == "value_first" else (group.keys, group.values)
    group_cols = min(by_col, block_cols) or block_cols
    group_rows = min(by_row, padded(rows)) or padded(rows)
    block_rows = min(padded(rows), max(group_rows, part // block_cols))
    parts = -(-rows // block_rows)
    sizes = heads, rows, cols, block_rows, block_cols, group_rows, group_cols, parts, 1, 1, block_cols
    return Cut(*map(constant, (*sizes, overlaps)))


@lru_cache
def joined(cut: Cut, batch: int, shape: Tuning, most: int = LARGEST_BLOCK) -> Cut:
    """`cut` with so much in a program that `shape.programs` are left, where a batch has them: blocks one after the
    other, or larger ones of at most so many elements. The warps of a program stay, and what is added up is of one row,
    so that bits do not depend on the batch."""
    parts, times, size = cut.PARTS.value, 1, cut.BLOCK_ROWS.value * cut.BLOCK_COLS.value
    heads = batch * cut.HEADS.value
    while parts > 1 and heads * -(-parts // 2) >= shape.programs and (shape.looped or 2 * times * size <= most):
        parts, times = -(-parts // 2), 2 * times
    cut = cut._replace(PARTS=constant(parts))
    if shape.looped:
        piece = min(PIECE, cut.BLOCK_COLS.value)
        return cut._replace(BLOCKS=constant(times), STAGES=constant(shape.stages), PIECE=constant(piece))
    return cut._replace(BLOCK_ROWS=constant(cut.BLOCK_ROWS.value * times))


@lru_cache
def device_format(name: str, device: torch.device) -> DeviceFormat:
    return FORMATS[name].device(target_of(device))


def bind_format(
    op: str,
    place: Place,
    code: str | None,
    granularity: str,
    layout: str,
    whole: bool = False,
    shape: Tuning | None = None,
) -> Launch:
    """Checks the names of a format; None moves states as they are. whole: one program a head. shape: None for
    `tuning`."""
    check_choice(op, "code", code, (*FORMATS, None))
    check_choice(op, "granularity", granularity, tuple(GRANULARITIES))
    check_choice(op, "layout", layout, LAYOUTS)
    check_device(op, place.data.device)
    group = GRANULARITIES[granularity] if code is not None else Granularity(1, 1)
    shape = shape or tuning
    target = target_of(place.data.device)
    cut = cut_of(*place.data.shape[1:], group, layout, MAX_HEAD if whole else shape.part, target.overlaps)
    warps = cut.BLOCK_ROWS.value * cut.BLOCK_COLS.value // (32 * shape.elements_per_thread)
    warps = min(max(warps, 1), 32)
    registers = shape.max_registers
    if registers is not None:
        limited = target.name.startswith("sm_")  # no other target takes a limit
        registers = min(registers, REGISTERS // (32 * warps)) if limited else None
    found = AS_IT_IS if code is None else device_format(code, place.data.device)
    return Launch(found, cut, warps, registers, shape)


def run(kernel: Any, batch: int, launch: Launch, device: torch.device, *arguments: Any, fusion: bool = False) -> None:
    """One launch, of every part of every head of every request."""
    programs = batch * launch.cut.HEADS.value * launch.cut.PARTS.value
    if programs == 0:
        return
    options = {"num_warps": launch.num_warps, "enable_fp_fusion": fusion}
    if launch.max_registers is not None:
        options["maxnreg"] = launch.max_registers
    if launch.cut.OVERLAPS.value:
        options["launch_pdl"] = True
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[(programs,)](*arguments, launch.format, launch.cut, **options)
    else:
        kernel[(programs,)](*arguments, launch.format, launch.cut, **options)
