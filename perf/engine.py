"""vLLM on a GPU with a Llama-shaped FP8 checkpoint, with the plugin and without: speed, and agreement at boundaries.

    python -m perf.engine CHECKPOINT [--out perf/results/<gpu>/engine.json]

Four engines (eager and compiled, plain and with tq) start together and then take turns, so that one number is as fresh
as the next. Greedy, token ids in and out. In the eager engine with tq, every fused boundary of a few forward passes is
compared with the CUDA ops that plain vLLM would have run on the same tensors, and with the torch formulas as Inductor
compiles them, which is what a compiled engine runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer

from perf.provenance import gpu_folder, provenance, write

PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 128, 64, 5
BATCHES = (1, 64, 256)
NORM_ROUNDINGS = ("none", "after_weight", "before_and_after_weight")
ACTIVATION_ROUNDINGS = ("none", "product", "activation_and_product")


def stock_codes(producer: str, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and residual of vLLM's unfused CUDA ops: the norm or activation in bf16, then static quantization."""
    c, x, residual = torch.ops._C, args[0], kwargs.get("residual")
    if producer == "silu_mul":
        y = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
        c.silu_and_mul(y, x)
    elif residual is None:
        y = torch.empty_like(x)
        c.rms_norm(y, x, args[1], args[2])
    else:
        y, residual = x.clone(), residual.clone()
        c.fused_add_rms_norm(y, residual, args[1], args[2])
    codes = torch.empty(y.shape, dtype=torch.float8_e4m3fn, device=x.device)
    c.static_scaled_fp8_quant(codes, y, kwargs["scale"].reshape(1), None)
    return codes.view(torch.uint8), residual


@torch.compile(dynamic=True)
def inductor_norm(x: Any, weight: Any, eps: float, scale: Any, residual: Any) -> Any:
    z = x.float() if residual is None else x.float() + residual.float()
    y = (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype) * weight
    codes = (y.to(x.dtype).float() * scale.reciprocal()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes if residual is None else (codes, z.to(x.dtype))


@torch.compile(dynamic=True)
def inductor_activation(x: Any, scale: Any) -> Any:
    half = x.shape[-1] // 2
    y = torch.nn.functional.silu(x[..., :half]) * x[..., half:]
    return (y.float() * scale.reciprocal()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def against_inductor(producer: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, int]:
    """Codes other than Inductor's, for each place where tq can round."""
    import tq

    if producer == "rms_norm":
        theirs = inductor_norm(*args, kwargs["scale"], kwargs.get("residual"))
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        options: list[dict[str, Any]] = [{"rounding": rounding, "round_residual": False} for rounding in NORM_ROUNDINGS]
    else:
        theirs = inductor_activation(args[0], kwargs["scale"])
        options = [{"rounding": rounding} for rounding in ACTIVATION_ROUNDINGS]
    found = {}
    for option in options:
        ours = tq.PRODUCERS[producer](*args, **{**kwargs, **option})
        ours = ours[0] if isinstance(ours, tuple) else ours
        differ = (ours.data.view(torch.uint8) != theirs.view(torch.uint8)).sum()
        found[f"codes_differ_from_inductor_rounding_{option['rounding']}"] = int(differ)
    return found


def compare(llm: Any) -> list[dict[str, Any]]:
    """Per producer: calls, codes seen, and what differs."""
    from tq.contract import observe

    seen: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def look(boundary: str, producer: str, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        activation, residual = result if isinstance(result, tuple) else (result, None)
        count = seen[producer]
        codes, stock_residual = stock_codes(producer, args, kwargs)
        count["calls"] += 1
        count["codes"] += codes.numel()
        count["codes_differ"] += int((codes != activation.data.view(torch.uint8)).sum())
        if residual is not None:
            count["residual_differ"] += int((residual != stock_residual).sum())
        for name, differ in against_inductor(producer, args, kwargs).items():
            count[name] += differ

    with observe(look):
        generate(llm, 4, 4)
    return [{"agreement": producer, **count} for producer, count in seen.items()]


def generate(llm: Any, batch: int, new_tokens: int) -> tuple[float, list[int]]:
    """(seconds, first token ids) of one greedy batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 900 + 3 for j in range(PROMPT_TOKENS)]} for i in range(batch)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begin, list(outputs[0].outputs[0].token_ids[:8])


@contextmanager
def turn(lock: Path) -> Any:
    """One engine at a time."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.05)  # let another one have it


def one_engine(checkpoint: Path, mode: str, folder: Path) -> None:
    """Starts an engine, waits until all have, and measures in turns; writes its findings to the folder."""
    from vllm import LLM

    from tq.contract import report

    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=mode == "eager",
        max_model_len=2048,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=8 << 30,
        attention_backend="TRITON_ATTN",
        enable_prefix_caching=False,
    )
    found = report()
    name = f"{mode}_{'stock' if found.disabled else 'tq'}"
    for batch in BATCHES:
        generate(llm, batch, NEW_TOKENS)
    (folder / f"{name}.ready").touch()
    patience = time.monotonic() + 240  # for one that failed to start
    while len(list(folder.glob("*.ready"))) < 4 and time.monotonic() < patience:
        time.sleep(0.2)
    rates: dict[int, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for batch in BATCHES:
            with turn(folder / "lock"):
                seconds, tokens = generate(llm, batch, NEW_TOKENS)
            rates[batch].append(batch * NEW_TOKENS / seconds)
    rows: list[dict[str, Any]] = [
        {
            "engine": name,
            "batch": batch,
            "tokens_per_s": round(statistics.median(values)),
            "quartiles": [round(quartile) for quartile in statistics.quantiles(values, n=4)],
            "first_tokens": tokens,
            "fused": found.fused,
            "boundaries": found.total,
        }
        for batch, values in rates.items()
    ]
    if name == "eager_tq":
        with turn(folder / "lock"):
            rows += compare(llm)
    (folder / f"{name}.json").write_text(json.dumps(rows))


def main(checkpoint: Path, out: Path | None = None, mode: str = "", folder: Path | None = None) -> None:
    """Runs the four engines; `mode` and `folder` are for the processes it starts."""
    if mode and folder:
        one_engine(checkpoint, mode, folder)
        return
    folder = Path(tempfile.mkdtemp())
    running = []
    for engine in ("eager", "compiled"):
        for disabled in ("0", "1"):
            command = [sys.executable, "-m", "perf.engine", str(checkpoint), "--mode", engine, "--folder", str(folder)]
            log = (folder / f"{engine}_{disabled}.log").open("w")
            environment = {**os.environ, "TQ_DISABLE": disabled}
            running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    failed = [process.wait() for process in running]
    if any(failed):
        for log_path in sorted(folder.glob("*.log")):
            print(f"--- {log_path.name}", *log_path.read_text().splitlines()[-8:], sep="\n")
    rows = [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())]
    document = provenance("perf.engine") | {
        "method": f"median of {ROUNDS} turns, {PROMPT_TOKENS} prompt and {NEW_TOKENS} new tokens, greedy, TRITON_ATTN",
        "checkpoint": "8 layers, hidden 4096, intermediate 14336, FP8 W8A8 static per tensor, random weights",
    }
    write(out or gpu_folder() / "engine.json", document, rows)
    for row in rows:
        print(json.dumps(row))
    raise typer.Exit(1 if any(failed) else 0)


if __name__ == "__main__":
    typer.run(main)
