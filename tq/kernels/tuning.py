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
    """A configuration from the row alone, never from the number of rows: a token's bits must not depend on its batch."""
    per_thread = 16 // itemsize  # one 16-byte load
    block_n, tiles = split_row(hidden_size, group)
    if not whole_row:
        wide = 4 * 32 * per_thread
        if tiles * block_n > wide:
            block_n = max(min(block_n, wide), group)
            return RowConfig(1, block_n, 1, 4)
    padded = block_n * tiles
    block_m = max(1, 1024 // triton.next_power_of_2(padded))
    threads = block_m * triton.next_power_of_2(padded) // (2 * per_thread)
    return RowConfig(block_m, block_n, tiles, min(max(threads // 32, 1), 16))


def split_row(hidden_size: int, group: int) -> tuple[int, int]:
    """(block_n, tiles) that cover a row with the fewest idle lanes, then the fewest tiles; at most 8 tiles."""
    widest = max(triton.next_power_of_2(hidden_size), group)
    candidates = []
    block_n = widest
    while block_n >= max(group, 32) and -(-hidden_size // block_n) <= 8:
        tiles = -(-hidden_size // block_n)
        candidates.append((tiles * block_n, tiles, block_n))
        block_n //= 2
    _, tiles, block_n = min(candidates)
    return block_n, tiles
