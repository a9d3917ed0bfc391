"""One vLLM run of `python -m tq run-vllm` in a process of its own.

`python -m tq.cli.vllm_worker JOB.json RESULT.json`: the job is a `Job` as JSON, the result a `Result` as JSON. Progress
goes to stdout as lines `tq-progress FRACTION`. The parent sets the environment (interpreter, target device, TQ_DISABLE,
TQ_REFERENCE).
"""

from __future__ import annotations

import json
import math
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

PROGRESS = "tq-progress"
FP8_MAX = 448.0


@dataclass
class Job:
    """What to run: a model folder, with or without the plugin, on these texts."""

    model: str
    quantized: bool
    plugin: bool
    observe: bool
    prompt: str
    tokens: int
    evaluation: str
    evaluation_tokens: int


@dataclass
class Boundary:
    """Agreement of one fused boundary with the torch reference, summed over its calls.

    worst_step: largest distance of a wrong code from the right one, in codes; 1 is a neighbour.
    """

    producer: str
    calls: int = 0
    codes: int = 0
    wrong_codes: int = 0
    worst_step: int = 0
    wrong_scales: int = 0
    wrong_residuals: int = 0


@dataclass
class Result:
    """What a run produced; `logprobs` are those of the evaluation tokens 1.. given the ones before."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    boundaries: dict[str, Boundary] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    load_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    generation_seconds: float = 0.0


def progress(fraction: float) -> None:
    """Tell the parent how much of this run is done."""
    print(f"{PROGRESS} {fraction:.4f}", flush=True)


def quantize_stock(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3(clamp(x * (1 / scale))): the formula of vLLM's `QuantFP8.forward_native` for a static scale."""
    return (x.float() * scale.float().reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def install_stock_formulas() -> None:
    """Torch stand-ins for the two operators that CPU builds of vLLM call in this model but do not contain.

    Without them a run without the plugin could not be had: `_C.static_scaled_fp8_quant`, called while weights are
    loaded, and `_C.silu_and_mul_quant`, called by vLLM's row for SiluAndMul.
    """
    import vllm._custom_ops as custom_ops
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fusion import fused_act_quant
    from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation

    def scaled_fp8_quant(
        input: torch.Tensor,
        scale: torch.Tensor | None = None,
        num_token_padding: int | None = None,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if scale is None or scale.numel() != 1:
            raise NotImplementedError("run-vllm: a static per-tensor scale must be given to scaled_fp8_quant here")
        codes = quantize_stock(input, scale)
        missing = max((num_token_padding or 0) - len(codes), 0)
        return torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(codes.dtype), scale

    def silu_and_mul_row(x: torch.Tensor, linear: Any) -> Any:
        y, key = SiluAndMul.forward_native(x), fused_act_quant.kFp8StaticTensorSym
        return QuantizedActivation(quantize_stock(y, linear.input_scale), linear.input_scale, x.dtype, y.shape, key)

    custom_ops.scaled_fp8_quant = scaled_fp8_quant
    fused_act_quant._FUSED_ACT_QUANT[(SiluAndMul, fused_act_quant.kFp8StaticTensorSym)] = silu_and_mul_row


def install_float32_gemm() -> None:
    """Let FP8 linear layers multiply in float32 with cached weights: about six times faster decoding on a CPU.

    `torch._scaled_mm` has no fast FP8 path there. The same patch serves every FP8 run, so comparisons are unaffected.
    """
    from vllm.model_executor.kernels.linear.scaled_mm.pytorch import PerTensorTorchFP8ScaledMMLinearKernel

    weights: dict[int, torch.Tensor] = {}  # by address: one model per process

    def apply_scaled_mm(
        self: Any,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        if B.data_ptr() not in weights:
            weights[B.data_ptr()] = B.float().contiguous()
        rows = math.prod(output_shape[:-1])  # A may be padded to 17 rows
        y = (A[:rows].float() @ weights[B.data_ptr()]) * (As * Bs)
        return (y if bias is None else y + bias).to(out_dtype).view(*output_shape)

    PerTensorTorchFP8ScaledMMLinearKernel.apply_scaled_mm = apply_scaled_mm  # type: ignore[method-assign]


def _ordinal(codes: torch.Tensor) -> torch.Tensor:
    """E4M3 codes as integers in the order of their values; the two zeros stay apart."""
    bits = codes.view(torch.uint8).to(torch.int16)
    return torch.where(bits < 128, bits, 127 - bits)


class Observer:
    """Recomputes every fused call with the torch reference, and counts what differs."""

    def __init__(self) -> None:
        self.boundaries: dict[str, Boundary] = {}
        self.calls = 0
        self.span, self.expected_calls = (0.0, 1.0), 1

    def stage(self, start: float, stop: float, expected_calls: int) -> None:
        """Spread progress from `start` to `stop` over this many calls."""
        self.span, self.expected_calls, self.calls = (start, stop), max(expected_calls, 1), 0

    def __call__(self, name: str, producer: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        import tq

        kwargs = {key: value for key, value in kwargs.items() if key != "residual_out"}
        with tq.use_reference():
            expected = getattr(tq, producer)(*args, **kwargs)
        got_residual: Any = None
        expected_residual: Any = None
        if isinstance(expected, tuple):
            (result, got_residual), (expected, expected_residual) = result, expected
        seen = self.boundaries.setdefault(name, Boundary(producer))
        seen.calls += 1
        seen.codes += expected.data.numel()
        steps = (_ordinal(result.data) - _ordinal(expected.data)).abs()
        seen.wrong_codes += int(steps.count_nonzero())
        seen.worst_step = max(seen.worst_step, int(steps.max()))
        seen.wrong_scales += int((result.scale.reshape(-1) != expected.scale.reshape(-1)).sum())
        if expected_residual is not None:
            # As integers: equal bits, so that NaN equals itself and the two zeros differ.
            seen.wrong_residuals += int((got_residual.view(torch.int16) != expected_residual.view(torch.int16)).sum())
        self.calls += 1
        if self.calls % 10 == 0:
            start, stop = self.span
            progress(start + (stop - start) * min(self.calls / self.expected_calls, 1.0))


def run(job: Job) -> Result:
    """Load the model in vLLM, score the evaluation text, generate text."""
    import tq.contract

    if job.quantized:
        install_float32_gemm()
    if job.plugin:
        tq.contract.register()  # vLLM does it by the entry point where tq is installed; a second call does nothing
    elif job.quantized:
        install_stock_formulas()
    observer = Observer()
    with tq.contract.observe(observer) if job.observe else nullcontext():
        result = _generate(job, observer)
    result.boundaries = observer.boundaries
    return result


def _generate(job: Job, observer: Observer) -> Result:
    from vllm import LLM, SamplingParams

    import tq.contract

    result = Result()
    started = time.perf_counter()
    llm: Any = LLM(
        model=job.model,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )
    result.load_seconds = time.perf_counter() - started
    report = tq.contract.report()
    tokenizer = llm.get_tokenizer()
    progress(0.15)

    observer.stage(0.15, 0.5, report.fused)
    ids = tokenizer(job.evaluation).input_ids[: job.evaluation_tokens]
    started = time.perf_counter()
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    output = llm.generate([{"prompt_token_ids": ids}], scored, use_tqdm=False)[0]
    result.evaluation_seconds = time.perf_counter() - started
    result.logprobs = [held[i].logprob for held, i in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    progress(0.5)

    observer.stage(0.5, 1.0, report.fused * job.tokens)
    chat = [{"role": "user", "content": job.prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    started = time.perf_counter()
    greedy = SamplingParams(max_tokens=job.tokens, temperature=0, logprobs=0)
    completion = llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)[0].outputs[0]
    result.generation_seconds = time.perf_counter() - started
    result.text, result.token_ids = completion.text, list(completion.token_ids)
    result.token_logprobs = [held[i].logprob for held, i in zip(completion.logprobs, completion.token_ids, strict=True)]

    if job.plugin:
        report = tq.contract.report()  # again, for the calls
        result.report = {"fused": report.fused, "total": report.total, "calls": report.calls, **asdict(report)}
    progress(1.0)
    return result


def main() -> None:
    """Read the job, run it, write the result."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(asdict(run(job)), default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
