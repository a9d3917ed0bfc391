"""Checks on a GPU what cannot be checked without one, and writes what was found as data.

    python -m perf.verify [--out perf/results/<gpu>/verify.json]

Every producer with every scheme against torch; every layout and dtype in turn; the arithmetic over all mantissas;
vLLM's quantizers where vLLM is installed; CUDA-graph capture with cold and warm kernels; tensors of more than 2^31
elements; the template kernels under compute-sanitizer where it is installed. Exits non-zero on any failure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer

import tq
from perf.arithmetic import divisions, encoders, scale_rules
from perf.provenance import gpu_folder, provenance, write
from tq.bench.cases import static_inputs
from tq.bench.peers import QUANTIZERS, vllm_library, vllm_peer
from tq.kernels.plan import prepare

TOKENS = (0, 1, 7, 33, 128, 129, 4096)
SIZES = (576, 4096, 5120)
DTYPES = ("bfloat16", "float16", "float32")


class Combination(NamedTuple):
    """One kernel, to be tried with every number of tokens."""

    producer: str
    scheme: str
    layout: str
    dtype: str
    hidden_size: int


def combinations(every_size: Sequence[int]) -> Iterator[Combination]:
    """Every producer and scheme at every size in bf16; every layout and other dtype with a producer in turn."""
    producers = list(tq.PRODUCERS)
    for scheme in tq.SCHEMES.values():
        sizes = [size for size in every_size if not scheme.group or size % scheme.group == 0]
        for size in sizes:
            for producer in producers:
                yield Combination(producer, scheme.name, scheme.layouts[0].name, "bfloat16", size)
        for i, layout in enumerate(scheme.layouts):
            for j, dtype in enumerate(DTYPES):
                if i or j:
                    producer = producers[(3 * i + j + len(scheme.name)) % len(producers)]
                    yield Combination(producer, scheme.name, layout.name, dtype, sizes[(i + j) % len(sizes)])


def against_reference(combination: Combination) -> dict[str, Any]:
    """What differs from torch and what the check finds, over all numbers of tokens."""
    producer, scheme = tq.PRODUCERS[combination.producer], tq.SCHEMES[combination.scheme]
    row: dict[str, Any] = {**combination._asdict(), "tokens": TOKENS, "codes": 0, "codes_differ": 0, "scales_differ": 0}
    row |= {"side_outputs_differ": 0, "wrong": 0, "worst_ulps": 0.0}
    for tokens in TOKENS:
        torch.manual_seed(tokens + combination.hidden_size)
        dtype = getattr(torch, combination.dtype)
        arguments, options = producer.example(tokens, combination.hidden_size, dtype, "cuda")  # type: ignore[misc]
        options |= {"layout": combination.layout, "scheme": scheme.name} | static_inputs(scheme.name, "cuda")
        ours = outputs(producer(*arguments, **options))
        with tq.use_reference():
            theirs = outputs(producer(*arguments, **options))
        report = tq.check(producer, *arguments, activation=ours[0], **options)
        row["codes"] += ours[0].data.numel()
        row["codes_differ"] += different(ours[0].data, theirs[0].data)
        row["scales_differ"] += different(ours[0].scale, theirs[0].scale)
        row["side_outputs_differ"] += sum(different(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))
        row["wrong"] += report.wrong_codes + report.wrong_scales + report.nonfinite_scales
        row["worst_ulps"] = max(row["worst_ulps"], round(report.worst_ulps, 6))
    return row


def outputs(made: Any) -> tuple:
    return made if isinstance(made, tuple) else (made,)


def different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bytes differ."""
    if a.element_size() == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return int((a != b).sum())


