"""One vLLM engine run on a GPU with a Llama-shaped FP8 checkpoint, for tokens per second and agreement at boundaries.

    python -m perf.engine CHECKPOINT eager|compile [--out FILE] [--batch 1,64,256]

Greedy, token ids in and out. Run it with TQ_DISABLE=1 for plain vLLM. In eager mode with tq, every fused boundary of
one forward pass is compared with the CUDA ops that plain vLLM would have run on the same tensors.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer

PROMPT_TOKENS, NEW_TOKENS, REPEATS = 128, 64, 5


def stock_codes(producer: str, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and residual of vLLM's unfused CUDA ops: the norm or activation in bf16, then static quantization."""
    c, x, residual = torch.ops._C, args[0], kwargs.get("residual")
    if producer == "rms_norm":
        y = torch.empty_like(x) if residual is None else x.clone()
        residual = None if residual is None else residual.clone()
        if residual is None:
            c.rms_norm(y, x, args[1], args[2])
        else:
            c.fused_add_rms_norm(y, residual, args[1], args[2])
    else:
        y = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
        c.silu_and_mul(y, x)
    codes = torch.empty(y.shape, dtype=torch.float8_e4m3fn, device=x.device)
    c.static_scaled_fp8_quant(codes, y, kwargs["scale"].reshape(1), None)
    return codes.view(torch.uint8), residual


def compiled_codes(producer: str, args: tuple, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same from vLLM's native formulas as torch.compile makes them, which is what a compiled engine runs."""

    def formula(x: torch.Tensor, scale: torch.Tensor, residual: torch.Tensor | None) -> tuple:
        if producer == "rms_norm":
            z = x.float() if residual is None else x.float() + residual.float()
            kept = z.to(x.dtype)
            y = (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + args[2])).to(args[1].dtype) * args[1]
        else:
            half = x.shape[-1] // 2
            kept, y = None, torch.nn.functional.silu(x[..., :half]) * x[..., half:]
        quantized = (y.float() * scale.reciprocal()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return quantized, None if residual is None else kept

    codes, residual = torch.compile(formula, dynamic=True)(args[0], kwargs["scale"], kwargs.get("residual"))
    return codes.view(torch.uint8), residual


def compare(llm: Any, tokens: int) -> dict[str, dict[str, int]]:
    """Per producer: codes seen, codes and residual elements other than stock's, calls."""
    import tq
    from tq.contract import observe

    seen: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def look(boundary: str, producer: str, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        activation, residual = result if isinstance(result, tuple) else (result, None)
        count = seen[producer]
        codes, stock_residual = stock_codes(producer, args, kwargs)
        count["calls"] += 1
        count["codes"] += codes.numel()
        count["codes_differ"] += int((codes != activation.data.view(torch.uint8)).sum())
        if residual is not None and stock_residual is not None:
            count["residual_differ"] += int((residual != stock_residual).sum())
        # What a compiled engine runs rounds elsewhere; tq with that policy against Inductor on the same tensors.
        native = {"rounding": "before_and_after_weight", "round_residual": False}
        policy = native if producer == "rms_norm" else {"rounding": "activation_and_product"}
        ours = tq.PRODUCERS[producer](*args, **{**kwargs, **policy})
        ours = ours[0] if isinstance(ours, tuple) else ours
        codes, _ = compiled_codes(producer, args, kwargs)
        count["codes_differ_from_inductor"] += int((codes != ours.data.view(torch.uint8)).sum())

    with observe(look):
        generate(llm, 4, tokens)
    return {producer: dict(count) for producer, count in seen.items()}


def generate(llm: Any, batch: int, new_tokens: int) -> tuple[float, list[int]]:
    """(seconds, first token ids) of one greedy batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 900 + 3 for j in range(PROMPT_TOKENS)]} for i in range(batch)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - begin, list(outputs[0].outputs[0].token_ids[:8])


def main(checkpoint: Path, mode: str, out: Path | None = None, batch: str = "1,64,256") -> None:
    """Measures one configuration and prints it as JSON."""
    import vllm
    from vllm import LLM

    from tq.contract import report

    start = time.perf_counter()
    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=mode == "eager",
        max_model_len=2048,
        gpu_memory_utilization=0.6,
        attention_backend="TRITON_ATTN",
        enable_prefix_caching=False,
    )
    found = report()
    result: dict[str, Any] = {
        "mode": mode,
        "tq": found.disabled is None,
        "vllm": vllm.__version__,
        "ready_s": round(time.perf_counter() - start),
        "fused": found.fused,
        "boundaries": found.total,
        "unfused_reasons": sorted({b.reason for b in found.boundaries if b.reason}),
        "tokens_per_s": {},
    }
    for size in map(int, batch.split(",")):
        generate(llm, size, NEW_TOKENS)
        times, tokens = zip(*(generate(llm, size, NEW_TOKENS) for _ in range(REPEATS)), strict=True)
        rates = sorted(size * NEW_TOKENS / t for t in times)
        result["tokens_per_s"][size] = round(statistics.median(rates))
        result.setdefault("spread", {})[size] = round((rates[-2] - rates[1]) / 2)
        result.setdefault("first_tokens", {})[size] = tokens[0]
    if mode == "eager" and found.disabled is None:
        result["agreement"] = compare(llm, 4)
    text = json.dumps(result)
    print(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
