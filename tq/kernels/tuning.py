"""How a call over [M, N] is cut into programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import triton

# Elements a program holds when interpreted: one numpy operation per tile, so the fewer programs the better.
INTERPRETED_ELEMENTS = 1 << 16
# Elements of a call up to which its programs do not fill an H200 twice.
FEW_ELEMENTS = 1 << 18
# Whether calls that no table knows are timed when they first come: see `tq.bench.search`.
AUTOTUNE = os.environ.get("TQ_AUTOTUNE", "0") == "1"


class RowConfig(NamedTuple):
    """Rows per program, columns per tile, tiles per program, warps per program, of 32 lanes, and the most registers
    that a thread gets, 0 where the compiler decides."""

    block_m: int
    block_n: int
    tiles: int
    num_warps: int
    max_registers: int = 0


class Space(NamedTuple):
    """What `tq tune` may choose from. tiles: where programs may share a row; where one sees it entirely, they are as
    many as cover it. max_registers: beside none; where rows are seen entirely, the others need few."""

    block_m: tuple[int, ...]
    block_n: tuple[int, ...]
    tiles: tuple[int, ...]
    num_warps: tuple[int, ...]
    max_registers: tuple[int, ...]


# By template. The check has none: it is cut as what it checks.
SPACES = {
    "quantize_rows": Space(
        block_m=(1, 2, 4, 8),
        block_n=(128, 256, 512, 1024, 2048, 4096, 8192),
        tiles=(1, 2, 4),
        num_warps=(1, 2, 4, 8, 16),
        max_registers=(48, 64),
    )
}


class Key(NamedTuple):
    """What a configuration is tuned for.

    moments: means that a producer needs. mean_group: elements they are over, 0: the row. row_bytes: bytes of an element
    that are read and written beside its code: 2 for an activation in bf16, 6 with a residual in and out. scale: what
    shares one: "tensor", "token", "group128". hidden_size: columns of the codes. tokens: "few" where the call has
    at most FEW_ELEMENTS, else "many"; "any" where sums are made: a sum depends on the order of its terms, and a token's
    bits must not depend on its batch.
    """

    template: str
    moments: int
    mean_group: int
    row_bytes: int
    scale: str
    hidden_size: int
    tokens: str

    @property
    def least(self) -> int:
        """The narrowest tile: a group is never cut."""
        group = self.scale.removeprefix("group")
        return max(self.mean_group, int(group) if group.isdigit() else 0)

    @property
    def whole_row(self) -> bool:
        """Whether a program must see its rows entirely."""
        return self.moments > 0 or self.scale == "token"


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


def interpreted(rows: int, hidden_size: int, group: int) -> RowConfig:
    """The configuration of an interpreted call: whole rows, many of them."""
    block_n = max(triton.next_power_of_2(hidden_size), group)
    block_m = min(triton.next_power_of_2(max(rows, 1)), max(INTERPRETED_ELEMENTS // block_n, 1))
    return RowConfig(block_m, block_n, 1, 4)


@lru_cache
def heuristic(hidden_size: int, group: int, whole_row: bool, few: bool, pairs: bool = False) -> RowConfig:
    """A configuration from the row, from whether there are `few` of them, and whether two elements are read for each
    written, in `pairs`.

    Neither is ever set where sums are made (see `Key`), and few only with pairs. A thread takes 8 consecutive elements
    of a tile, a 16-byte load of 16-bit inputs, so that loads and stores agree on one register layout; 4 of pairs, where
    few rows leave most of the GPU idle or a program sees a whole row. Found on an H200; see perf/notes.md."""
    if not whole_row:
        # Nothing is reduced over the row: 1024 elements a program, of one row or of several short ones.
        elements = 512 if few else 1024
        block_n = max(widest_fit(hidden_size, elements), group)
        return RowConfig(max(elements // block_n, 1), block_n, 1, max(block_n // 256, 4))
    num_warps = 1
    while num_warps < 16 and -(-hidden_size // (256 * num_warps)) > {1: 5, 2: 5, 4: 7, 8: 6}[num_warps]:
        num_warps *= 2
    block_n = 256 * num_warps
    if num_warps == 1:
        block_n = widest_fit(hidden_size, block_n)
    elif -hidden_size % (block_n // 2) < -hidden_size % block_n and -hidden_size % block_n * 8 > hidden_size:
        block_n //= 2  # fewer than an eighth of the lanes idle, at 4 elements a thread
    block_n = max(block_n, group)
    tiles = -(-hidden_size // block_n)
    if num_warps == 1:
        return RowConfig(2, block_n, tiles, 2)
    if few or (pairs and num_warps >= 4):
        num_warps = min(2 * num_warps, 16)
        if block_n < 256 * num_warps and hidden_size % (2 * block_n) == 0:
            block_n, tiles = 2 * block_n, tiles // 2
    return RowConfig(1, block_n, tiles, num_warps)


def widest_fit(hidden_size: int, most: int) -> int:
    """The largest power of two up to `most` that covers a row with at most an eighth of the lanes idle, or 32."""
    block_n = most
    while block_n > 32 and (-hidden_size % block_n) * 8 > hidden_size:
        block_n //= 2
    return block_n
