"""vLLM on a GPU with Llama-shaped FP8 checkpoints, with the plugin and without: speed, and agreement at boundaries.

    python -m perf.engine CHECKPOINT... [--backend deep_gemm] [--out perf/results/<gpu>/engine.json]

One checkpoint after another: static, per-token or block scales, whatever it says itself. Four engines (eager and
compiled, plain and with tq) start together and then take turns, so that one number is as fresh as the next. Greedy,
token ids in and out. In the eager engine with tq, every fused boundary of a few forward passes is compared with what
plain vLLM would have run on the same tensors: its CUDA norm or activation, then the quantizer of the very kernel that
takes the input, codes, scales and where they lie; and with the torch formulas as Inductor compiles them, which is what
a compiled engine runs.
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
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

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


class Quantized(NamedTuple):
    """Codes as bytes [M, N], scales [M, G] as the consumer stores them, and the new residual."""

    codes: torch.Tensor
    scales: torch.Tensor
    residual: torch.Tensor | None = None


def quantizer_of(linear: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The quantizer that the kernel of `linear` runs on an input that is not quantized."""
    from vllm import _custom_ops as ops

    from tq.contract import get_input_quant_scales
    from tq.contract.scales import kernel_of

    scales, kernel = get_input_quant_scales(linear), kernel_of(linear)
    if hasattr(kernel, "quant_fp8"):
        return lambda y: kernel.quant_fp8(y, scales.static_scale, scales.scale_ub)
    return lambda y: ops.scaled_int8_quant(y, scales.static_scale, None, symmetric=True)[:2]


def stock(producer: str, args: tuple, kwargs: dict[str, Any], quantize: Callable[..., Any]) -> Quantized:
    """What vLLM's unfused CUDA ops give: the norm or activation in bf16, then the consumer's quantizer."""
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
    codes, scales = quantize(y.view(-1, y.shape[-1]))
    return Quantized(codes.view(torch.uint8), scales, residual)


@torch.compile(dynamic=True)
def inductor_norm(quantize: Any, x: Any, weight: Any, eps: float, scale: Any, residual: Any) -> Any:
    z = x.float() if residual is None else x.float() + residual.float()
    y = (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype) * weight
    codes, _ = quantize(y.to(x.dtype).view(-1, x.shape[-1]), scale)
    return codes if residual is None else (codes, z.to(x.dtype))


@torch.compile(dynamic=True)
def inductor_activation(quantize: Any, x: Any, scale: Any) -> Any:
    half = x.shape[-1] // 2
    y = torch.nn.functional.silu(x[..., :half]) * x[..., half:]
    codes, _ = quantize(y.view(-1, half), scale)
    return codes


def against_inductor(producer: str, args: tuple, kwargs: dict[str, Any], kernel: Any) -> dict[str, int]:
    """Codes other than Inductor's, for each place where tq can round."""
    import tq

    if not hasattr(kernel, "quant_fp8"):
        return {}
    quantize, scale = kernel.quant_fp8.forward_native, kwargs.get("scale")
    if producer == "rms_norm":
        theirs = inductor_norm(quantize, *args, scale, kwargs.get("residual"))
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        options: list[dict[str, Any]] = [{"rounding": rounding, "round_residual": False} for rounding in NORM_ROUNDINGS]
    else:
        theirs = inductor_activation(quantize, args[0], scale)
        options = [{"rounding": rounding} for rounding in ACTIVATION_ROUNDINGS]
    given = {name: value for name, value in kwargs.items() if name not in ("residual_out", "round_residual")}
    found = {}
    for option in options:
        ours = tq.PRODUCERS[producer](*args, **{**given, **option})
        ours = ours[0] if isinstance(ours, tuple) else ours
        found[f"codes_differ_from_inductor_rounding_{option['rounding']}"] = differing(ours.data, theirs)
    return found


