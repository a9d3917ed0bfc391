"""`python -m tq check`: every producer with every scheme against float64, on random and on real activations."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import track

import tq
from tq.bench import timing
from tq.bench.ahead import Description, case_of, compile_one, describe, in_processes
from tq.bench.cases import Case, bytes_of, cases, in_turn
from tq.bench.peers import PEERS
from tq.cli import smollm2
from tq.cli.findings import Finding, show
from tq.kernels.codes import Code
from tq.kernels.plan import prepare
from tq.kernels.producer import PRODUCERS
from tq.kernels.rules import ScaleInputs
from tq.kernels.schemes import Scheme

MEASURED_TOKENS = 8192
REPLAYS = 4  # of one time: there are many


class Call(NamedTuple):
    """One call to check, by names, so that another process can make it. source: where the tensors come from. site:
    of captured ones; cache: where those are. timed: the call whose time is measured afterwards."""

    source: str
    described: Description
    device: str
    site: str = ""
    cache: Path | None = None
    timed: Description | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Calls of one key are one finding."""
        return self.source, case_of(self.described).name, self.described.scheme


@lru_cache
def captured(cache: Path | None, tokens: int) -> dict[str, smollm2.CapturedSite]:
    """What the producers see inside SmolLM2-135M, with the scales calibrated for its linear layers."""
    return smollm2.captured_activations(cache, tokens, report=lambda message: Console(stderr=True).print(message))


def captured_calls(device: str, cache: Path | None, tokens: int) -> Iterator[Call]:
    """Every captured activation with every scheme."""
    for name, site in captured(cache, tokens).items():
        producer = PRODUCERS[site.producer]
        left_out = tuple(option for option in producer.optional if option not in site.kwargs)
        plan = prepare(producer, site.args, "fp8_token", site.kwargs).plan
        for scheme in tq.SCHEMES.values():
            if not scheme.group or plan.hidden_size % scheme.group == 0:
                case = Case(producer, left_out, scheme.name, plan.rows, plan.hidden_size)
                yield Call("SmolLM2-135M", describe(case), device, name, cache)


def arguments_of(call: Call) -> tuple[tuple, dict[str, Any]]:
    """Unit-normal activations, the same at each call; or captured ones."""
    case, device = case_of(call.described), torch.device(call.device)
    if not call.site:
        torch.manual_seed(0)
        return case.arguments(torch.bfloat16, device)
    site = captured(call.cache, case.rows)[call.site]
    arguments = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in site.args)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in site.kwargs.items()}
    return arguments, options | inputs_for(tq.SCHEMES[case.scheme], site.scale.to(device))


