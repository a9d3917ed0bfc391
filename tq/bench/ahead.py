"""Kernels compiled by many processes at once, into Triton's cache: compiling is most of a first run."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

import torch

import tq
from tq.bench.cases import cases

MOST_PROCESSES = 16  # each holds a context on the GPU


def compile_share(tokens: tuple[int, ...], first: int, step: int, checks: bool) -> None:
    """Runs every `step`-th case from `first` on once, and its check."""
    for case in islice(cases(tokens), first, None, step):
        arguments, options = case.arguments(torch.bfloat16, "cuda")
        case.producer(*arguments, scheme=case.scheme, **options)
        if checks:
            tq.check(case.producer, *arguments, scheme=case.scheme, **options)


def compile_ahead(tokens: tuple[int, ...], checks: bool = False) -> None:
    """Compiles what `cases(tokens)` needs on this machine's GPU. Kernels do not depend on the number of tokens, so the
    first number is enough."""
    count = min(os.cpu_count() or 1, MOST_PROCESSES)
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        for share in [pool.submit(compile_share, tokens[:1], first, count, checks) for first in range(count)]:
            share.result()
