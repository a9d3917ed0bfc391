"""`python -m tq check`: every producer with every scheme against float64, on random and on real activations."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tq
from tq.bench import timing
from tq.bench.ahead import compile_ahead
from tq.bench.cases import bytes_of, cases
from tq.bench.peers import PEERS
from tq.cli import smollm2
from tq.kernels.plan import prepare
from tq.kernels.producer import PRODUCERS, Producer

# A y that lies within an fp32 rounding of a bf16 boundary may round to the neighbour of what float64 rounds to, and
# where two roundings follow each other to the one after: 2^-7 of y each. It moves the error by that much, and the code
# in about one element of 10^5.
BF16_STEPS = 2 * 2.0**-7
CODES_PER_DIFFERENCE = 10**5
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
        found = {
            "wrong codes": self.wrong_codes,
            "wrong scales": self.wrong_scales,
            "non-finite scales": self.nonfinite_scales,
            "residual differs": self.residual_differ,
            "error too large": self.worst_ulps > 0.5 + BF16_STEPS * tq.SCHEMES[self.scheme].code.steps + 1e-5,
            "too many codes differ": self.differ > -(-self.codes // CODES_PER_DIFFERENCE),
        }
        return [name for name, wrong in found.items() if wrong]


def random_inputs(device: torch.device, rows: int) -> Iterator[Input]:
    """Unit-normal activations at the shapes of real models."""
    for case in cases(tokens=(rows,)):
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
                scale = {} if scheme.dynamic else {"scale": site.scale.to(device)}
                form = "+".join([producer.name, *given])
                yield Input("SmolLM2-135M", producer, form, scheme.name, arguments, {**options, **scale})


def examine(given: Input, finding: Finding) -> None:
    """Runs one call and adds what is found to `finding`."""
    producer, scheme = given.producer, tq.SCHEMES[given.scheme]
    result = producer(*given.arguments, scheme=given.scheme, **given.options)
    activation, side_outputs = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
    report = tq.check(producer, *given.arguments, scheme=given.scheme, activation=activation, **given.options)
    prepared = prepare(producer, given.arguments, given.scheme, given.options)
    truth = producer.reference(*given.arguments, **prepared.options, precision=torch.float64)
    codes, scales = scheme.reference(truth.y, prepared.inputs)
    ours = activation.data.view(torch.uint8).view(codes.shape)

    size = scheme.group or codes.shape[-1]
    scale = activation.scales()
    scale = scale.double().repeat_interleave(size, 1) if scheme.dynamic else scale.double()
    quotient = (truth.y / scale).abs()
    spacing = torch.exp2(torch.floor(torch.log2(quotient.clamp(min=2.0**-6))) - 3)
    decoded = scheme.code.reference_decode(ours).double() * scale
    inside = quotient <= scheme.code.max + 0.5 * spacing
    worst = float(torch.where(inside, (decoded - truth.y).abs() / (spacing * scale), 0.0).max())

    finding.calls += 1
    finding.codes += codes.numel()
    finding.worst_ulps = max(finding.worst_ulps, worst)
    finding.snr_db = min(finding.snr_db, report.snr_db)
    finding.wrong_codes += report.wrong_codes
    finding.wrong_scales += report.wrong_scales
    finding.nonfinite_scales += report.nonfinite_scales
    finding.saturated += report.saturated
    # A scale one unit away moves every tie of its row; such rows are judged by the check kernel and the error.
    same_scale = torch.ones_like(codes, dtype=torch.bool)
    if scheme.dynamic:
        same_scale = (scales == activation.scales()).repeat_interleave(size, 1)
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


def show(console: Console, findings: list[Finding]) -> None:
    """The table."""
    timed = any(finding.time_us for finding in findings)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("producer", "scheme", "activations"):
        table.add_column(name, no_wrap=True)
    for name in ("codes", "worst", "SNR", "differ", "wrong", *(("time", "bandwidth", "vLLM") if timed else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for f in findings:
        cells = [f.producer, f.scheme, f.source, f"{f.codes:,}", f"{f.worst_ulps:.3f}", f"{f.snr_db:.1f}"]
        cells += [str(f.differ), str(f.wrong_codes + f.wrong_scales + f.nonfinite_scales + f.residual_differ)]
        if timed:
            cells.append("" if f.time_us is None else f"{f.time_us:.1f} us")
            cells.append("" if f.bandwidth_share is None else f"{100 * f.bandwidth_share:.0f} %")
            cells.append("" if not f.vllm_us or not f.time_us else f"{f.vllm_us / f.time_us:.2f} x")
        table.add_row(*cells, style="red" if f.failures else "")
    console.print(table)
    console.print(
        "worst: largest error of a code in range against float64, in units of the code's spacing (0.5: perfect)\n"
        "SNR: in dB. differ: codes other than float64's, where fp32 and float64 round y to different bf16 values\n"
        "wrong: codes, scales or residuals that are not what the kernel's own y demands",
        style="dim",
    )
    for f in findings:
        if f.failures:
            console.print(f"FAILED {f.producer} {f.scheme} {f.source}: {', '.join(f.failures)}", style="bold red")


def check(
    tokens: Annotated[int, typer.Option(help="Tokens per call.")] = 0,
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
    tokens = tokens or (401 if device.type == "cuda" else 32)
    console = Console(stderr=json_path == "-")
    if not console.is_terminal:
        console.width = 120
    if device.type == "cuda":
        with console.status("compiling"):
            compile_ahead(list(cases((tokens,))), checks=True)
    inputs = list(random_inputs(device, tokens))
    if model:
        inputs += captured_inputs(device, cache, tokens, console)
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
