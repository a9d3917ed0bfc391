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


def choose(rows: int, hidden_size: int, group: int, whole_row: bool, itemsize: int) -> RowConfig:
    """The configuration of a call. `whole_row`: a program must see its rows entirely."""
    if _forced is not None:
        return _forced
    if INTERPRETED.value:
        block_n = max(triton.next_power_of_2(hidden_size), group)
        block_m = min(triton.next_power_of_2(max(rows, 1)), max(INTERPRETED_ELEMENTS // block_n, 1))
        return RowConfig(block_m, block_n, 1, 4)
    return heuristic(hidden_size, group, whole_row, itemsize)


@lru_cache
def heuristic(hidden_size: int, group: int, whole_row: bool, itemsize: int) -> RowConfig:
    """A configuration from the row alone, never from the number of rows: a token's bits must not depend on its batch.

    A thread takes 8 consecutive elements of a tile, a 16-byte load of 16-bit inputs, so that loads and stores agree on
    one register layout. Found on an H200; see perf/notes.md.
    """
    if not whole_row:
        # Programs share a row: as many columns as keep every lane busy, in one tile.
        block_n = max(fit_power_of_two(hidden_size, 256, 1024), group)
        return RowConfig(1, block_n, 1, max(block_n // 256, 1))
    num_warps = 1
    while num_warps < 16 and -(-hidden_size // (256 * num_warps)) > (5 if num_warps < 8 else 8):
        num_warps *= 2
    widest = triton.next_power_of_2(hidden_size)
    if group and widest == hidden_size and hidden_size >= 4096:
        # Scales of a tile change their register layout when stored: one tile, one change.
        return RowConfig(1, widest, 1, num_warps)
    block_n = max(256 * num_warps, group)
    if num_warps == 1:
        block_n = max(fit_power_of_two(hidden_size, 128, 256), group)
    return RowConfig(1, block_n, -(-hidden_size // block_n), num_warps)


def fit_power_of_two(hidden_size: int, least: int, most: int) -> int:
    """The power of two in [least, most] whose multiple covers a row with the fewest idle lanes; the largest such."""
    sizes = []
    while most >= least:
        sizes.append((-(-hidden_size // most) * most, -most))
        most //= 2
    return -min(sizes)[1]
