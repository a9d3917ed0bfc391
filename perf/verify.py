"""Checks on a GPU what cannot be checked without one, and writes what was found as data.

    python -m perf.verify [--out perf/results/<gpu>/verify.json]

Every producer with every scheme against torch; every layout and dtype in turn; the arithmetic over all mantissas;
vLLM's quantizers where vLLM is installed; CUDA-graph capture with cold and warm kernels; the bits of a token in batches
of two processes; calls that depend on each other, back to back; tensors of more than 2^31 elements; the template
kernels under compute-sanitizer where it is installed. Exits non-zero on any failure.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer

import tq
from perf import calls, matrix
from perf.arithmetic import divisions, encoders, roundings, scale_rule
from perf.provenance import gpu_folder, provenance, write
from tq.bench.ahead import processes

CHAINED = (1, 16, 256, 4096)  # tokens: calls of few programs and of many wait for each other differently


class Part(NamedTuple):
    """What one process of many does at a time."""

    name: str
    run: Callable[[], list[dict[str, Any]]]


def parts(sizes: tuple[int, ...]) -> list[Part]:
    """Everything, what takes long first. Most of the time is compilation, and no two parts compile the same."""
    dynamic = [scheme.name for scheme in tq.SCHEMES.values() if scheme.dynamic]
    every = sorted(matrix.combinations(sizes), key=lambda each: not each.checked)
    return [
        *(Part(f"large {name}", partial(calls.large, name)) for name in calls.LARGE),
        *(Part(each.__name__, each) for each in (calls.against_vllm, encoders, roundings, divisions)),
        *(Part(f"scale rule {name}", partial(scale_rule, name)) for name in dynamic),
        *(Part(f"chain {tokens}", partial(calls.chain, tokens)) for tokens in CHAINED),
        *(Part(f"specials {name}", partial(calls.specials, name)) for name in tq.SCHEMES),
        *(Part(f"capture {pair}", partial(calls.capture, *pair)) for pair in calls.PAIRS),
        *(Part(str(tuple(each)), partial(matrix.against_reference, each)) for each in every),
    ]


def run(part: Part) -> tuple[str, float, list[dict[str, Any]]]:
    """Name, seconds and rows of a part; one row that says so where it did not come to its end."""
    began = time.monotonic()
    try:
        rows = part.run()
    except Exception:
        rows = [{"check": f"{part.name} ran to its end", "differ": 1, "error": traceback.format_exc()[-1000:]}]
    torch.cuda.empty_cache()  # many processes share the memory
    return part.name, time.monotonic() - began, rows


def sanitize(tool: str) -> subprocess.Popen:
    """The template kernels under compute-sanitizer."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c"]
    command.append("from perf.calls import templates; templates()")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(
    out: Path | None = None,
    sizes: str = ",".join(map(str, matrix.SIZES)),
    sanitizer: bool = True,
    limit_s: int = 3600,
) -> None:
    """Runs everything, no longer than `limit_s`."""
    began = time.monotonic()
    tools = ("memcheck", "racecheck") if sanitizer and shutil.which("compute-sanitizer") else ()
    sanitized = {tool: sanitize(tool) for tool in tools}
    todo = parts(tuple(map(int, sizes.split(","))))
    spawn, rows, seconds = multiprocessing.get_context("spawn"), [], {}

    def left() -> float:
        return max(began + limit_s - time.monotonic(), 1.0)

    # Leaving terminates the processes. A process of `two` serves one call: the digests are of two new ones.
    with spawn.Pool(2, maxtasksperchild=1) as two, spawn.Pool(processes()) as pool:
        both = two.map_async(calls.digests, [False, True], chunksize=1)
        found = pool.imap_unordered(run, todo)
        try:
            while len(seconds) < len(todo):
                name, seconds[name], made = found.next(left())
                rows += made
            rows += calls.same_digests(*both.get(left()))
        except multiprocessing.TimeoutError:
            rows.append({"check": f"{len(todo)} parts and two processes ran to their end", "differ": 1})
    for tool, process in sanitized.items():
        try:
            output, _ = process.communicate(timeout=left())
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        rows.append({"check": f"compute-sanitizer {tool} ran to its end", "differ": process.returncode})
        print(tool, *output.splitlines()[-2:], sep="\n")
    failures = [row for row in rows if matrix.wrong(row)]
    document = provenance("perf.verify") | {"checks": len(rows), "failures": len(failures)}
    write(out or gpu_folder() / "verify.json", document, rows)
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:8]
    print(*(f"{seconds[name]:.0f} s: {name}" for name in slowest), sep="\n")
    for row in failures:
        print("FAILED", json.dumps(row))
    print(f"{len(rows)} checks, {len(failures)} failures, {time.monotonic() - began:.0f} s")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
