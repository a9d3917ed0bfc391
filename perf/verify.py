"""Checks on a GPU what cannot be checked without one, and writes what was found as data.

    python -m perf.verify [--out perf/results/<gpu>/verify.json]

Every producer with every scheme against torch; every layout and dtype in turn; the arithmetic over all mantissas;
vLLM's quantizers where vLLM is installed; every line of the GPU's table against torch; CUDA-graph capture with
cold and warm kernels; the bits of a token in batches of two processes; calls that depend on each other, back to back;
tensors of more than 2^31 elements; the template kernels under compute-sanitizer where it is installed. Exits non-zero
on any failure.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer

import tq
from perf import calls, matrix
from perf.arithmetic import divisions, encoders, roundings, scale_rule
from perf.provenance import gpu_folder, provenance, write
from tq.bench.ahead import in_processes
from tq.kernels import tables

CHAINED = (1, 16, 256, 4096)  # tokens: calls of few programs and of many wait for each other differently


class Part(NamedTuple):
    """What one process of many does at a time."""

    name: str
    run: Callable[[], list[dict[str, Any]]]


def parts(sizes: tuple[int, ...], gpu: str) -> list[Part]:
    """Everything, what takes long first. Most of the time is compilation, and no two parts compile the same."""
    dynamic = [scheme.name for scheme in tq.SCHEMES.values() if scheme.dynamic]
    every = sorted(matrix.combinations(sizes), key=lambda each: not each.checked)
    return [
        *(Part(f"large {name}", partial(calls.large, name)) for name in calls.LARGE),
        *(Part(each.__name__, each) for each in (calls.against_vllm, encoders, roundings, divisions)),
        *(Part(f"scale rule {name}", partial(scale_rule, name)) for name in dynamic),
        *(Part(f"chain {tokens}", partial(calls.chain, tokens)) for tokens in CHAINED),
        *(Part(f"specials {name}", partial(calls.specials, name)) for name in tq.SCHEMES),
        *(Part(f"capture {'-'.join(pair)}", partial(calls.capture, *pair)) for pair in calls.PAIRS),
        *(Part(f"tuned, {name_of(each)}", partial(matrix.against_reference, each)) for each in matrix.in_table(gpu)),
        *(Part(name_of(each), partial(matrix.against_reference, each)) for each in every),
    ]


def name_of(each: matrix.Combination) -> str:
    """Kind and name of a combination."""
    kind = "sums" if tq.PRODUCERS[each.producer].moments else "no sums"
    parts = *each[:5], max(each.tokens), *(f"no {name}" for name in each.left_out)
    return f"{kind}{', checked' * each.checked} {'-'.join(map(str, parts))}"


def run(part: Part) -> tuple[str, float, list[dict[str, Any]]]:
    """Name, seconds and rows of a part; one row that says so where it did not come to its end."""
    began = time.monotonic()
    try:
        rows = part.run()
    except Exception:
        rows = [{"check": f"{part.name} ran to its end", "differ": 1, "error": traceback.format_exc()[-1000:]}]
    torch.cuda.empty_cache()  # many processes share the memory
    return part.name, time.monotonic() - began, rows


def sanitize(tool: str, limit_s: float) -> dict[str, Any]:
    """The template kernels under compute-sanitizer."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c"]
    command.append("from perf.calls import templates; templates()")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    print(tool, *done.stdout.splitlines()[-2:], sep="\n")
    return {"check": f"compute-sanitizer {tool} ran to its end", "differ": done.returncode}


def main(
    out: Path | None = None,
    sizes: str = ",".join(map(str, matrix.SIZES)),
    sanitizer: bool = True,
    limit_s: int = 3600,
) -> None:
    """Runs everything, no longer than `limit_s`."""
    began = time.monotonic()
    tools = ("memcheck", "racecheck") if sanitizer and shutil.which("compute-sanitizer") else ()
    todo = parts(tuple(map(int, sizes.split(","))), str(tables.gpu_of(torch.device("cuda"))))
    spawn, rows, seconds = multiprocessing.get_context("spawn"), [], {}

    def left() -> float:
        return max(began + limit_s - time.monotonic(), 1.0)

    # One after the other in a process of its own each, so that the second finds the kernels of the first compiled.
    with futures.ThreadPoolExecutor(1) as threads, spawn.Pool(1, maxtasksperchild=1) as fresh:
        sanitized = [threads.submit(sanitize, tool, limit_s) for tool in tools]
        both = fresh.map_async(calls.digests, [False, True], chunksize=1)
        try:
            for name, took, made in in_processes(run, todo, left()):
                seconds[name] = took
                rows += made
            rows += calls.same_digests(*both.get(left()))
            rows += [each.result(left()) for each in sanitized]
        except (multiprocessing.TimeoutError, futures.TimeoutError, subprocess.TimeoutExpired):
            rows.append({"check": "everything ran to its end", "differ": len(todo) - len(seconds) or 1})
    failures = [row for row in rows if matrix.wrong(row)]
    document = provenance("perf.verify") | {"checks": len(rows), "failures": len(failures)}
    write(out or gpu_folder() / "verify.json", document, rows)
    for row in failures:
        print("FAILED", json.dumps(row))
    kinds: dict[str, list[float]] = {}
    for name, took in seconds.items():
        kinds.setdefault(name.rsplit(" ", 1)[0], []).append(took)
    for kind, times in sorted(kinds.items(), key=lambda each: -sum(each[1])):
        print(f"{sum(times):.0f} s in {len(times)}: {kind}")
    print(f"{len(rows)} checks, {len(failures)} failures, {time.monotonic() - began:.0f} s")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
