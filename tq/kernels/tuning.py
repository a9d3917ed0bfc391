"""How a call over [M, N] is cut into programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import triton

from tq.kernels.target import INTERPRETED

# Elements a program holds when interpreted: one numpy operation per tile, so the fewer programs the better.
INTERPRETED_ELEMENTS = 1 << 16
# Elements of a call up to which its programs do not fill an H200 twice.
FEW_ELEMENTS = 1 << 18


class RowConfig(NamedTuple):
    """Rows per program, columns per tile, tiles per program, warps per program."""

    block_m: int
    block_n: int
    tiles: int
    num_warps: int


_forced: RowConfig | None = None


@contextmanager
def force(config: RowConfig) -> Iterator[None]:
    """Every call inside uses `config`, for tests and for tuning."""
    global _forced
    before, _forced = _forced, config
    try:
        yield
    finally:
        _forced = before


def forced() -> RowConfig | None:
    """The configuration of `force`, if one is in force."""
    return _forced


def choose(rows: int, hidden_size: int, group: int, whole_row: bool, few: bool) -> RowConfig:
    """The configuration of a call. `whole_row`: a program must see its rows entirely."""
    if _forced is not None:
        return _forced
    if INTERPRETED.value:
        block_n = max(triton.next_power_of_2(hidden_size), group)
        block_m = min(triton.next_power_of_2(max(rows, 1)), max(INTERPRETED_ELEMENTS // block_n, 1))
        return RowConfig(block_m, block_n, 1, 4)
    return heuristic(hidden_size, group, whole_row, few)


@lru_cache
def heuristic(hidden_size: int, group: int, whole_row: bool, few: bool) -> RowConfig:
    """A configuration from the row, and from whether there are `few` of them.

    `few` is never set where sums are made: a sum depends on the order of its terms, and a token's bits must not depend
    on its batch. A thread takes 8 consecutive elements of a tile, a 16-byte load of 16-bit inputs, so that loads and
    stores agree on one register layout; 4 where few rows leave most of the GPU idle and two are read for each written.
    Found on an H200; see perf/notes.md."""
    if not whole_row:
        # Nothing is reduced over the row: 1024 elements a program, of one row or of several short ones.
        elements = 512 if few else 1024
        block_n = max(widest_fit(hidden_size, elements), group)
        return RowConfig(max(elements // block_n, 1), block_n, 1, max(block_n // 256, 4))
    num_warps = 1
    while num_warps < 16 and -(-hidden_size // (256 * num_warps)) > {1: 5, 2: 5, 4: 7, 8: 8}[num_warps]:
        num_warps *= 2
    block_n = max(256 * num_warps if num_warps > 1 else widest_fit(hidden_size, 256), group)
    tiles = -(-hidden_size // block_n)
    if num_warps == 1:
        return RowConfig(2, block_n, tiles, 2)
    return RowConfig(1, block_n, tiles, 2 * num_warps if few and num_warps <= 2 else num_warps)


def widest_fit(hidden_size: int, most: int) -> int:
    """The largest power of two up to `most` that covers a row with at most an eighth of the lanes idle, or 32."""
    block_n = most
    while block_n > 32 and (-hidden_size % block_n) * 8 > hidden_size:
        block_n //= 2
    return block_n