def differing(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Elements that differ, of the rows of `ours`: vLLM's may be followed by padding."""
    theirs = theirs[: ours.numel() // ours.shape[-1]]
    if ours.element_size() == 1:
        ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
    return int((ours.reshape(theirs.shape) != theirs).sum())


def same_place(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether scales lie the same way; a stride of a size below 2 says nothing."""
    strides = zip(ours.shape, ours.stride(), theirs.stride(), strict=True)
    return ours.dtype == theirs.dtype and all(mine == other for size, mine, other in strides if size > 1)


def compare(llm: Any) -> list[dict[str, Any]]:
    """Per producer and scheme: calls, codes and scales seen, and what differs."""
    from tq.contract import observe, report
    from tq.contract.scales import kernel_of

    seen: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    (model,) = llm.apply_model(lambda model: model)
    consumers = {boundary.name: model.get_submodule(boundary.consumer) for boundary in report().boundaries}

    def look(boundary: str, producer: str, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        activation, residual = result if isinstance(result, tuple) else (result, None)
        linear = consumers[boundary]
        theirs = stock(producer, args, kwargs, quantizer_of(linear))
        rows = activation.data.numel() // activation.data.shape[-1]
        scales = theirs.scales[:rows] if theirs.scales.dim() == 2 else theirs.scales
        count = seen[producer, f"{activation.scheme} {activation.layout}"]
        count["calls"] += 1
        count["codes"] += activation.data.numel()
        count["codes_differ"] += differing(activation.data, theirs.codes)
        count["scales"] += activation.scale.numel()
        count["scales_differ"] += int((activation.scale.view(scales.shape) != scales).sum())
        count["scales_elsewhere"] += activation.scale.dim() == 2 and not same_place(activation.scale, scales)
        if residual is not None:
            count["residual_differ"] += int((residual != theirs.residual).sum())
        for name, differ in against_inductor(producer, args, kwargs, kernel_of(linear)).items():
            count[name] += differ

    with observe(look):
        generate(llm, 4, 4)
    return [{"agreement": producer, "scheme": scheme, **count} for (producer, scheme), count in seen.items()]


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


def one_engine(checkpoint: Path, mode: str, folder: Path, backend: str) -> None:
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
        linear_backend=backend,
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
            "kernels": sorted({str(boundary.kernel) for boundary in found.boundaries}),
            "reasons": sorted({boundary.reason for boundary in found.boundaries if boundary.reason}),
        }
        for batch, values in rates.items()
    ]
    if name == "eager_tq":
        with turn(folder / "lock"):
            rows += compare(llm)
    (folder / f"{name}.json").write_text(json.dumps(rows))


def scales_of(checkpoint: Path) -> str:
    """What shares a scale among the activations, as the checkpoint says, and the shape of the model."""
    config = json.loads((checkpoint / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    activations = group["input_activations"]
    kind = "dynamic" if activations["dynamic"] else "static"
    return (
        f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}, "
        f"intermediate {config['intermediate_size']}, "
        f"{activations['type']} W8A8 {kind} per {activations['strategy']}, random weights"
    )


def four_engines(checkpoint: Path, backend: str) -> tuple[list[dict[str, Any]], bool]:
    """Rows of a checkpoint, and whether all engines came to an end."""
    folder = Path(tempfile.mkdtemp())
    running = []
    for engine in ("eager", "compiled"):
        for disabled in ("0", "1"):
            command = [sys.executable, "-m", "perf.engine", str(checkpoint), "--backend", backend]
            command += ["--mode", engine, "--folder", str(folder)]
            log = (folder / f"{engine}_{disabled}.log").open("w")
            environment = {**os.environ, "TQ_DISABLE": disabled}
            running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    failed = [process.wait() for process in running]
    if any(failed):
        for log_path in sorted(folder.glob("*.log")):
            print(f"--- {log_path.name}", *log_path.read_text().splitlines()[-8:], sep="\n")
    rows = [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())]
    return [{"checkpoint": scales_of(checkpoint), **row} for row in rows], not any(failed)


def main(
    checkpoints: list[Path],
    out: Path | None = None,
    backend: Annotated[str, typer.Option(help="--linear-backend of vLLM.")] = "auto",
    mode: str = "",
    folder: Path | None = None,
) -> None:
    """Runs the four engines of each checkpoint; `mode` and `folder` are for the processes it starts."""
    if mode and folder:
        one_engine(checkpoints[0], mode, folder, backend)
        return
    measured = [four_engines(checkpoint, backend) for checkpoint in checkpoints]
    rows = [row for found, _ in measured for row in found]
    document = provenance("perf.engine") | {
        "method": f"median of {ROUNDS} turns, {PROMPT_TOKENS} prompt and {NEW_TOKENS} new tokens, greedy, TRITON_ATTN, "
        f"linear backend {backend}",
    }
    write(out or gpu_folder() / "engine.json", document, rows)
    for row in rows:
        print(json.dumps(row))
    raise typer.Exit(0 if all(ended for _, ended in measured) else 1)


if __name__ == "__main__":
    typer.run(main)
