"""Scale layouts: where the scale of token m and group g lives in memory, for the kernel and for torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class DeviceLayout(NamedTuple):
    """A layout as a kernel takes it. BYTES: offsets count bytes of the scale tensor, not its elements. GROUPS: scales
    of a row that are written, those past the row's own with zeros."""

    offset: Any
    BYTES: tl.constexpr
    GROUPS: tl.constexpr


@dataclass(frozen=True, eq=False)
class Layout:
    """allocate(M, G, dtype, device) -> the scale tensor as its reader sees it. padded_rows(M), padded_groups(G): how
    many the kernel writes, those past M and G with zeros.

    offset(row, group, row_stride, group_stride): jit function, place of a stored scale, from the tensor's strides.
    tile_rows: rows that cannot be told apart in memory, so that the scales of an expert begin at a multiple of it.
    unpack(scales, M, G) -> stored scales [M, G]; pack(stored scales, scales) fills the tensor, padding included.
    """

    name: str
    allocate: Callable[[int, int, torch.dtype, Any], torch.Tensor]
    offset: Any
    unpack: Callable[[torch.Tensor, int, int], torch.Tensor]
    pack: Callable[[torch.Tensor, torch.Tensor], None]
    padded_rows: Callable[[int], int] = lambda rows: rows
    padded_groups: Callable[[int], int] = lambda groups: groups
    in_bytes: bool = False
    tile_rows: int = 1

    def allocate_for_experts(
        self, experts: int, rows: int, groups: int, dtype: torch.dtype, device: Any
    ) -> torch.Tensor:
        """One scale tensor after the other, [experts, ...]."""
        one = self.allocate(rows, groups, dtype, "meta")
        size = one.untyped_storage().size() // one.element_size()
        everything = torch.empty(experts * size, dtype=one.dtype, device=device)
        return everything.as_strided((experts, *one.shape), (size, *one.stride()))

    @lru_cache  # noqa: B019 - layouts live as long as the process
    def device(self, groups: int) -> DeviceLayout:
        """What a kernel takes for rows of this many groups."""
        return DeviceLayout(self.offset, tl.constexpr(self.in_bytes), tl.constexpr(self.padded_groups(groups)))


def align(count: int, unit: int) -> int:
    """`count` rounded up to a multiple of `unit`."""
    return (count + unit - 1) // unit * unit


def align4(count: int) -> int:
    """`count` rounded up to 4: a TMA descriptor needs strides of 16 bytes, and a word has 4 bytes."""
    return align(count, 4)


@triton.jit
def strided_offset(row, group, row_stride, group_stride):
    """Element of a tensor [M, G]."""
    return row * row_stride + group.to(tl.int64) * group_stride


