"""Shapes of programs of the state kernels, tried on this machine's GPU.

python -m perf.state_tuning [--batches 1,8,64] [--out perf/results/<gpu>/state_tuning.json]
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import track

import tq.state
from perf.provenance import gpu_folder, provenance, write
from perf.state_cases import FORMS, PACKED, QUANTIZED, activations, caches, decode_call, output, packed_caches, timed
from tq.state import bind

TUNINGS = [
    bind.Tuning(per_thread, part, registers)
    for per_thread in (16, 32, 64, 128)
    for part in (2048, 4096, 8192)
    for registers in (None, 64, 80, 96)
]


def tune(batch: int) -> list[dict[str, Any]]:
    """Times of the shapes of programs that compile without running out of registers."""
    state, slots = caches(batch)
    given, out = activations("gdn", batch), output("gdn", batch)
    calls = {
        f"qdq_ {code} {granularity}": [
            partial(tq.state.qdq_, state, ids, code=code, granularity=granularity) for ids in slots
        ]
        for code, granularity in FORMS
    }
    for name, options in QUANTIZED.items():
        calls[f"gdn_decode {name}"] = [
            decode_call("gdn", tq.state.gdn_decode, given, state, ids, out, **options) for ids in slots
        ]
    for name, form in PACKED.items():
        cache, ids_of = packed_caches("gdn", batch, *form)
        calls[f"gdn_decode_packed {name}"] = [
            decode_call("gdn", tq.state.gdn_decode_packed, given, cache, ids, out) for ids in ids_of
        ]
    rows = []
    for tuning in track(TUNINGS, f"tuning, {batch} requests"):
        bind.tuning = bind.packed_tuning = bind.wide_tuning = bind.ring_tuning = tuning
        for name, each in calls.items():
            row = {"kernel": name, "batch": batch, **tuning._asdict()}
            try:
                row["us"] = timed(each)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            rows.append(row)
    return rows


def main(out: Path | None = None, batches: str = "1,8,64") -> None:
    """Writes all times and shows the three best shapes for each kernel and number of requests."""
    console = Console()
    rows = [row for batch in map(int, batches.split(",")) for row in tune(batch)]
    write(out or gpu_folder() / "state_tuning.json", provenance("perf.state_tuning"), rows)
    for name in dict.fromkeys((row["kernel"], row["batch"]) for row in rows):
        best = sorted((r for r in rows if (r["kernel"], r["batch"]) == name and "us" in r), key=lambda r: r["us"])
        for row in best[:3]:
            console.print(*row.values())


if __name__ == "__main__":
    typer.run(main)
