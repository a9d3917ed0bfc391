"""Searching the space of a template for the configurations that are fastest on this machine's GPU.

What is timed is pruned by a model of one SM, the same from sm_80 to sm_100: 65536 registers, 2048 threads, 32 programs.
A thread needs 16 registers and 2.25 for each element that it holds (perf/notes.md), and may be held to fewer. Left out
is what gives a thread less than 4 or more than 16 elements of a tile, or less than 8, a load of 16 bytes, where tokens
are many and a row may be cut; much of several rows in a program that does not see them entirely; programs too large
for few tokens to give every SM one; what has more idle lanes than an eighth, more registers than there are, or, for
many tokens, less than 24 KiB of rows under way on an SM, unless all others are about as bad.

What is fastest must also write what the heuristic's choice writes: ptxas has been wrong in one configuration alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import TritonError

from tq.bench.cases import Case, bytes_of
from tq.bench.timing import copies_of, device_time_us
from tq.kernels import tables, tuning
from tq.kernels.cut import key_of, untuned
from tq.kernels.launch import run
from tq.kernels.plan import Prepared, fill
from tq.kernels.tuning import FEW_ELEMENTS, Key, RowConfig

REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32  # of an SM
SMS = 128  # about as many
SEVERAL_ROWS = 1024  # elements of several rows in a program that does not see them entirely
MOST_IDLE = 1 / 8
UNDER_WAY = 24 << 10  # bandwidth times latency of an H200, for each of its SMs, is about that
NEAR = 1.1  # of the best: about as bad
MOST_HELD = 2.0  # registers needed for each that a limit leaves: beyond, a thread waits for what it has spilled
# The heuristic stays unless something gains more than this, and nothing may lose more at any number of tokens: what
# does at one is not timed at the others.
MARGIN = 0.01
REPLAYS, CALLS = 5, 8  # of one time; many configurations, and those near the best differ by little
TOKENS = (8192, 1024, 128, 16, 1)


class Model(NamedTuple):
    """What a configuration asks of an SM. lane: elements of a thread in one tile. idle: share of the lanes past the
    row. registers: those needed, of those that a program may have. under_way: bytes of the rows on an SM."""

    lane: float
    idle: float
    registers: float
    under_way: float


class Found(NamedTuple):
    """The best configuration for a key. times: microseconds by tokens, of it and of the heuristic."""

    key: Key
    config: RowConfig
    times: dict[int, float]
    before: dict[int, float]
    tried: int

    @property
    def gain(self) -> float:
        """Times faster than the heuristic, geometric mean."""
        return 1.0 / relative(self.times, self.before)


def needed(config: RowConfig) -> float:
    """Registers of a thread, where nothing limits them."""
    return 16 + 2.25 * config.block_m * config.block_n * config.tiles / (32 * config.num_warps)


def model(config: RowConfig, key: Key) -> Model:
    """The model at the top."""
    threads, width = 32 * config.num_warps, config.block_n * config.tiles
    lane = config.block_m * config.block_n / threads
    registers_each = min(needed(config), config.max_registers or math.inf)
    idle = 1.0 - key.hidden_size / (-(-key.hidden_size // width) * width)
    programs = max(min(int(REGISTERS / (registers_each * threads)), THREADS // threads, PROGRAMS), 1)
    registers = max(registers_each * threads / REGISTERS, registers_each / 255)
    return Model(lane, idle, registers, programs * config.block_m * width * (1.0 - idle) * key.row_bytes)


def shapes(key: Key) -> Iterator[RowConfig]:
    """The space of the key's template, as far as it covers what must be covered."""
    space = tuning.SPACES[key.template]
    for block_n in sorted({max(columns, key.least) for columns in space.block_n}):
        for tiles in (-(-key.hidden_size // block_n),) if key.whole_row else space.tiles:
            width = block_n * tiles
            for block_m in space.block_m:
                elements, cut = block_m * width, not key.whole_row
                if cut and key.tokens == "few" and elements > max(FEW_ELEMENTS // SMS, key.least):
                    continue
                if block_m > 1 and width < key.hidden_size and elements > SEVERAL_ROWS:
                    continue
                for num_warps in space.num_warps:
                    free = RowConfig(block_m, block_n, tiles, num_warps)
                    limits = (n for n in space.max_registers if n < needed(free) <= MOST_HELD * n and not cut)
                    yield from (free._replace(max_registers=n) for n in (0, *limits))


def candidates(key: Key) -> list[RowConfig]:
    """What the model leaves of the space; of those that differ in the shape of a tile alone, the widest."""
    models = {config: model(config, key) for config in shapes(key)}
    least = 8 if key.tokens == "many" and not key.whole_row else 4
    models = {config: found for config, found in models.items() if least <= found.lane <= 16}
    if not models:
        return []
    idle = max(MOST_IDLE, min(found.idle for found in models.values()))
    registers = max(1.0, NEAR * min(found.registers for found in models.values()))
    models = {config: m for config, m in models.items() if m.idle <= idle and m.registers <= registers}
    most = max((found.under_way for found in models.values()), default=0.0)
    under_way = 0.0 if key.tokens == "few" else min(UNDER_WAY, most / NEAR)
    widest: dict[tuple[int, ...], RowConfig] = {}
    for config in (config for config, found in models.items() if found.under_way >= under_way):
        alike = config.block_m * config.block_n, config.tiles, config.num_warps, config.max_registers
        widest[alike] = max(config, widest.get(alike, config), key=lambda each: each.block_n)
    return list(widest.values())


def tried(key: Key, before: RowConfig) -> list[RowConfig]:
    """What is timed: what is used without a table, and the candidates."""
    return list(dict.fromkeys([before, *candidates(key)]))


def tokens_of(key: Key, tokens: Sequence[int] = TOKENS) -> list[int]:
    """The numbers of tokens that a key is for."""
    few = {rows: rows * key.hidden_size <= FEW_ELEMENTS for rows in tokens}
    return [rows for rows in tokens if key.tokens == "any" or few[rows] == (key.tokens == "few")]


def copy_of(prepared: Prepared, known: dict[tuple, torch.Tensor] | None = None) -> Prepared:
    """The same call on memory of its own, so that what it writes in place is left alone; a tensor that is given twice
    stays one."""
    known = {} if known is None else known

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place = value.data_ptr(), value.shape, value.stride()
        if place not in known:
            known[place] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            known[place].copy_(value)
        return known[place]

    inputs = {name: value for name, value in prepared.inputs._asdict().items() if isinstance(value, torch.Tensor)}
    options = {**prepared.options, **inputs, **prepared.experts._asdict()}
    options = {name: copy(value) for name, value in options.items()}
    return fill(prepared.plan, tuple(map(copy, prepared.arguments)), options)


def time_of(config: RowConfig, calls: Sequence[Prepared]) -> float:
    """Microseconds of a call cut in this way; infinite where Triton cannot make it."""
    plan = replace(calls[0].plan, launch=None, again=None)
    with tuning.force(config):
        try:
            return device_time_us([partial(run, call._replace(plan=plan)) for call in calls], REPLAYS, CALLS)[0]
        except TritonError:
            return math.inf


def written(config: RowConfig, call: Prepared) -> list[torch.Tensor]:
    """Codes, what a producer writes beside them, and scales of a call cut in this way, on memory of its own."""
    call = copy_of(call)
    with tuning.force(config):
        run(call._replace(plan=replace(call.plan, launch=None, again=None)))
    outputs = call.codes, *call.bound.side_outputs, call.scales, call.zero_points
    return [output for output in outputs if output is not None]


def differing(config: RowConfig, before: RowConfig, call: Prepared) -> int:
    """Elements that a call writes otherwise if it is cut in this way. Where sums are made it may be another sum: there
    scales do not count, and of codes those beyond 2 and one in 10^5."""
    pairs = list(zip(written(config, call), written(before, call), strict=True))
    counts = [int((a != b).sum()) for a, b in pairs]
    if call.plan.producer.moments:
        counts = counts[: 1 + len(call.bound.side_outputs)]
        counts[0] = max(counts[0] - 2 - call.codes.numel() // 10**5, 0)
    return sum(counts)


def relative(times: dict[int, float], before: dict[int, float]) -> float:
    """Geometric mean of times / before."""
    return math.exp(sum(math.log(times[rows] / before[rows]) for rows in before) / len(before))


def search(key: Key, calls_of: Callable[[int], Sequence[Prepared]], tokens: Sequence[int], before: RowConfig) -> Found:
    """The fastest configuration over these numbers of tokens, of those that write the same. calls_of(tokens): calls on
    memories of their own. before: what is used without a table."""
    configs = all_of = tried(key, before)
    times: dict[RowConfig, dict[int, float]] = {config: {} for config in configs}
    one_of: dict[int, Prepared] = {}
    for rows in tokens:
        calls = calls_of(rows)
        one_of[rows] = calls[0]
        for config in configs:
            times[config][rows] = time_of(config, calls)
        limit = (1 + MARGIN) * times[before][rows]
        configs = [config for config in configs if config == before or times[config][rows] <= limit]
    stock = times[before]
    gains = {config: relative(times[config], stock) for config in configs}
    faster = sorted((config for config in configs if gains[config] < 1 - MARGIN), key=gains.__getitem__)
    same = (config for config in faster if not any(differing(config, before, one) for one in one_of.values()))
    best = next(same, before)
    return Found(key, best, times[best], stock, len(all_of))


def describe(case: Case) -> tuple[Key, RowConfig]:
    """The key of a case, and what it uses without a table, found without memory."""
    prepared = case.prepare(torch.bfloat16, "meta")
    key = key_of(prepared)
    return key, untuned(prepared.plan, key.whole_row)


def search_case(case: Case, tokens: Sequence[int], device: Any) -> Found:
    """`search` with fresh random arguments of this case, whose own tokens say whether they are few."""
    key, before = describe(case)

    def calls_of(rows: int) -> list[Prepared]:
        first = case._replace(rows=rows).prepare(torch.bfloat16, device)
        return [first, *(copy_of(first) for _ in range(copies_of(bytes_of(first)) - 1))]

    return search(key, calls_of, tokens_of(key, tokens), before)


# By GPU and key, for the life of the process: where sums are made, another choice would be other bits.
_decided: dict[tuple[str | None, Key], RowConfig | None] = {}


def at_first_sight(prepared: Prepared, key: Key) -> RowConfig | None:
    """The fastest configuration for a call that no table knows, timed when its key is first seen (TQ_AUTOTUNE=1), on
    copies and with its own number of tokens. None leaves it to the heuristic, and so to it stays: what is first seen
    while a CUDA graph is captured, and what there is no memory to copy. Processes that share a model may choose
    differently; to serve, make a table."""
    place = tables.gpu_of(prepared.plan.device), key
    if place not in _decided:
        _decided[place] = None
        if not torch.cuda.is_current_stream_capturing():
            copies = copies_of(bytes_of(prepared))
            before = untuned(prepared.plan, key.whole_row)
            with suppress(torch.OutOfMemoryError):
                found = search(
                    key, lambda rows: [copy_of(prepared) for _ in range(copies)], [prepared.plan.rows], before
                )
                _decided[place] = found.config
    return _decided[place]