@triton.jit
def packed_offset(row, group, row_stride, group_stride):
    """Byte of an int32 tensor [M, G / 4]: group g is byte g % 4 of word g / 4, the lowest first."""
    return (row * row_stride + (group // 4).to(tl.int64) * group_stride) * 4 + group % 4


@triton.jit
def swizzled_128x4_offset(row, group, row_stride, group_stride):
    """Element of tiles of 128 rows and 4 groups, each as [32][4][4]: row % 32, row / 32, group % 4. The tensor is
    padded to whole tiles, so its row stride is 4 times the number of tiles in a row."""
    tile = (row // 128) * (row_stride // 4) + (group // 4)
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + group % 4


@triton.jit
def swizzled_8x4_offset(row, group, row_stride, group_stride):
    """Element of tiles of 8 rows and 4 groups, each row-major."""
    tile = (row // 8) * (row_stride // 4) + (group // 4)
    return tile * 32 + (row % 8) * 4 + group % 4


def _row_major(rows: int, groups: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.empty((rows, groups), dtype=dtype, device=device)


def _column_major(rows: int, groups: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.empty((groups, rows), dtype=dtype, device=device).t()


def _tma_aligned(rows: int, groups: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.empty((groups, align4(rows)), dtype=dtype, device=device)[:, :rows].t()


def _packed(rows: int, groups: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
    words = align4(groups) // 4
    return torch.empty((words, align4(rows)), dtype=torch.int32, device=device)[:, :rows].t()


def _as_is(scales: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    return scales


def _copy(stored: torch.Tensor, scales: torch.Tensor) -> None:
    scales.copy_(stored)


def _whole(scales: torch.Tensor) -> torch.Tensor:
    """A TMA-aligned tensor with its padding rows."""
    return scales.as_strided((align4(scales.shape[0]), scales.shape[1]), scales.stride())


def _copy_aligned(stored: torch.Tensor, scales: torch.Tensor) -> None:
    _whole(scales).zero_()
    scales.copy_(stored)


def _unpack(scales: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
    return (scales.unsqueeze(-1) >> shifts).bitwise_and(0xFF).to(torch.uint8).flatten(-2)[:, :groups]


def _pack(stored: torch.Tensor, scales: torch.Tensor) -> None:
    _whole(scales).zero_()
    padded = torch.zeros(stored.shape[0], 4 * scales.shape[1], dtype=torch.uint8, device=stored.device)
    padded[:, : stored.shape[1]] = stored
    scales.copy_(padded.view(torch.int32))


def _swizzled(tile_rows: int) -> dict[str, Any]:
    """The host functions of a layout of tiles of `tile_rows` rows and 4 groups."""
    parts = (tile_rows // 32, 32) if tile_rows == 128 else (1, tile_rows)

    def allocate(rows: int, groups: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.empty((align(rows, tile_rows), align(groups, 4)), dtype=dtype, device=device)

    def tiles(scales: torch.Tensor) -> torch.Tensor:
        """A view by [row tile, row part, row in part, group tile, group in tile]."""
        across = scales.shape[1] // 4
        return scales.view(-1, across, parts[1], parts[0], 4).permute(0, 3, 2, 1, 4)

    def unpack(scales: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
        return tiles(scales).reshape(scales.shape)[:rows, :groups]

    def pack(stored: torch.Tensor, scales: torch.Tensor) -> None:
        padded = torch.zeros(scales.shape, dtype=scales.dtype, device=scales.device)
        padded[: stored.shape[0], : stored.shape[1]] = stored
        view = tiles(scales)
        view.copy_(padded.view(view.shape))

    return {
        "allocate": allocate,
        "unpack": unpack,
        "pack": pack,
        "padded_rows": lambda rows: align(rows, tile_rows),
        "padded_groups": align4,
        "tile_rows": tile_rows,
    }


# fp32 or bytes [M, G]: stride (G, 1).
ROW_MAJOR = Layout("row_major", _row_major, strided_offset, _as_is, _copy)
# fp32 [M, G]: stride (1, M). CUTLASS block-scaled GEMM.
COLUMN_MAJOR = Layout("column_major", _column_major, strided_offset, _as_is, _copy)
# fp32 [M, G]: stride (1, A), A = M rounded up to 4. DeepGEMM on Hopper.
TMA_ALIGNED = Layout("tma_aligned", _tma_aligned, strided_offset, _as_is, _copy_aligned, padded_rows=align4)
# int32 [M, ceil(G / 4)]: stride (1, A); four UE8M0 bytes a word, missing groups 0. DeepGEMM on Blackwell.
PACKED = Layout(
    "packed", _packed, packed_offset, _unpack, _pack, padded_rows=align4, padded_groups=align4, in_bytes=True
)
# bytes [M rounded up to 128 or 8, G rounded up to 4], in the order of the tensor core's scale tiles; padding 0. cuBLAS,
# CUTLASS and FlashInfer read the first, TensorRT-LLM's kernels for few tokens the second.
SWIZZLED_128X4 = Layout("swizzled_128x4", offset=swizzled_128x4_offset, **_swizzled(128))
SWIZZLED_8X4 = Layout("swizzled_8x4", offset=swizzled_8x4_offset, **_swizzled(8))
