"""Kernels compiled by many processes at once, into Triton's cache: compiling is most of a first run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

import tq
from tq.bench.cases import Case

MOST_PROCESSES = 16  # each holds a context on the GPU
Description = tuple[str, tuple[str, ...], str, int, int]


def compile_share(descriptions: list[Description], checks: bool) -> None:
    """Runs each call once, and its check."""
    for name, left_out, scheme, rows, hidden_size in descriptions:
        producer = tq.PRODUCERS[name]
        arguments, options = Case(producer, left_out, scheme, rows, hidden_size).arguments(torch.bfloat16, "cuda")
        producer(*arguments, scheme=scheme, **options)
        if checks:
            tq.check(producer, *arguments, scheme=scheme, **options)


def compile_ahead(cases: Sequence[Case], checks: bool = False) -> None:
    """Compiles what `cases` need on this machine's GPU. A kernel depends on the number of tokens only by there being
    few or many, so the first and the last of each are enough."""
    ends: dict[tuple, list[Description]] = {}
    for case in cases:
        described = (case.producer.name, case.left_out, case.scheme, case.rows, case.hidden_size)
        kept = ends.setdefault((*described[:3], case.hidden_size), [])
        kept[1 if kept else 0 :] = [described]
    todo = [description for kept in ends.values() for description in dict.fromkeys(kept)]
    count = min(os.cpu_count() or 1, MOST_PROCESSES)
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        for share in [pool.submit(compile_share, todo[first::count], checks) for first in range(count)]:
            share.result()
