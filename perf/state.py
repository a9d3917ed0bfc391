"""Measures the kernels of recurrent states on this machine's GPU, checks their bits, and writes both as data.

    python -m perf.state [--out perf/results/<gpu>/state.json] [--batches 1,8,...] [--tune-programs]

States as of Qwen3-Next: 32 value heads (16 key heads for GDN) of 128 x 128 in fp32, 2 MiB a request. Exits non-zero
where bits differ that must not. --tune-programs tries shapes of programs instead, and writes state_tuning.json.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tq.state
from perf.provenance import gpu_folder, provenance, write
from tq.bench.timing import copies_of, device_time_us, launch_floor_us, measured_bandwidth
from tq.state import bind
from tq.state.formats import restore_by_division

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
HEADS, KEY_HEADS, SIZE = 32, 16, 128
STATE_BYTES = HEADS * SIZE * SIZE * 4
FORMS = [
    ("int8_narrow", "head"),
    ("fp8_e4m3", "head"),
    ("int8_narrow", "value_channel"),
    ("int8_narrow", "key_channel"),
    ("int8_narrow", "tile"),
    ("int8_narrow", "group32"),
]
QUANTIZED = {
    "plain": {},
    "int8 incoming": {"code": "int8_narrow"},
    "int8 outgoing": {"code": "int8_narrow", "quantize": "outgoing"},
    "fp8 incoming": {"code": "fp8_e4m3"},
}
# Packed states: code, granularity, steps in a ring (0: rounded by each).
PACKED = {
    "int8": ("int8", "value_channel", 0),
    "fp8": ("fp8_e4m3", "value_channel", 0),
    "int8 group32": ("int8", "group32", 0),
    "int8 replay 8": ("int8", "value_channel", 8),
    "int8 replay 16": ("int8", "value_channel", 16),
}
TUNINGS = [
    bind.Tuning(per_thread, part, registers)
    for per_thread in (16, 32, 64, 128)
    for part in (2048, 4096, 8192)
    for registers in (None, 64, 80, 96)
]


def by_torch(state: torch.Tensor, slots: torch.Tensor, code: str) -> None:
    """A scale a head as ModelOpt computes it: gather, quantize, dequantize, scatter. No host synchronization."""
    gathered = state.index_select(0, slots)
    largest, smallest = torch.amax(gathered, (2, 3), keepdim=True), torch.amin(gathered, (2, 3), keepdim=True)
    amax = torch.maximum(largest.abs(), smallest.abs())
    flushed = amax <= 2.0**-24
    if code == "fp8_e4m3":
        scale = 448.0 / torch.where(flushed, 1.0, amax)
        rounded = (gathered * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * (1 / scale)
    else:
        scale = torch.full_like(amax, 127.0) / amax
        rounded = (gathered * torch.where(flushed, 0.0, scale)).round_().clamp(-127.0, 127.0)
        rounded = rounded / torch.where(flushed, 1.0, scale)
    state.index_copy_(0, slots, rounded)


def caches(batch: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A cache, and disjoint slots of it for as many calls as are rotated."""
    calls = copies_of(2 * batch * STATE_BYTES)
    state = torch.randn(1 + calls * batch, HEADS, SIZE, SIZE, device="cuda")
    order = torch.randperm(calls * batch, device="cuda").int() + 1
    return state, list(order.view(calls, batch))


def activations(kind: str, batch: int) -> tuple[torch.Tensor, ...]:
    """mixed_qkv, gate, beta, A_log, dt_bias in the dtypes of vLLM's layers."""
    key_heads, channels = (KEY_HEADS, ()) if kind == "gdn" else (HEADS, (SIZE,))
    qkv = torch.randn(batch, (2 * key_heads + HEADS) * SIZE, device="cuda").bfloat16()
    gate, beta = (torch.randn(batch, HEADS, *shape, device="cuda").bfloat16() for shape in (channels, ()))
    if kind == "kda":
        gate, beta = gate[None], beta[None]
    return qkv, gate, beta, torch.randn(HEADS, device="cuda"), torch.randn(HEADS, *channels, device="cuda").flatten()