def inputs_for(scheme: Scheme, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the scheme needs, for activations whose largest value is 448 times the calibrated `scale`."""
    amax = 448.0 * scale
    known = {
        "scale": amax / scheme.code.max,
        "zero_point": torch.zeros(1, dtype=torch.int32, device=scale.device),
        "global_scale_inv": 448.0 * scheme.code.max / amax,
    }
    return {name: known[name] for name in scheme.rule.needs}


def worst_error(
    scheme: Scheme, y: torch.Tensor, codes: torch.Tensor, fitted: tuple[torch.Tensor, ...], inputs: ScaleInputs
) -> float:
    """Largest distance, in float64, of a code's value from where y lies between the values of codes, in units of their
    spacing there; of elements in range, half a spacing beyond it included."""
    code, nothing = scheme.code, torch.zeros_like(fitted[0])
    # What one step of the code stands for.
    unit = scheme.rule.reference_value(nothing + 1.0, (fitted[0], nothing), inputs)
    size = y.shape[-1] // unit.shape[-1]
    place = y / unit.repeat_interleave(size, 1)
    if len(fitted) > 1:
        place = place + fitted[1]
    low, high = ends_of(code, y.device)
    smallest = float(code.reference_decode(torch.ones(1, dtype=torch.uint8, device=y.device))[0])
    spacing = torch.full_like(place, smallest)
    if code.mantissa_bits:
        spacing = torch.exp2(torch.floor(torch.log2(place.abs())) - code.mantissa_bits).clamp(min=smallest)
    error = (code.reference_decode(codes).double() - place).abs() / spacing
    inside = (place >= low - 0.5 * spacing) & (place <= high + 0.5 * spacing)
    return float(torch.where(inside, error, 0.0).max())


@lru_cache
def ends_of(code: Code, device: torch.device) -> tuple[float, float]:
    """The lowest and the highest value of a code that is used."""
    ends = code.reference_decode(code.reference_encode(torch.tensor([-1e30, 1e30], device=device)))
    return float(ends[0]), float(ends[1])


def examine(call: Call) -> Finding:
    """Runs one call and its check, beside float64; and once what is timed, so that it is compiled."""
    case = case_of(call.described)
    producer, scheme = case.producer, tq.SCHEMES[case.scheme]
    arguments, options = arguments_of(call)
    result = producer(*arguments, scheme=scheme.name, **options)
    activation, side_outputs = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
    report = tq.check(producer, *arguments, scheme=scheme.name, activation=activation, **options)
    prepared = prepare(producer, arguments, scheme.name, options)
    truth = producer.reference(*arguments, **prepared.options, precision=torch.float64)
    codes, fitted = scheme.reference(truth.y, prepared.inputs)
    ours = activation.data.view(torch.uint8).view(codes.shape)
    zero_points = () if activation.zero_point is None else (activation.zero_point.reshape(-1, 1).double(),)
    stored = (activation.scales().double(), *zero_points)
    # A scale one unit away moves every tie of its row; such rows are judged by the check kernel and the error.
    same_scale = torch.ones_like(codes, dtype=torch.bool)
    if scheme.dynamic:
        groups = fitted[0].shape[-1]
        same_scale = (fitted[0] == stored[0]).repeat_interleave(codes.shape[-1] // groups, 1)
    found = Finding(
        *call.key,
        calls=1,
        codes=codes.numel(),
        worst_ulps=worst_error(scheme, truth.y, ours, stored, prepared.inputs),
        snr_db=report.snr_db,
        wrong_codes=report.wrong_codes,
        wrong_scales=report.wrong_scales,
        nonfinite_scales=report.nonfinite_scales,
        saturated=report.saturated,
        differ=int(((codes != ours) & same_scale).sum()),
        residual_differ=sum(int((a != b).sum()) for a, b in zip(side_outputs, truth.side_outputs, strict=True)),
    )
    if call.timed is not None:
        compile_one(call.timed)
    if arguments[0].is_cuda:
        torch.cuda.empty_cache()  # many processes share the memory
    return found


def measure(case: Case, finding: Finding) -> None:
    """Adds device time, the share of the bandwidth, and vLLM's op."""
    first = case.prepare(torch.bfloat16, "cuda")
    copies = timing.copies_of(bytes_of(first))
    sets = [first, *(case.prepare(torch.bfloat16, "cuda") for _ in range(copies - 1))]
    for name in ("tq", "vllm"):
        peers = [PEERS[name](prepared) for prepared in sets]
        if peers[0] is None:
            continue
        time_us, _ = timing.device_time_us([peer.call for peer in peers if peer is not None], REPLAYS)
        if name == "vllm":
            finding.vllm_us = time_us
        else:
            finding.time_us = time_us
            finding.bandwidth_share = bytes_of(first) / time_us * 1e6 / timing.measured_bandwidth()


def check(
    tokens: Annotated[int, typer.Option(help="Tokens per call.")] = 0,
    producers: Annotated[str, typer.Option(help="Producers to check, comma-separated; default all.")] = "",
    schemes: Annotated[str, typer.Option(help="Schemes to check, comma-separated; default all.")] = "",
    model: Annotated[bool, typer.Option(help="Include activations captured from SmolLM2-135M.")] = True,
    every_size: Annotated[bool, typer.Option(help="Check each pair at every size, not at one.")] = False,
    cache: Annotated[Path | None, typer.Option(help="Folder for the model; default $TQ_CACHE or ~/.cache/tq.")] = None,
    json_path: Annotated[
        str | None, typer.Option("--json", help="Write the findings to a file, or - for stdout.")
    ] = None,
) -> None:
    """Check every producer with every scheme against float64; exit non-zero on any failure.

    On the shapes of real models with random activations, and on activations captured from SmolLM2-135M. On a GPU, also
    time, share of the measured bandwidth, and vLLM's op where it is installed.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = tokens or (401 if device.type == "cuda" else 12)
    console = Console(stderr=json_path == "-")
    if not console.is_terminal:
        console.width = 120

    def chosen(case: Case) -> bool:
        named = not producers or case.producer.name in producers.split(",")
        return named and (not schemes or case.scheme in schemes.split(","))

    on_gpu, every = device.type == "cuda", list(filter(chosen, cases((tokens,))))
    # Of each pair the largest size is timed: the others come before it. Unless asked for more, it is the one checked on
    # a GPU, where compiling takes longest.
    largest = {(case.name, case.scheme): case for case in every}
    timed = {pair: case._replace(rows=MEASURED_TOKENS) for pair, case in largest.items() if on_gpu}
    calls = [
        Call("random", describe(case), str(device), timed=describe(timed[case.name, case.scheme]) if on_gpu else None)
        for case in (every if every_size else largest.values() if on_gpu else in_turn(every))
    ]
    if model:
        console.print("captured activations of SmolLM2-135M", style="dim")
        calls += [call for call in captured_calls(str(device), cache, tokens) if chosen(case_of(call.described))]
    # What takes longest to compile comes first: nothing then waits for it alone.
    calls.sort(key=lambda call: on_gpu and not PRODUCERS[call.described.producer].moments)
    findings = {call.key: Finding(*call.key) for call in calls}
    examined = in_processes(examine, calls) if on_gpu else map(examine, calls)
    began = time.monotonic()
    for found in track(examined, "checking", len(calls), console=console, transient=True):
        findings[found.key].add(found)
    console.print(f"{len(calls)} calls checked in {time.monotonic() - began:.0f} s", style="dim")
    for pair, case in track(timed.items(), "timing", console=console, transient=True):
        measure(case, findings[("random", *pair)])
    ordered = [findings[key] for key in sorted(findings, key=lambda key: key[1:])]
    show(console, ordered, MEASURED_TOKENS)
    failed = any(finding.failures for finding in ordered)
    if json_path is not None:
        document = {"device": str(device), "failed": failed, "findings": [asdict(f) for f in ordered]}
        text = json.dumps(document, indent=1)
        sys.stdout.write(text + "\n") if json_path == "-" else Path(json_path).write_text(text + "\n")
    raise typer.Exit(1 if failed else 0)
