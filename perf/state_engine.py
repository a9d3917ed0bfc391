"""vLLM on a GPU with hybrid models, with states as they are, rounded and packed: agreement, what is rounded, and speed.

    python -m perf.state_engine [MODELS] [--engines NAMES] [--limit-s 220] [--out perf/results/<gpu>/state_engine.json]

Random weights (`perf.state_checkpoints`), greedy, token ids in and out. All engines start together, forked from a
process that has imported vLLM, share the caches of compilers, and are timed by turns, those of a model on one GPU.
Prompts are longer than a step may be, so that they are continued and meet decodes of others. What must hold: a run
repeats itself; without a recipe nothing differs from a run without the plugin; captured graphs give what eager steps of
the same kernels give; in watched engines every state that a call reads is rounded as ModelOpt rounds it, and nothing
else in the cache changes; a page of packed states is at most 0.35 of one of fp32. The file is written as rows come.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_KIMI_K3_GEMM_AR", "0")  # these want CUTLASS in Python
os.environ.setdefault("VLLM_ENABLE_GEMM_RS", "0")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # CUDA starts in engines, not before them
os.environ.setdefault("OMP_NUM_THREADS", "1")  # nor do threads

import torch
import typer

from perf.provenance import gpu_folder, provenance, write
from perf.state_checkpoints import MODELS, write_checkpoint
from perf.state_process import CACHE, NEW_TOKENS, Plan, import_vllm, one_engine
from perf.state_verdict import ENGINES, FIRST, Engine, failures


def runs(model: str, engine: Engine, gpus: int) -> bool:
    """vLLM 0.33's layer of Kimi-Linear has fp32 states, whatever is asked for. Of its engines, one takes two GPUs."""
    if model == "kimi_linear" and (engine.state != "float32" or (engine.gpus > 1 and engine.recipe != "packed")):
        return False
    return engine.gpus <= max(gpus, 1)


def prepare(model: str, folder: Path) -> None:
    """Writes a checkpoint, and lets vLLM look at the class of the model, which it remembers in a file. It would do so
    in a process of its own, with one more import of vLLM; this is such a process."""
    write_checkpoint(model, folder)
    from vllm import ModelRegistry
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    ModelRegistry.models[name].inspect_model_cls()


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(...) in a process of its own, so that CUDA does not start in this one."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def way_to_start() -> Any:
    """fork, unless something that was imported has started CUDA."""
    if torch.cuda.is_available():
        try:
            apart(torch.cuda.init)
        except RuntimeError:
            return multiprocessing.get_context("spawn")
    return multiprocessing.get_context("fork")


class Running:
    """Engines in their processes, and the rows of what they have found so far."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.context = plan, way_to_start()
        self.processes: dict[str, Any] = {}

    def start(self, model: str, engine: Engine, gpu: int | None, options: dict[str, Any]) -> None:
        given = model, engine, gpu, self.plan, options
        self.processes[f"{model}.{engine.name}"] = process = self.context.Process(target=one_engine, args=given)
        process.start()

    def busy(self) -> bool:
        """Whether one is alive; one that ended is not waited for."""
        for name, process in self.processes.items():
            if not process.is_alive() and ENGINES[name.split(".")[1]].timed:
                (self.plan.folder / f"{name}.ready").touch()
        return any(process.is_alive() for process in self.processes.values())

    def stop(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()

    def rows(self) -> list[dict[str, Any]]:
        rows = []
        for name, process in self.processes.items():
            path, (model, engine) = self.plan.folder / f"{name}.json", name.split(".")
            row = json.loads(path.read_text()) if path.exists() else {"model": model, "engine": engine}
            if process.exitcode is not None and process.exitcode > 0:
                row["error"] = last_error((self.plan.folder / f"{name}.log").read_text())
            rows.append(row)
        return rows


def last_error(log: str) -> str:
    """What was raised last, as far as a log shows it."""
    lines = log.strip().splitlines() or ["nothing"]
    return [lines[-1], *(line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line))][-1][:300]


def all_engines(
    models: list[str],
    engines: list[Engine],
    seconds: float,
    found: Callable[[list[dict[str, Any]]], None],
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    """A row an engine; `found` is told of them now and then. options: of LLM."""
    folder, begin, gpus = Path(tempfile.mkdtemp()), time.time(), torch.cuda.device_count()

    def log(what: str) -> None:
        print(f"{time.time() - begin:6.1f} s  {what}", flush=True)

    with multiprocessing.get_context("fork").Pool(len(models)) as pool:
        prepared = pool.starmap_async(prepare, [(model, folder / model) for model in models])
        import_vllm()
        log("vLLM imported")
        prepared.get(seconds)
        log(f"checkpoints written, {folder}")
    chosen = [(model, engine) for engine in engines for model in models if runs(model, engine, gpus)]
    timed = sum(engine.timed for _, engine in chosen)
    end = begin + seconds
    plan = Plan(folder, timed, begin, end - 0.38 * seconds, end - 0.16 * seconds, end - 0.04 * seconds)
    running = Running(plan)
    for model, engine in chosen:
        gpu = models.index(model) % gpus if gpus and engine.gpus == 1 else None
        running.start(model, engine, gpu, options)
    log(f"{len(chosen)} engines by {running.context.get_start_method()}, {gpus} GPUs")
    told = 0.0
    while running.busy() and time.time() < end:
        if time.time() - told > 5:
            rows, told = running.rows(), time.time()
            found(rows)
            log(stages(rows))
        time.sleep(0.2)
    running.stop()
    rows = running.rows()
    found(rows)
    log(stages(rows))
    return rows


def stages(rows: list[dict[str, Any]]) -> str:
    """How many engines have come how far."""
    last = ["error" if "error" in row else [*row.get("ended_s", {}), "?"][-2:][0] for row in rows]
    return ", ".join(f"{last.count(each)} {each}" for each in dict.fromkeys(last))


def main(
    models: Annotated[str, typer.Argument(help="Names with commas between them.")] = ",".join(MODELS),
    engines: Annotated[str, typer.Option(help="Those to run.")] = ",".join(FIRST),
    out: Path | None = None,
    limit_s: Annotated[float, typer.Option(help="Seconds after which engines are stopped.")] = 220.0,
) -> None:
    """Runs the engines of all models."""
    names = models.split(",")
    document: dict[str, Any] = {}

    def found(rows: list[dict[str, Any]]) -> None:
        nonlocal document, out
        if not document:
            out = out or apart(gpu_folder) / "state_engine.json"
            document = apart(provenance, "perf.state_engine") | {
                "method": f"median of turns, 2 prompt and {NEW_TOKENS} new tokens, greedy, native kernels in their "
                f"first configuration, {CACHE >> 20} MiB of cache; 4 layers, 3 of them recurrent with 32 heads of "
                "128 x 128; step_us: of decode steps; gpu_us and kernels: what the GPU did in one of 256 requests",
            }
        document["failures"] = [
            f"{model}: {each}" for model in names for each in failures([row for row in rows if row["model"] == model])
        ]
        hidden = "mixed", "even"
        write(out, document, [{key: row[key] for key in row if key not in hidden} for row in rows])  # type: ignore[arg-type]

    rows = all_engines(names, [ENGINES[name] for name in engines.split(",")], limit_s, found, {})
    for row in rows:
        print(json.dumps({key: row[key] for key in row if key not in ("mixed", "even", "error", "kernels")}))
    print(*document["failures"], sep="\n")
    sys.stdout.flush()
    raise typer.Exit(1 if document["failures"] else 0)


if __name__ == "__main__":
    typer.run(main)
