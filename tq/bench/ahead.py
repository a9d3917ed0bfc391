"""Kernels compiled by many processes at once, into Triton's cache: compiling is most of a first run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from typing import NamedTuple

import torch
from triton.runtime.errors import TritonError

import tq
from tq.bench.cases import Case
from tq.kernels import tuning

MOST_PROCESSES = 32  # each holds a context on the GPU


def processes() -> int:
    """How many to start."""
    return min(os.cpu_count() or 1, MOST_PROCESSES)


class Description(NamedTuple):
    """A case by names, for another process. config: None is what the call takes by itself."""

    producer: str
    left_out: tuple[str, ...]
    scheme: str
    rows: int
    hidden_size: int
    config: tuning.RowConfig | None = None


def describe(case: Case, config: tuning.RowConfig | None = None) -> Description:
    """The case, cut by itself or as `config` says."""
    return Description(case.producer.name, case.left_out, case.scheme, case.rows, case.hidden_size, config)


def compile_share(descriptions: list[Description], checks: bool) -> None:
    """Runs each call once, and its check. A configuration that Triton cannot make is found out when it is timed."""
    for name, left_out, scheme, rows, hidden_size, config in descriptions:
        producer = tq.PRODUCERS[name]
        arguments, options = Case(producer, left_out, scheme, rows, hidden_size).arguments(torch.bfloat16, "cuda")
        with nullcontext() if config is None else tuning.force(config), suppress(*([TritonError] if config else [])):
            producer(*arguments, scheme=scheme, **options)
            if checks:
                tq.check(producer, *arguments, scheme=scheme, **options)


def compile_ahead(cases: Sequence[Case], checks: bool = False) -> None:
    """Compiles what `cases` need on this machine's GPU. A kernel depends on the number of tokens only by there being
    few or many, so the first and the last of each are enough."""
    ends: dict[tuple, list[Description]] = {}
    for case in cases:
        described = describe(case)
        kept = ends.setdefault((*described[:3], case.hidden_size), [])
        kept[1 if kept else 0 :] = [described]
    compile_all([description for kept in ends.values() for description in dict.fromkeys(kept)], checks)


def compile_all(todo: list[Description], checks: bool = False) -> None:
    """Compiles these calls on this machine's GPU."""
    count = processes()
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        for share in [pool.submit(compile_share, todo[first::count], checks) for first in range(count)]:
            share.result()
