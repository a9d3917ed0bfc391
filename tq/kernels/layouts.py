"""Scale layouts: where the scale of token m and group g lives in memory. A layout is a name and an allocation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Layout(NamedTuple):
    """name; allocate(M, G, device) -> fp32 [M, G]; padded_rows(M): rows the kernel writes, those past M with zeros."""

    name: str
    allocate: Callable[[int, int, torch.device], torch.Tensor]
    padded_rows: Callable[[int], int]


def _same(rows: int) -> int:
    return rows


def align_tma(rows: int) -> int:
    """`rows` rounded up to 4: a TMA descriptor needs strides of 16 bytes."""
    return (rows + 3) // 4 * 4


def _row_major(rows: int, groups: int, device: torch.device) -> torch.Tensor:
    return torch.empty((rows, groups), dtype=torch.float32, device=device)


def _column_major(rows: int, groups: int, device: torch.device) -> torch.Tensor:
    return torch.empty((groups, rows), dtype=torch.float32, device=device).t()


def _tma_aligned(rows: int, groups: int, device: torch.device) -> torch.Tensor:
    return torch.empty((groups, align_tma(rows)), dtype=torch.float32, device=device)[:, :rows].t()


ROW_MAJOR = Layout("row_major", _row_major, _same)  # stride (G, 1)
COLUMN_MAJOR = Layout("column_major", _column_major, _same)  # stride (1, M): CUTLASS block-scaled GEMM
TMA_ALIGNED = Layout("tma_aligned", _tma_aligned, align_tma)  # stride (1, A), A = M rounded up to 4: DeepGEMM
