"""Measures what a call costs on the host, tq's beside vLLM's op with its allocations, and writes it as data.

    python -m perf.host [--out perf/results/<gpu>/host.json]

Few tokens, so that the GPU keeps up; between rounds the host waits for it. tq's time is that of its public function,
which checks, allocates and launches; vLLM's is that of its op, into tensors that exist, and of a `torch.empty` for each
that the op writes and has not been given. A residual is written in place by both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from perf.provenance import gpu_folder, provenance, write
from tq.bench.cases import Case, cases
from tq.bench.peers import PEERS

PRODUCERS = "quantize,rms_norm,silu_mul"
SCHEMES = "fp8_tensor,fp8_token,fp8_group128"
TOKENS = 4
ROUNDS, CALLS = 30, 100


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call on the host, median of rounds."""
    times = []
    for _ in range(ROUNDS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - began) * 1e6 / CALLS)
    return statistics.median(times[2:])


def measure(case: Case, device: str) -> dict[str, Any]:
    """One row of the data."""
    arguments, options = case.arguments(torch.bfloat16, device)
    if "residual" in options and "residual" in case.producer.optional:
        options = {**options, "residual_out": options["residual"]}

    def ours() -> None:
        case.producer(*arguments, scheme=case.scheme, **options)

    row: dict[str, Any] = {"producer": case.name, "scheme": case.scheme, "rows": case.rows}
    row |= {"hidden_size": case.hidden_size, "tq": round(host_us(ours), 2), "vllm": None}
    prepared = case.prepare(torch.bfloat16, device)
    theirs = PEERS["vllm"](prepared)
    if theirs is not None:
        outputs = [tensor for tensor in (prepared.codes, prepared.scales) if tensor is not None]
        made = [(tensor.shape, {"dtype": tensor.dtype, "device": tensor.device}) for tensor in outputs]
        allocated = host_us(lambda: [torch.empty(shape, **more) for shape, more in made])
        row["vllm"] = round(host_us(theirs.call) + allocated, 2)
    return row


def main(
    out: Path | None = None, producers: str = PRODUCERS, schemes: str = SCHEMES, hidden_sizes: str = "4096,14336"
) -> None:
    """Measures each producer with each scheme at those of its sizes that are asked for."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = list(map(int, hidden_sizes.split(",")))
    todo = [
        case
        for case in cases((TOKENS,))
        if case.producer.name in producers.split(",")
        and case.scheme in schemes.split(",")
        and case.hidden_size in sizes
    ]
    rows: list[dict[str, Any]] = []
    method = f"microseconds of a call on the host, {TOKENS} tokens, median of {ROUNDS - 2} rounds of {CALLS} calls"
    console = Console()
    try:
        for case in track(todo, "measuring", console=console, disable=not console.is_terminal):
            rows.append(measure(case, device))
    finally:  # interrupted, it keeps what it has
        write(out or gpu_folder() / "host.json", provenance("perf.host") | {"method": method}, rows)
    table = Table("producer", "scheme", "tq, us", "vLLM's op, us")
    for row in rows:
        table.add_row(row["producer"], row["scheme"], f"{row['tq']:.1f}", f"{row['vllm'] or float('nan'):.1f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
