"""`python -m tq check`: every producer with every scheme against float64, on random and on real activations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

import tq
from tq.bench import timing
from tq.bench.ahead import compile_ahead
from tq.bench.cases import bytes_of, cases, in_turn
from tq.bench.peers import PEERS
from tq.cli import smollm2
from tq.kernels.codes import Code
from tq.kernels.plan import prepare
from tq.kernels.producer import PRODUCERS, Producer
from tq.kernels.rules import ScaleInputs
from tq.kernels.schemes import Scheme

# A y that lies within an fp32 rounding of a bf16 boundary may round to the neighbour of what float64 rounds to, and
# where two roundings follow each other to the one after: 2^-7 of y each, by which the error grows.
BF16_STEPS = 2 * 2.0**-7
# With some eight fp32 roundings of 2^-24 on the way, against 2^-8 from one bf16 boundary to the next, that happens to
# 2^-13 of the elements, and moves the code of 2^-8 of those for each step that the code has.
DIFFERENCES_PER_STEP = 2.0**-21
MEASURED_TOKENS = 8192


class Input(NamedTuple):
    """One call to check. source: where the tensors come from."""

    source: str
    producer: Producer
    form: str
    scheme: str
    arguments: tuple
    options: dict[str, Any]


@dataclass
class Finding:
    """What was found over all calls of one source, producer and scheme.

    worst_ulps: largest |decoded - y| over elements in range, y in float64, in units of the code's spacing. wrong_codes,
    wrong_scales, nonfinite_scales: by the check kernel. differ: codes other than those of the float64 y.
    residual_differ: elements of the new residual other than float64's, rounded once.
    """

    source: str
    producer: str
    scheme: str
    calls: int = 0
    codes: int = 0
    worst_ulps: float = 0.0
    snr_db: float = float("inf")
    wrong_codes: int = 0
    wrong_scales: int = 0
    nonfinite_scales: int = 0
    saturated: int = 0
    differ: int = 0
    residual_differ: int = 0
    time_us: float | None = None
    bandwidth_share: float | None = None
    vllm_us: float | None = None

    @property
    def failures(self) -> list[str]:
        """What is not as it must be."""
        code = tq.SCHEMES[self.scheme].code
        found = {
            "wrong codes": self.wrong_codes,
            "wrong scales": self.wrong_scales,
            "non-finite scales": self.nonfinite_scales,
            "residual differs": self.residual_differ,
            "error too large": self.worst_ulps > 0.5 + BF16_STEPS * code.steps + 1e-5,
            "too many codes differ": self.differ > 3 + self.codes * DIFFERENCES_PER_STEP * code.steps,
        }
        return [name for name, wrong in found.items() if wrong]


def random_inputs(device: torch.device, rows: int) -> Iterator[Input]:
    """Unit-normal activations at the shapes of real models: all of them on a GPU, in turn where kernels are
    interpreted."""
    every = cases(tokens=(rows,))
    for case in every if device.type == "cuda" else in_turn(every):
        torch.manual_seed(0)
        arguments, options = case.arguments(torch.bfloat16, device)
        yield Input("random", case.producer, case.name, case.scheme, arguments, options)


def captured_inputs(device: torch.device, cache: Path | None, tokens: int, console: Console) -> Iterator[Input]:
    """What the producers see inside SmolLM2-135M, with the scales calibrated for its linear layers."""
    sites = smollm2.captured_activations(cache, tokens, report=lambda message: console.print(message, style="dim"))
    for site in sites.values():
        producer = PRODUCERS[site.producer]
        given = [name for name in producer.optional if name in site.kwargs]
        arguments = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in site.args)
        options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in site.kwargs.items()}
        hidden_size = prepare(producer, arguments, "fp8_token", options).plan.hidden_size
        for scheme in tq.SCHEMES.values():
            if not scheme.group or hidden_size % scheme.group == 0:
                form = "+".join([producer.name, *given])
                inputs = inputs_for(scheme, site.scale.to(device))
                yield Input("SmolLM2-135M", producer, form, scheme.name, arguments, {**options, **inputs})


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


def examine(given: Input, finding: Finding) -> None:
    """Runs one call and adds what is found to `finding`."""
    producer, scheme = given.producer, tq.SCHEMES[given.scheme]
    result = producer(*given.arguments, scheme=given.scheme, **given.options)
    activation, side_outputs = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
    report = tq.check(producer, *given.arguments, scheme=given.scheme, activation=activation, **given.options)
    prepared = prepare(producer, given.arguments, given.scheme, given.options)
    truth = producer.reference(*given.arguments, **prepared.options, precision=torch.float64)
    codes, fitted = scheme.reference(truth.y, prepared.inputs)
    ours = activation.data.view(torch.uint8).view(codes.shape)
    zero_points = () if activation.zero_point is None else (activation.zero_point.reshape(-1, 1).double(),)
    stored = (activation.scales().double(), *zero_points)
    finding.worst_ulps = max(finding.worst_ulps, worst_error(scheme, truth.y, ours, stored, prepared.inputs))

    finding.calls += 1
    finding.codes += codes.numel()
    finding.snr_db = min(finding.snr_db, report.snr_db)
    finding.wrong_codes += report.wrong_codes
    finding.wrong_scales += report.wrong_scales
    finding.nonfinite_scales += report.nonfinite_scales
    finding.saturated += report.saturated
    # A scale one unit away moves every tie of its row; such rows are judged by the check kernel and the error.
    same_scale = torch.ones_like(codes, dtype=torch.bool)
    if scheme.dynamic:
        groups = fitted[0].shape[-1]
        same_scale = (fitted[0] == stored[0]).repeat_interleave(codes.shape[-1] // groups, 1)
    finding.differ += int(((codes != ours) & same_scale).sum())
    for ours_side, true_side in zip(side_outputs, truth.side_outputs, strict=True):
        finding.residual_differ += int((ours_side != true_side).sum())


def measure(finding: Finding) -> None:
    """Adds device time for many tokens of the last size, the share of the bandwidth, and vLLM's op."""
    candidates = cases(tokens=(MEASURED_TOKENS,))
    case = [c for c in candidates if (c.name, c.scheme) == (finding.producer, finding.scheme)][-1]
    first = case.prepare(torch.bfloat16, "cuda")
    copies = timing.copies_of(bytes_of(first))
    sets = [first, *(case.prepare(torch.bfloat16, "cuda") for _ in range(copies - 1))]
    for name in ("tq", "vllm"):
        peers = [PEERS[name](prepared) for prepared in sets]
        if peers[0] is None:
            continue
        time_us, _ = timing.device_time_us([peer.call for peer in peers if peer is not None])
        if name == "vllm":
            finding.vllm_us = time_us
        else:
            finding.time_us = time_us
            finding.bandwidth_share = bytes_of(first) / time_us * 1e6 / timing.measured_bandwidth()


