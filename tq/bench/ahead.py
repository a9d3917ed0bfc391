"""Kernels compiled by many processes at once, into Triton's cache: compiling is most of a first run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from triton.runtime.errors import TritonError

import tq
from tq.bench.cases import Case
from tq.kernels import tuning

MOST_PROCESSES = 32  # each holds a context on the GPU


def processes() -> int:
    """How many to start."""
    return min(os.cpu_count() or 1, MOST_PROCESSES)


def in_processes(
    run: Callable[[Any], Any], todo: Iterable[Any], limit_s: float | None = None, count: int = 0
) -> Iterator[Any]:
    """run(each) of all of `todo`, by `count` (0: `processes()`) processes that import everything anew; results as they
    come. Raises what a run raised, and TimeoutError after `limit_s`; then and when no more is wanted, what runs is
    ended."""
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(count or processes(), mp_context=multiprocessing.get_context("spawn"))
    started: list[Any] = []
    try:
        waiting = [pool.submit(run, each) for each in todo]
        started = [child for child in multiprocessing.active_children() if child not in others]
        for future in as_completed(waiting, timeout=limit_s):
            yield future.result()
        started = []
    finally:
        for process in started:
            process.terminate()
        pool.shutdown(cancel_futures=True)


class Description(NamedTuple):
    """A case by names, for another process. check: whether `tq.check` runs too. config: None is what the call takes by
    itself."""

    producer: str
    left_out: tuple[str, ...]
    scheme: str
    rows: int
    hidden_size: int
    check: bool = False
    config: tuning.RowConfig | None = None


def describe(case: Case, check: bool = False, config: tuning.RowConfig | None = None) -> Description:
    """The case, cut by itself or as `config` says."""
    return Description(case.producer.name, *case[1:], check, config)


def compile_one(described: Description) -> Description:
    """Runs the call once, and its check. A configuration that Triton cannot make is found out when it is timed."""
    name, left_out, scheme, rows, hidden_size, check, config = described
    producer = tq.PRODUCERS[name]
    arguments, options = Case(producer, left_out, scheme, rows, hidden_size).arguments(torch.bfloat16, "cuda")
    with nullcontext() if config is None else tuning.force(config), suppress(*([TritonError] if config else [])):
        producer(*arguments, scheme=scheme, **options)
        if check:
            tq.check(producer, *arguments, scheme=scheme, **options)
    return described


def compile_all(todo: Iterable[Description]) -> Iterator[Description]:
    """Compiles these calls on this machine's GPU; each is returned when it is compiled. First what takes long: checks,
    and sums."""
    ordered = sorted(todo, key=lambda each: (not each.check, not tq.PRODUCERS[each.producer].moments))
    yield from in_processes(compile_one, ordered)


def compile_ahead(cases: Sequence[Case], console: Console) -> None:
    """Compiles what `cases` need on this machine's GPU. A kernel depends on the number of tokens only by there being
    few or many, so the first and the last of each are enough."""
    ends: dict[tuple, list[Description]] = {}
    for case in cases:
        described = describe(case)
        kept = ends.setdefault((*described[:3], case.hidden_size), [])
        kept[1 if kept else 0 :] = [described]
    todo = [described for kept in ends.values() for described in dict.fromkeys(kept)]
    for _ in track(compile_all(todo), "compiling", len(todo), console=console, disable=not console.is_terminal):
        pass
