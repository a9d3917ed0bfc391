"""vLLM on a GPU with Llama-shaped checkpoints, with the plugin and without: speed, and agreement at boundaries.

    python -m perf.engine [SCHEME...] [--modes eager,lora,compiled] [--backend deep_gemm] [--limit-s 300] [--out FILE]

SCHEME: of `perf.checkpoints.SCHEMES`; random checkpoints are written first. All engines start together and then take
turns, so that one number is as fresh as the next; rows are written as they are found. Greedy, token ids in and out.

Eager: stock and tq in one engine, turn by turn; every fused boundary of a few forward passes is compared with what
plain vLLM would have run on the same tensors: its CUDA norm or activation, then the quantizer of the very kernel that
takes the input, codes, scales and where they lie; and with the torch formulas as Inductor compiles them, which is what
a compiled engine runs. Compiled: with CUDA graphs, which must see a scale changed in place. LoRA: nothing is fused
under its wrappers, and tokens are those of stock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer

from perf import engine_process
from perf.checkpoints import SCHEMES, Shape, described, write_adapter, write_checkpoint
from perf.engine_turns import NEW_TOKENS, PROMPT_TOKENS, compared, leave
from perf.provenance import gpu_folder, provenance, write

MODES = {"eager": ("",), "lora": ("",), "compiled": ("stock", "tq")}


def start(folder: Path, scheme: str, mode: str, side: str, backend: str, deadline: float) -> subprocess.Popen:
    """An engine process; its output goes to a log."""
    command = [sys.executable, "-m", "perf.engine", scheme, "--modes", mode, "--side", side, "--backend", backend]
    command += ["--folder", str(folder), "--deadline", str(deadline)]
    log = (folder / f"{scheme}_{mode}{side and '_'}{side}.log").open("w")
    environment = {**os.environ, "TQ_DISABLE": "1" if side == "stock" else "0"}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def rows_of(folder: Path, schemes: list[str], shape: Shape) -> list[dict[str, Any]]:
    """What the engines have found so far."""
    rows = []
    for scheme in schemes:
        for mode, sides in MODES.items():
            found: list[dict[str, Any]] = []
            for side in sides:
                path = folder / f"{scheme}_{mode}{side and '_'}{side}.json"
                found += json.loads(path.read_text()) if path.exists() else []
            rows += [{"checkpoint": described(scheme, shape), "mode": mode, **row} for row in compared(found)]
    return rows


def merged(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows`, after those of other checkpoints and modes that are in the file."""
    held = json.loads(path.read_text())["rows"] if path.exists() else []
    now = {(row["checkpoint"], row["mode"]) for row in rows}
    return [row for row in held if (row.get("checkpoint"), row.get("mode")) not in now and "mode" in row] + rows


def methods(path: Path, wanted: list[str], backend: str) -> dict[str, str]:
    """How each mode was measured, those that are in the file and not measured now included."""
    held = json.loads(path.read_text())["method"] if path.exists() else {}
    now = {
        mode: f"quartiles of turns of {PROMPT_TOKENS} prompt and {count} new tokens, greedy, TRITON_ATTN, linear "
        f"backend {backend}; the GPU's time of 8 decode steps"
        for mode, count in NEW_TOKENS.items()
        if mode in wanted
    }
    return {**held, **now}


def main(
    schemes: Annotated[list[str] | None, typer.Argument()] = None,
    modes: str = "eager,lora,compiled",
    backend: Annotated[str, typer.Option(help="--linear-backend of vLLM.")] = "auto",
    out: Path | None = None,
    layers: int = 8,
    limit_s: Annotated[int, typer.Option(help="Ends the engines that are not done by then.")] = 300,
    side: str = "",
    folder: Path | None = None,
    deadline: float = 0.0,
) -> None:
    """Runs the engines of each scheme; `side`, `folder` and `deadline` are for the processes it starts."""
    if folder is not None:
        (scheme,) = schemes or []
        engine_process.run(folder, folder / scheme, scheme, modes, side, backend, deadline)
        return
    schemes, wanted, shape = schemes or ["static", "token", "block"], modes.split(","), Shape(layers=layers)
    unknown = [name for name in (*schemes, *wanted) if name not in {**SCHEMES, **MODES}]
    if unknown:
        raise typer.BadParameter(f"schemes are {', '.join(SCHEMES)}, modes {', '.join(MODES)}; got {unknown[0]}")
    began, folder = time.time(), Path(tempfile.mkdtemp())
    engines = [(scheme, mode, side) for scheme in schemes for mode in wanted for side in MODES[mode]]
    (folder / "engines").write_text(str(len(engines)))
    running = {engine: start(folder, *engine, backend, began + limit_s) for engine in engines}
    for scheme in schemes:
        write_adapter(folder / scheme / "adapter", shape)
        write_checkpoint(folder / scheme, scheme, shape, "cuda")
    torch.cuda.empty_cache()
    path = out or gpu_folder() / "engine.json"
    document = provenance("perf.engine") | {"method": methods(path, wanted, backend)}
    failed = []
    while running:
        time.sleep(1)
        for engine, process in list(running.items()):
            late = time.time() > began + limit_s
            if late:
                process.kill()  # it may not come back from the driver to be told
            if late or process.poll() is not None:
                del running[engine]
                name = "_".join(filter(None, engine))
                leave(folder, name)
                if process.wait():
                    failed.append(engine)
                    print(f"--- {name}", *(folder / f"{name}.log").read_text().splitlines()[-25:], sep="\n", flush=True)
        write(path, document, merged(path, rows_of(folder, schemes, shape)))
    for row in rows_of(folder, schemes, shape):
        print(json.dumps({name: value for name, value in row.items() if name != "checkpoint"}))
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