def against_vllm() -> list[dict[str, Any]]:
    """Codes and scales in which the identity differs from vLLM's quantizers, on 2^24 values of many magnitudes."""
    rows: list[dict[str, Any]] = []
    if vllm_library() is None:
        return rows
    x = torch.randn(4096, 4096, device="cuda") * torch.logspace(-3, 3, 4096, device="cuda").unsqueeze(-1)
    for scheme in tq.SCHEMES.values():
        if scheme.quantizer not in QUANTIZERS:
            continue
        prepared = prepare(tq.PRODUCERS["quantize"], (x.bfloat16(),), scheme.name, static_inputs(scheme.name, "cuda"))
        theirs = vllm_peer(prepared)
        if theirs is None:
            continue
        theirs.call()
        codes, scales, _ = theirs.outputs()
        ours = tq.quantize(x.bfloat16(), scheme=scheme.name, **static_inputs(scheme.name, "cuda"))
        differ = different(ours.data, codes) + (
            0 if scales is None else different(ours.scale, scales.view_as(ours.scale))
        )
        rows.append({"check": f"{scheme.name} against vLLM's {scheme.quantizer}", "made": x.numel(), "differ": differ})
    return rows


def capture() -> list[dict[str, Any]]:
    """First call inside a graph capture, and replay on other values: equal to eager calls?"""
    rows = []
    pairs = [(name, "fp8_token") for name in tq.PRODUCERS] + [("quantize", name) for name in tq.SCHEMES]
    for name, scheme in dict.fromkeys(pairs):
        producer = tq.PRODUCERS[name]
        arguments, options = producer.example(7, 1024, torch.bfloat16, "cuda")  # type: ignore[misc]
        options |= {"scheme": scheme} | static_inputs(scheme, "cuda")
        for state in ("cold", "warm"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = outputs(producer(*arguments, **options))
            differ = 0
            for _ in range(2):
                graph.replay()
                eager = outputs(producer(*arguments, **options))
                differ += different(captured[0].data, eager[0].data)
                arguments[0].copy_(torch.randn_like(arguments[0]))
            rows.append({"check": f"graph capture, {state}: {name} {scheme}", "differ": differ})
    return rows


def large() -> list[dict[str, Any]]:
    """First and last row of tensors whose offsets leave 32 bits: equal to the row alone? The rows between are zero."""
    rows = []
    for name, tokens, columns in (
        ("silu_mul", 61682, 2 * 17408),
        ("quantize", 70000, 32768),
        ("rms_norm", 70000, 32768),
    ):
        x = torch.zeros(tokens, columns, dtype=torch.bfloat16, device="cuda")
        x[0], x[-1] = torch.randn(2, columns, device="cuda").bfloat16()
        rest = (torch.ones(columns, device="cuda", dtype=torch.bfloat16), 1e-6) if name == "rms_norm" else ()
        for scheme in ("fp8_tensor", "fp8_token", "fp8_group128", "fp8_group128_ue8m0", "mxfp8", "nvfp4"):
            inputs, producer = static_inputs(scheme, "cuda"), tq.PRODUCERS[name]
            made = producer(x, *rest, scheme=scheme, **inputs)
            data, scales, differ = made.data.view(torch.uint8), made.scales(), 0
            for row in (0, tokens - 1):
                alone = producer(x[row : row + 1], *rest, scheme=scheme, **inputs)
                differ += different(data[row : row + 1], alone.data.view(torch.uint8))
                if made.scale.numel() > 1:
                    differ += different(scales[row : row + 1], alone.scales())
            differ += int(data[1:-1].count_nonzero())
            rows.append({"check": f"{x.numel()} elements: {name} {scheme}", "differ": differ})
    return rows


TEMPLATES = (("fp8_tensor", "row_major"), ("int8_token_azp", "row_major"), ("fp8_group128_ue8m0", "packed"))
TEMPLATES += (("nvfp4", "swizzled_128x4"), ("mxfp8", "swizzled_8x4"), ("fp8_group128", "tma_aligned"))


def templates() -> list[dict[str, Any]]:
    """One small run of every template, with schemes of every kind of code, scale and layout, for the sanitizer."""
    for scheme, layout in TEMPLATES:
        x, more = torch.randn(5, 384, device="cuda").bfloat16(), static_inputs(scheme, "cuda")
        tq.check("quantize", x, scheme=scheme, layout=layout, **more)
    weight, counts = torch.ones(384, device="cuda"), torch.tensor([3, 0], device="cuda")
    tq.rms_norm(x, weight, residual=x, scheme="nvfp4", **static_inputs("nvfp4", "cuda"))
    x = torch.randn(2, 4, 768, device="cuda")
    tq.silu_mul(x, scheme="mxfp8", tokens_per_expert=counts, return_unquantized=True)
    torch.cuda.synchronize()
    return []


def matrix(sizes: Sequence[int], first: int, step: int) -> Iterator[dict[str, Any]]:
    """A share of the combinations."""
    return map(against_reference, islice(combinations(sizes), first, None, step))


def wrong(row: dict[str, Any]) -> bool:
    """Exact where y is: identity and residual. Elsewhere y may differ in its last bit, and a code in 10^5 with it."""
    if "check" in row:
        return row["differ"] != 0
    allowed = 0 if row["producer"] == "quantize" else 2 + row["codes"] // 10**5
    rounding = 8 * 2.0**-24 * tq.SCHEMES[row["scheme"]].code.steps  # of the quotient and the decoded product
    exact = row["wrong"] == 0 and row["side_outputs_differ"] == 0 and row["worst_ulps"] <= 0.5 + rounding + 1e-6
    return not exact or row["codes_differ"] > allowed


def parts(sizes: Sequence[int] = SIZES) -> dict[str, Callable[[], Iterable[dict[str, Any]]]]:
    """What is run, each in a process of its own: most of the time is compilation."""
    count = min(os.cpu_count() or 1, 16)
    shares = {f"matrix {i} of {count}": partial(matrix, sizes, i, count) for i in range(count)}
    others = (encoders, divisions, scale_rules, capture, large, against_vllm)
    return {part.__name__: part for part in others} | shares


def start(part: str, sizes: str, *prefix: str) -> subprocess.Popen:
    """A process for one part."""
    command = [*prefix, sys.executable, "-m", "perf.verify", "--part", part, "--sizes", sizes]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main(
    out: Path | None = None,
    part: str = "",
    sizes: str = ",".join(map(str, SIZES)),
    sanitizer: bool = True,
    limit_s: int = 3600,
) -> None:
    """Runs everything, no longer than `limit_s`; `part` is for the processes it starts."""
    if part:
        chosen = {"templates": templates, **parts(tuple(map(int, sizes.split(","))))}[part]
        for row in chosen():
            print(json.dumps(row), flush=True)
        return
    began = time.monotonic()
    tools = ("memcheck", "racecheck") if sanitizer and shutil.which("compute-sanitizer") else ()
    running = {name: start(name, sizes) for name in parts()}
    checked = {
        f"compute-sanitizer {tool}": start(
            "templates", sizes, "compute-sanitizer", "--tool", tool, "--error-exitcode", "9"
        )
        for tool in tools
    }
    rows: list[dict[str, Any]] = []
    for name, process in {**running, **checked}.items():
        try:
            output, errors = process.communicate(timeout=max(began + limit_s - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            process.returncode = process.returncode or 1
        if name in running:
            rows += [json.loads(line) for line in output.splitlines() if line.endswith("}")]
        if name in checked or process.returncode:
            rows.append({"check": f"{name} ran to its end", "differ": process.returncode})
            print(name, *output.splitlines()[-2:], errors[-1000:], sep="\n")
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    failures = [row for row in rows if wrong(row)]
    document = provenance("perf.verify") | {"checks": len(rows), "failures": len(failures)}
    write(out or gpu_folder() / "verify.json", document, rows)
    for row in failures:
        print("FAILED", json.dumps(row))
    print(f"{len(rows)} checks, {len(failures)} failures")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