def show_matrix(console: Console, title: str, findings: list[Finding], cell: Callable[[list[Finding]], str]) -> None:
    """A line for each scheme, a column for each producer, as many side by side as the console has room for."""
    of_pair: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        of_pair.setdefault((finding.scheme, finding.producer), []).append(finding)
    producers = list(dict.fromkeys(producer for _, producer in of_pair))
    schemes = [name for name in tq.SCHEMES if any(name == scheme for scheme, _ in of_pair)]
    room = max((console.width - 22) // 9, 1)
    for i in range(0, len(producers), room):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title if i == 0 else None, title_justify="left")
        table.add_column("scheme", no_wrap=True)
        for producer in producers[i : i + room]:
            header = producer.replace("_", "_\n").replace("+", "\n+")
            table.add_column(header, justify="right", no_wrap=True, min_width=8)
        for scheme in schemes:
            cells = []
            for producer in producers[i : i + room]:
                found = of_pair.get((scheme, producer), [])
                bad = any(finding.failures for finding in found)
                cells.append(Text(cell(found) if found else "", style="red" if bad else ""))
            table.add_row(scheme, *cells)
        console.print(table)


def show(console: Console, findings: list[Finding]) -> None:
    """The tables."""
    for source in dict.fromkeys(finding.source for finding in findings):
        of_source = [finding for finding in findings if finding.source == source]
        title = f"Worst error on {source} activations, in units of the code's spacing (0.5: perfect)"
        show_matrix(console, title, of_source, lambda found: f"{max(f.worst_ulps for f in found):.3f}")
    timed = [finding for finding in findings if finding.time_us]
    if timed:
        show_matrix(
            console,
            f"Microseconds for {MEASURED_TOKENS} tokens, and the share of the memory bandwidth",
            timed,
            lambda found: f"{found[0].time_us:.0f} {100 * (found[0].bandwidth_share or 0):.0f}%",
        )
    compared = [finding for finding in timed if finding.vllm_us]
    if compared:
        show_matrix(
            console,
            "Times faster than vLLM's op, or its two",
            compared,
            lambda found: f"{(found[0].vllm_us or 0) / (found[0].time_us or 1):.2f}",
        )
    wrong = sum(f.wrong_codes + f.wrong_scales + f.nonfinite_scales + f.residual_differ for f in findings)
    console.print(
        f"{sum(f.codes for f in findings):,} bytes of codes in {sum(f.calls for f in findings)} calls: {wrong} codes, "
        f"scales or residuals wrong; {sum(f.differ for f in findings)} differ from float64's, where fp32 and float64 "
        f"round y to different bf16 values",
        style="dim",
    )
    for f in findings:
        if f.failures:
            console.print(f"FAILED {f.producer} {f.scheme} {f.source}: {', '.join(f.failures)}", style="bold red")


def check(
    tokens: Annotated[int, typer.Option(help="Tokens per call.")] = 0,
    producers: Annotated[str, typer.Option(help="Producers to check, comma-separated; default all.")] = "",
    schemes: Annotated[str, typer.Option(help="Schemes to check, comma-separated; default all.")] = "",
    model: Annotated[bool, typer.Option(help="Include activations captured from SmolLM2-135M.")] = True,
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
    inputs = list(random_inputs(device, tokens))
    if model:
        inputs += captured_inputs(device, cache, tokens, console)
    inputs = [
        given
        for given in inputs
        if (not producers or given.producer.name in producers.split(","))
        and (not schemes or given.scheme in schemes.split(","))
    ]
    if device.type == "cuda":
        wanted = {(given.form, given.scheme) for given in inputs}
        with console.status("compiling"):
            compile_ahead([case for case in cases((tokens,)) if (case.name, case.scheme) in wanted], checks=True)
    findings: dict[tuple[str, str, str], Finding] = {}
    for given in track(inputs, "checking", console=console, transient=True):
        key = (given.form, given.scheme, given.source)
        examine(given, findings.setdefault(key, Finding(given.source, given.form, given.scheme)))
    ordered = [findings[key] for key in sorted(findings, key=lambda key: (key[0], key[1]))]
    if device.type == "cuda":
        for finding in track([f for f in ordered if f.source == "random"], "timing", console=console, transient=True):
            measure(finding)
    show(console, ordered)
    failed = any(finding.failures for finding in ordered)
    if json_path is not None:
        document = {"device": str(device), "failed": failed, "findings": [asdict(f) for f in ordered]}
        text = json.dumps(document, indent=1)
        sys.stdout.write(text + "\n") if json_path == "-" else Path(json_path).write_text(text + "\n")
    raise typer.Exit(1 if failed else 0)
