"""Measures the kernels of recurrent states on this machine's GPU, checks their bits, and writes both as data.

    python -m perf.state [--out perf/results/<gpu>/state.json] [--batches 1,8,...]

Exits non-zero where bits differ that must not. Shapes of programs are tried by perf.state_tuning.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tq.state
from perf.provenance import gpu_folder, provenance, write
from perf.state_cases import (
    FORMS,
    PACKED,
    QUANTIZED,
    SIZE,
    activations,
    by_torch,
    caches,
    decode_call,
    native_decode,
    output,
    packed_caches,
    share,
    timed,
)
from perf.state_checks import check_arithmetic, check_replay
from tq.bench.timing import launch_floor_us, measured_bandwidth

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def measure_qdq(batch: int) -> list[dict[str, Any]]:
    """Every format beside an element-wise pass of torch over as many states; the torch chain and its bits beside those
    of one scale a head."""
    state, slots = caches(batch)
    passes = [state[1 + i * batch : 1 + (i + 1) * batch] for i in range(len(slots))]
    elementwise = timed([partial(torch.neg, each, out=each) for each in passes])
    rows = []
    for code, granularity in FORMS:
        options = {"code": code, "granularity": granularity}
        ours = timed([partial(tq.state.qdq_, state, ids, **options) for ids in slots])
        row = {"kernel": "qdq_", **options, "batch": batch, "tq": ours, "bandwidth_share": share(batch, ours)}
        row["elementwise"] = elementwise
        if granularity == "head":
            row["torch"] = timed([partial(by_torch, state, ids.long(), code) for ids in slots])
            state.normal_()
            theirs = state.clone()
            tq.state.qdq_(state, slots[0], **options)
            by_torch(theirs, slots[0].long(), code)
            row["elements_differ"] = int((state.view(torch.int32) != theirs.view(torch.int32)).sum())
            del theirs
        rows.append(row)
    return rows


def measure_decode(kind: str, batch: int) -> list[dict[str, Any]]:
    """vLLM's step, ours, and ours with rounding; bits of ours beside vLLM's, and beside `qdq_` and then vLLM's."""
    state, slots = caches(batch)
    given, out = activations(kind, batch), output(kind, batch)
    ours, native = (tq.state.gdn_decode if kind == "gdn" else tq.state.kda_decode), native_decode(kind)
    row: dict[str, Any] = {"kernel": f"{kind}_decode", "batch": batch}
    if native is not None:
        row["vllm"] = timed([decode_call(kind, native, given, state, ids, out) for ids in slots])
    for name, options in QUANTIZED.items():
        state.normal_()
        row[name] = timed([decode_call(kind, ours, given, state, ids, out, **options) for ids in slots])
        row[f"{name}, bandwidth_share"] = share(batch, row[name])
    if native is not None:
        for name, options in (("plain", {}), ("int8 incoming", QUANTIZED["int8 incoming"])):
            state.normal_()
            theirs, their_out = state.clone(), torch.zeros_like(out)
            decode_call(kind, ours, given, state, slots[0], out, **options)()
            if options:
                tq.state.qdq_(theirs, slots[0], code=options["code"])
            decode_call(kind, native, given, theirs, slots[0], their_out)()
            row[f"{name}, elements_differ"] = int((state != theirs).sum())
            row[f"{name}, largest_difference"] = float((state - theirs).abs().max() / theirs.abs().max())
            row[f"{name}, outputs_differ"] = int((out != their_out).sum())
            del theirs
    return [row]


