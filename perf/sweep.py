"""Measures tq beside its peers on this machine's GPU and writes the numbers as data.

python -m perf.sweep [--out perf/results/<gpu>/rows.json] [--peers tq,vllm,...] [--tokens 1,16,...]
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from perf.provenance import gpu_folder, provenance, write
from tq.bench.ahead import compile_ahead
from tq.bench.cases import TOKENS, Case, bytes_of, cases
from tq.bench.peers import PEERS
from tq.bench.timing import copies_of, device_time_us, launch_floor_us, measured_bandwidth

WRITTEN_EVERY = 16  # rows


def measure(case: Case, peers: list[str], dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """One row of the data: microseconds of each peer, and how many of its codes and scales differ from ours; what it
    raised, where it did."""
    first = case.prepare(dtype, "cuda")
    moved = bytes_of(first)
    prepared = [first, *(case.prepare(dtype, "cuda") for _ in range(copies_of(moved) - 1))]
    row: dict[str, Any] = {
        "producer": case.name,
        "scheme": case.scheme,
        "rows": case.rows,
        "hidden_size": case.hidden_size,
        "bytes": moved,
    }
    for name in peers:
        row[name] = None
        try:
            made = [peer for peer in map(PEERS[name], prepared) if peer is not None]
            if made:
                time_us, spread = device_time_us([peer.call for peer in made])
                row[name], row[f"{name}_spread"] = round(time_us, 3), round(spread, 3)
                row.update(compare(name, case, dtype) if name != "tq" else {})
        except Exception as error:
            if name == "tq":
                raise
            row[f"{name}_error"] = f"{type(error).__name__}: {error}"[:200]
    return row


def compare(name: str, case: Case, dtype: torch.dtype) -> dict[str, int]:
    """Codes, scales and residuals in which a peer and tq differ on the same fresh input."""
    prepared = case.prepare(dtype, "cuda")
    ours, theirs = PEERS["tq"](prepared), PEERS[name](prepared)
    ours.call(), theirs.call()  # type: ignore[union-attr]
    pairs = zip(ours.outputs(), theirs.outputs(), strict=True)  # type: ignore[union-attr]
    differing = {}
    for what, (a, b) in zip(("codes", "scales", "residual"), pairs, strict=True):
        if a is not None and b is not None:
            differing[f"{name}_{what}_differ"] = int((a.view(b.shape) != b).sum())
    return differing


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def main(
    out: Path | None = None,
    peers: str = ",".join(PEERS),
    tokens: str = ",".join(map(str, TOKENS)),
    producers: str = "",
    schemes: str = "",
    sizes: str = "",
    part: str = "0/1",
) -> None:
    """Measures producers (all) with schemes (all) at hidden sizes (those of real models) beside the peers; `part` i/n
    takes every n-th case from the i-th on."""
    chosen = peers.split(",")
    offset, stride = map(int, part.split("/"))
    numbers = tuple(map(int, tokens.split(",")))
    widths = tuple(map(int, sizes.split(","))) if sizes else ()
    todo = [
        case
        for case in cases(numbers, widths)
        if (not producers or case.producer.name in producers.split(","))
        and (not schemes or case.scheme in schemes.split(","))
    ][offset::stride]
    console, began = Console(), time.monotonic()
    compile_ahead(todo, console, chosen)
    console.print(f"{len(todo)} cases compiled in {time.monotonic() - began:.0f} s")
    document = provenance("perf.sweep") | {
        "bandwidth_bytes_per_s": measured_bandwidth(),
        "launch_floor_us": launch_floor_us(),
        "method": "CUDA-graph replay, inputs rotated over 200 MB, median of 12 replays, bf16, microseconds",
    }
    rows: list[dict[str, Any]] = []
    for case in track(todo, "measuring", console=console, disable=not console.is_terminal):
        rows.append(measure(case, chosen))
        if len(rows) % WRITTEN_EVERY == 0 or len(rows) == len(todo):  # whatever ends this, it leaves what it has
            write(out or gpu_folder() / "rows.json", document, rows)
    table = Table("producer", "scheme", *(f"geomean over {peer}" for peer in chosen if peer != "tq"), "worst", "at")
    for name, scheme in [] if "tq" not in chosen else dict.fromkeys((row["producer"], row["scheme"]) for row in rows):
        group = [row for row in rows if (row["producer"], row["scheme"]) == (name, scheme)]
        ratios = {peer: [row[peer] / row["tq"] for row in group if row.get(peer)] for peer in chosen if peer != "tq"}
        if not any(ratios.values()):
            continue
        worst = min(
            ((row[peer] / row["tq"], peer, row) for peer in ratios for row in group if row.get(peer)),
            key=lambda w: w[0],
        )
        place = f"{worst[1]} M={worst[2]['rows']} N={worst[2]['hidden_size']}"
        table.add_row(name, scheme, *(f"{geometric_mean(r):.2f}" for r in ratios.values()), f"{worst[0]:.2f}", place)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
