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
from tq.bench.peers import PEERS
from tq.kernels import tuning

MOST_PROCESSES = 32  # each holds a context on the GPU
# Peers whose kernels are compiled on this machine: for few and for many tokens, or for each number of tokens.
OF_FEW_AND_MANY, OF_EACH = ("tq", "inductor_dynamic"), ("inductor", "helion")


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
    """A case by names, for another process. config: None is what the call takes by itself. peer: who runs it."""

    producer: str
    left_out: tuple[str, ...]
    scheme: str
    rows: int
    hidden_size: int
    config: tuning.RowConfig | None = None
    peer: str = "tq"


def describe(case: Case, config: tuning.RowConfig | None = None, peer: str = "tq") -> Description:
    """The case, cut by itself or as `config` says."""
    return Description(case.producer.name, *case[1:], config, peer)


def case_of(described: Description) -> Case:
    """What was described."""
    return Case(tq.PRODUCERS[described.producer], *described[1:5])


def compile_one(described: Description) -> Description:
    """Runs the call once. A configuration that Triton cannot make is found out when it is timed."""
    case = case_of(described)
    producer, scheme, config, peer = case.producer, case.scheme, described.config, described.peer
    if peer != "tq":
        torch._inductor.config.compile_threads = 1  # as many processes as there are cores run this already
        with suppress(Exception):  # what a peer cannot do is found out when it is timed
            made = PEERS[peer](case.prepare(torch.bfloat16, "cuda"))
            if made is not None:
                made.call()
        torch.cuda.empty_cache()
        return described
    arguments, options = case.arguments(torch.bfloat16, "cuda")
    with nullcontext() if config is None else tuning.force(config), suppress(*([TritonError] if config else [])):
        producer(*arguments, scheme=scheme, **options)
    return described


def compile_all(todo: Iterable[Description]) -> Iterator[Description]:
    """Compiles these calls on this machine's GPU; each is returned when it is compiled. First what takes long: those of
    others, and sums."""

    def order(each: Description) -> tuple[bool, ...]:
        return each.peer == "tq", not tq.PRODUCERS[each.producer].moments

    ordered = sorted(todo, key=order)
    yield from in_processes(compile_one, ordered)


def needed(cases: Sequence[Case], peers: Sequence[str]) -> list[Description]:
    """What must be compiled. A kernel may depend on the number of tokens only by there being few or many (or one, or
    more): then the first and the last of each are enough."""
    ends: dict[tuple, list[Description]] = {}
    for peer in [peer for peer in peers if peer in OF_FEW_AND_MANY]:
        for case in cases:
            described = describe(case, peer=peer)
            kept = ends.setdefault((peer, *described[:3], case.hidden_size), [])
            kept[1 if kept else 0 :] = [described]
    each = [describe(case, peer=peer) for peer in peers if peer in OF_EACH for case in cases]
    return [*each, *(described for kept in ends.values() for described in dict.fromkeys(kept))]


def compile_ahead(cases: Sequence[Case], console: Console, peers: Sequence[str] = ("tq",)) -> None:
    """Compiles what `cases` need on this machine's GPU, for each of the peers."""
    todo = needed(cases, peers)
    for _ in track(compile_all(todo), "compiling", len(todo), console=console, disable=not console.is_terminal):
        pass