def measure_packed(kind: str, batch: int) -> list[dict[str, Any]]:
    """vLLM's step on fp32, ours on packed states, and how much faster that is; what one step makes of a state beside
    what the fp32 step makes of it: every element within half a step of its code."""
    given, out = activations(kind, batch), output(kind, batch)
    ours = tq.state.gdn_decode if kind == "gdn" else tq.state.kda_decode
    packed = tq.state.gdn_decode_packed if kind == "gdn" else tq.state.kda_decode_packed
    state, slots = caches(batch)
    native = timed([decode_call(kind, native_decode(kind) or ours, given, state, ids, out) for ids in slots])
    fp32_bytes = state[:1].nbytes
    del state
    rows = []
    for name, form in PACKED.items():
        cache, slots = packed_caches(kind, batch, *form)
        row: dict[str, Any] = {"kernel": f"{kind}_decode_packed", "form": name, "batch": batch, "native": native}
        row["tq"] = timed([decode_call(kind, packed, given, cache, ids, out) for ids in slots])
        row |= {"speedup": round(native / row["tq"], 3), "slot_share": round(cache.slot_bytes / fp32_bytes, 4)}
        exact = tq.state.unpack(cache, slots[0])
        order, want = torch.arange(batch, device="cuda"), torch.zeros_like(out)
        exact = torch.cat([exact[:1], exact])  # slot 0 is none
        decode_call(kind, ours, given, exact, order + 1, want)()
        decode_call(kind, packed, given, cache, slots[0], out)()
        row["outputs_largest_difference"] = float((out.float() - want.float()).abs().max() / want.abs().max())
        if cache.ring is None and not cache.hadamard:
            error = (tq.state.unpack(cache, slots[0]) - exact[1:]).abs()
            limit = 0.5 if form[0] == "int8" else 16.0  # E4M3 is 32 wide below 448
            limit /= 1.0 if cache.residuals is None else 14.0
            steps = cache.scales[slots[0].long()] * limit
            steps = steps.repeat_interleave(SIZE // steps.shape[2], 2)
            row["elements_differ"] = int((error > steps * 1.001 + 1e-5).sum())
        rows.append(row)
        del cache
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """A table of qdq_, one of packed states and one of the decode steps, microseconds."""
    table = Table("qdq_", "requests", "tq", "torch chain", "element-wise", "share of bandwidth", "elements differ")
    for row in rows:
        if row.get("kernel") == "qdq_":
            values = row["batch"], row["tq"], row.get("torch"), row["elementwise"]
            values = *values, row["bandwidth_share"], row.get("elements_differ")
            table.add_row(f"{row['code']} {row['granularity']}", *map(str, values))
    console.print(table)
    table = Table("packed", "requests", "native", "tq", "times faster", "of the bytes of fp32")
    for row in rows:
        if row.get("kernel", "").endswith("_decode_packed"):
            values = row["batch"], row["native"], row["tq"], row["speedup"], row["slot_share"]
            table.add_row(f"{row['kernel']} {row['form']}", *map(str, values))
    console.print(table)
    table = Table("decode", "requests", "vLLM", *QUANTIZED, "state elements differ, plain and int8")
    for row in rows:
        if row.get("kernel", "").endswith("_decode"):
            differ = [str(row.get(f"{name}, elements_differ")) for name in ("plain", "int8 incoming")]
            table.add_row(
                row["kernel"],
                str(row["batch"]),
                str(row.get("vllm")),
                *(str(row[n]) for n in QUANTIZED),
                " ".join(differ),
            )
    console.print(table)


def main(out: Path | None = None, batches: str = ",".join(map(str, BATCHES))) -> None:
    """Measures, checks and writes."""
    console, sizes = Console(), list(map(int, batches.split(",")))
    document = provenance("perf.state") | {
        "bandwidth_bytes_per_s": measured_bandwidth(),
        "launch_floor_us": launch_floor_us(),
        "method": "CUDA-graph replay, slots rotated over 200 MB, median of 12 replays, fp32 states, microseconds",
    }
    rows = check_arithmetic() + check_replay()
    for batch in track(sizes, "measuring", console=console, disable=not console.is_terminal):
        rows += measure_qdq(batch) + measure_decode("gdn", batch) + measure_decode("kda", batch)
        rows += measure_packed("gdn", batch) + measure_packed("kda", batch)
        write(out or gpu_folder() / "state.json", document, rows)
    show(rows, console)
    failed = [row for row in rows if row.get("differ") or row.get("elements_differ")]
    for row in failed:
        console.print("FAILED", row)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