def native_decode(kind: str) -> Callable | None:
    """vLLM's packed decode, where vLLM is installed."""
    try:
        if kind == "gdn":
            from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
                fused_recurrent_gated_delta_rule_packed_decode as found,
            )
        else:
            from vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent import (
                fused_recurrent_kda_packed_decode as found,
            )
    except ImportError:
        return None
    return found


def packed_caches(
    kind: str, batch: int, code: str, granularity: str, length: int
) -> tuple[tq.state.PackedState, list[torch.Tensor]]:
    """As `caches`; rings are filled to different heights, so that each call rounds an equal share of its requests."""
    calls = copies_of(batch * STATE_BYTES // 2)
    sizes, ring = (1 + calls * batch, HEADS, SIZE, SIZE), None
    if length:
        gate, key_heads = ("head", KEY_HEADS) if kind == "gdn" else ("key_channel", HEADS)
        ring = tq.state.Ring.zeros(*sizes, length=length, gate=gate, key_heads=key_heads, device="cuda")
        ring.counts.copy_((torch.arange(sizes[0], device="cuda") % length).view(-1, 1, 1))
    state = tq.state.PackedState.zeros(*sizes, code=code, granularity=granularity, device="cuda", ring=ring)
    state.codes.view(torch.uint8).random_(0, 100)
    state.scales.fill_(0.01)
    return state, list((torch.randperm(calls * batch, device="cuda").int() + 1).view(calls, batch))


def decode_call(
    kind: str, decode: Callable, given: tuple, state: Any, slots: torch.Tensor, out: torch.Tensor, **options
) -> Callable:
    """One step of `decode`, vLLM's or ours; both have the same signature."""
    if kind == "gdn":
        return partial(decode, *given, SIZE**-0.5, state, out, slots, True, **options)
    return partial(decode, *given, None, state, slots, None, out, **options)


def output(kind: str, batch: int) -> torch.Tensor:
    shape = (batch, 1, HEADS, SIZE) if kind == "gdn" else (1, batch, HEADS, SIZE)
    return torch.zeros(shape, device="cuda", dtype=torch.bfloat16)


def share(batch: int, time_us: float) -> float:
    """Of the bandwidth of an element-wise pass, what reading and writing the states takes."""
    return round(2 * batch * STATE_BYTES / time_us * 1e6 / measured_bandwidth(), 4)


def timed(calls: list[Callable]) -> float:
    return round(device_time_us(calls)[0], 3)


def measure_qdq(batch: int) -> list[dict[str, Any]]:
    """Every format; the torch chain and its bits beside those of one scale a head."""
    state, slots = caches(batch)
    rows = []
    for code, granularity in FORMS:
        options = {"code": code, "granularity": granularity}
        ours = timed([partial(tq.state.qdq_, state, ids, **options) for ids in slots])
        row = {"kernel": "qdq_", **options, "batch": batch, "tq": ours, "bandwidth_share": share(batch, ours)}
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
        if cache.ring is None:
            exact = tq.state.unpack(cache, slots[0])
            order, want = torch.arange(batch, device="cuda"), torch.zeros_like(out)
            exact = torch.cat([exact[:1], exact])  # slot 0 is none
            decode_call(kind, ours, given, exact, order + 1, want)()
            decode_call(kind, packed, given, cache, slots[0], out)()
            error = (tq.state.unpack(cache, slots[0]) - exact[1:]).abs()
            limit = 0.5 if form[0] == "int8" else 16.0  # E4M3 is 32 wide below 448
            steps = cache.scales[slots[0].long()] * limit
            steps = steps.repeat_interleave(SIZE // steps.shape[2], 2)
            row["elements_differ"] = int((error > steps * 1.001 + 1e-5).sum())
            row["outputs_largest_difference"] = float((out.float() - want.float()).abs().max() / want.abs().max())
        rows.append(row)
        del cache
    return rows


@triton.jit
def restore_kernel(differ, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Quotients of a code by BLOCK scales of exponent FIRST that are not the IEEE division's."""
    scale = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + (FIRST << 23)).to(tl.float32, bitcast=True)
    value = tl.full([BLOCK], 1.0, tl.float32) * (tl.program_id(1) + 1).to(tl.float32)
    tl.atomic_add(differ, tl.sum((restore_by_division(value, scale, value) != tl.div_rn(value, scale)).to(tl.int64)))


def check_arithmetic() -> list[dict[str, Any]]:
    """INT8's division for every code and mantissa, from the scale of FLT_MAX to the one of 2^-24; then replays."""
    differ, block = torch.zeros(1, dtype=torch.int64, device="cuda"), 2048
    exponents = (5, 6, 64, 127, 157)  # biased; 127 / FLT_MAX is in the first, 127 / 2^-24 in the last
    for exponent in exponents:
        restore_kernel[((1 << 23) // block, 127)](differ, exponent, block)
    made = 127 * (1 << 23) * len(exponents)
    return [
        {"check": "INT8 codes divided by scales, all mantissas at 5 exponents", "made": made, "differ": int(differ)}
    ]


def check_replay() -> list[dict[str, Any]]:
    """A captured call replayed with other slots, padding among them: equal to a call that is not captured?"""
    rows = []
    for code, granularity in FORMS:
        options = {"code": code, "granularity": granularity}
        state = torch.randn(40, HEADS, SIZE, SIZE, device="cuda")
        slots = torch.arange(1, 9, device="cuda", dtype=torch.int32)
        tq.state.qdq_(state, slots, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tq.state.qdq_(state, slots, **options)
        slots.copy_(torch.tensor([17, -1, 0, 30, 17, 39, 40, 9]))
        state.normal_()
        want = state.clone()
        graph.replay()
        tq.state.qdq_(want, torch.tensor([9, 17, 30, 39], device="cuda"), **options)
        made, differ = state.numel(), int((state.view(torch.int32) != want.view(torch.int32)).sum())
        rows.append({"check": f"replay with other slots, {code} {granularity}", "made": made, "differ": differ})
        wrong = tq.state.check(state, slots, quantized=state, **options).column("nonfinite").sum()
        rows.append({"check": f"check of a rounded state, {code} {granularity}", "made": 1, "differ": int(wrong != 0)})
    return rows


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
        bind.tuning = bind.packed_tuning = tuning
        for name, each in calls.items():
            row = {"kernel": name, "batch": batch, **tuning._asdict()}
            try:
                row["us"] = timed(each)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:200]
            rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """A table of qdq_, one of packed states and one of the decode steps, microseconds."""
    table = Table("qdq_", "requests", "tq", "torch chain", "share of bandwidth", "elements differ")
    for row in rows:
        if row.get("kernel") == "qdq_":
            values = row["batch"], row["tq"], row.get("torch"), row["bandwidth_share"], row.get("elements_differ")
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


def main(out: Path | None = None, batches: str = ",".join(map(str, BATCHES)), tune_programs: bool = False) -> None:
    """Measures, checks and writes; with --tune-programs, the best shape of programs for each kernel."""
    console, sizes = Console(), list(map(int, batches.split(",")))
    document = provenance("perf.state") | {
        "bandwidth_bytes_per_s": measured_bandwidth(),
        "launch_floor_us": launch_floor_us(),
        "method": "CUDA-graph replay, slots rotated over 200 MB, median of 12 replays, fp32 states, microseconds",
    }
    if tune_programs:
        rows = [row for batch in sizes for row in tune(batch)]
        write(out or gpu_folder() / "state_tuning.json", document, rows)
        for name in dict.fromkeys((row["kernel"], row["batch"]) for row in rows):
            best = sorted((r for r in rows if (r["kernel"], r["batch"]) == name and "us" in r), key=lambda r: r["us"])
            for row in best[:3]:
                console.print(*row.values())
        return
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
