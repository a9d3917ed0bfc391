"""One vLLM engine of `perf.engine`, in a process of its own: starts, takes its turns, writes what it finds.

Eager engines hold both sides: `Switch` takes tq out of the model and puts it back, so that stock and tq are measured
turn by turn on the same weights and the same memory. A compiled engine is one side.
"""

from __future__ import annotations

import fcntl
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from perf.agreement import compare

PROMPT_TOKENS = 128
BATCHES = (1, 64, 256)
ROUNDS = {"eager": 9, "compiled": 9}
NEW_TOKENS = {"eager": 32, "compiled": 64}
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]


class Switch:
    """tq in a loaded model, on or off: modules routed or as vLLM made them, kernels and vLLM's table of fused
    activations likewise. stock_rows: the table before tq was registered."""

    def __init__(self, model: torch.nn.Module, stock_rows: tuple[dict, ...]) -> None:
        from vllm.model_executor.layers.fusion import fused_act_quant

        from tq.contract.scales import kernel_of

        tables = fused_act_quant._FUSED_ACT_QUANT, fused_act_quant._FUSED_ACT_QUANT_SUPPORT
        self.tables = [(table, dict(table), stock) for table, stock in zip(tables, stock_rows, strict=True)]
        self.keys = []
        objects: dict[int, Any] = {}
        for module in model.modules():
            kernel = kernel_of(module)
            for each in (module, kernel):
                if hasattr(type(each), "tq_base"):
                    objects[id(each)] = each
            if hasattr(type(kernel), "tq_base") and "_input_quant_key" in module.__dict__:  # and no wrapper of one
                self.keys.append((module, module._input_quant_key))
        self.classes = [(each, type(each), type(each).tq_base) for each in objects.values()]

    def set(self, on: bool) -> None:
        for each, ours, stock in self.classes:
            each.__class__ = ours if on else stock
        for linear, key in self.keys:
            linear._input_quant_key = key if on else None
        for table, ours, stock in self.tables:
            table.clear()
            table.update(ours if on else stock)


def generate(llm: Any, batch: int, new_tokens: int, adapter: Any = None) -> tuple[float, list[int]]:
    """(seconds, first token ids) of one greedy batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 500 + 3 for j in range(PROMPT_TOKENS)]} for i in range(batch)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
    return time.perf_counter() - begin, list(outputs[0].outputs[0].token_ids[:8])


class Findings:
    """Rows of one engine, in its file as soon as they are found."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []  # type: ignore[var-annotated]

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows += rows
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.rows))
        temporary.rename(self.path)


@contextmanager
def turn(lock: Path) -> Iterator[None]:
    """One engine at a time."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.02)  # let another one have it


def spread(values: list[float], digits: int | None = None) -> tuple[float, list[float]]:
    """Median and quartiles."""
    quartiles = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return round(statistics.median(values), digits), [round(quartile, digits) for quartile in quartiles]


def measure(llm: Any, sides: dict[str, Any], folder: Path, findings: Findings, deadline: float, mode: str) -> None:
    """Tokens per second of each side, in turns. sides: name -> what turns it on."""
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    tokens: dict[tuple[str, int], list[int]] = {}
    for batch in BATCHES:
        for enter in sides.values():
            enter()
            generate(llm, batch, NEW_TOKENS[mode])
    (folder / f"{findings.path.stem}.ready").touch()
    expected = int((folder / "engines").read_text())
    while len(list(folder.glob("*.ready"))) < expected and time.time() < deadline - 60:
        time.sleep(0.1)
    for _ in range(ROUNDS[mode]):
        for batch in BATCHES:
            if time.time() > deadline - 15:
                break
            with turn(folder / "lock"):
                for name, enter in sides.items():
                    enter()
                    seconds, tokens[name, batch] = generate(llm, batch, NEW_TOKENS[mode])
                    rates[name, batch].append(batch * NEW_TOKENS[mode] / seconds)
    for (name, batch), values in rates.items():
        median, quartiles = spread(values)
        row = {"engine": name, "batch": batch, "tokens_per_s": median, "quartiles": quartiles, "turns": len(values)}
        stock = rates.get((name.replace("_tq", "_stock"), batch), [])
        if name.endswith("_tq") and len(stock) == len(values):
            ratios = [mine / theirs for mine, theirs in zip(values, stock, strict=True)]
            row["over_stock"], row["over_stock_quartiles"] = spread(ratios, 3)
        findings.add({**row, "first_tokens": tokens[name, batch]})


def busy(llm: Any, name: str, batch: int, run: Callable[..., tuple[float, Any]] = generate) -> dict[str, Any]:
    """How long the GPU works in a decode step, and on what, microseconds: the rest of a step is the host's.

    run: (llm, batch, new tokens) -> (seconds, what was generated)."""
    from torch.profiler import ProfilerActivity, profile

    run(llm, batch, 2)
    found = {}
    for new_tokens in (2, 10):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            seconds, _ = run(llm, batch, new_tokens)
        times = {event.key[:60]: event.self_device_time_total for event in profiler.key_averages()}
        found[new_tokens] = seconds * 1e6, times
    (short, before), (long, after) = found[2], found[10]
    steps = {key: (time - before.get(key, 0.0)) / 8 for key, time in after.items()}
    greatest = sorted(steps, key=lambda key: -steps[key])[:8]
    return {
        "busy": name,
        "batch": batch,
        "step_us": round((long - short) / 8),
        "gpu_us": round(sum(steps.values())),
        "kernels": {key: round(steps[key], 1) for key in greatest},
    }


def host(llm: Any, model: torch.nn.Module, name: str, batch: int, steps: int = 32) -> dict[str, Any]:
    """Host time of the boundaries of a decode step, microseconds: producers and quantizers, by wrapping each."""
    from vllm.model_executor.layers.fusion import fused_act_quant

    from tq.contract import report
    from tq.contract.scales import kernel_of

    spent: dict[str, float] = defaultdict(float)

    def timed(kind: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            spent[kind] += time.perf_counter() - begin
            return result

        return call

    producers = {model.get_submodule(boundary.name): boundary.producer for boundary in report().boundaries}
    quantizers = {getattr(kernel_of(module), "quant_fp8", None) for module in model.modules()} - {None}
    wrapped = [*producers.items(), *((quantizer, "quantizers") for quantizer in quantizers)]
    for module, kind in wrapped:
        module.forward = timed(kind, module.forward)
    rows = fused_act_quant._FUSED_ACT_QUANT
    before = dict(rows)
    rows.update({key: timed("silu_mul", row) for key, row in before.items()})
    seconds = {}
    for new_tokens in (2, 2 + steps):
        spent.clear()
        seconds[new_tokens] = generate(llm, batch, new_tokens)[0], dict(spent)
    rows.update(before)
    for module, _ in wrapped:
        del module.forward
    (short, few), (long, many) = seconds.values()
    each = {kind: round((many[kind] - few.get(kind, 0.0)) / steps * 1e6) for kind in many}
    return {"host": name, "batch": batch, "step_us": round((long - short) / steps * 1e6), "boundaries_us": each}


def in_place(llm: Any, name: str, scheme: str) -> dict[str, Any]:
    """Whether replays read a scale, or where there is none a norm's weight, that was changed in place."""
    (model,) = llm.apply_model(lambda model: model)
    wanted = "input_scale" if "static" in scheme else "input_layernorm.weight"
    changed = [parameter for key, parameter in model.named_parameters() if key.endswith(wanted)]
    _, before = generate(llm, 4, 8)
    values = [parameter.data.clone() for parameter in changed]
    for parameter in changed:
        parameter.data.mul_(1 / 64 if wanted == "input_scale" else -3)  # most codes saturate
    _, after = generate(llm, 4, 8)
    for parameter, value in zip(changed, values, strict=True):
        parameter.data.copy_(value)
    _, again = generate(llm, 4, 8)
    found = {"changed": len(changed), "seen": before != after, "restored": before == again}
    return {"in_place": wanted, "engine": name, **found}


def with_adapter(llm: Any, switch: Switch, findings: Findings, adapter: Path) -> None:
    """LoRA wraps the layers after they are paired: they need their plain input, and get it."""
    from vllm.lora.request import LoRARequest

    from tq.contract import report

    request, found = LoRARequest("random", 1, str(adapter)), {}
    for side in ("tq", "stock"):
        switch.set(side == "tq")
        calls = report().calls
        found[side] = [generate(llm, 4, 8, given)[1] for given in (None, request)]
        found[f"{side}_calls"] = report().calls - calls
    row = {"lora": True, "fused": report().fused, "fused_calls": found["tq_calls"]}
    row["tokens_equal_stock"] = found["tq"] == found["stock"]
    findings.add({**row, "adapter_changes_tokens": found["tq"][0] != found["tq"][1]})


def run(folder: Path, checkpoint: Path, scheme: str, mode: str, side: str, backend: str, deadline: float) -> None:
    """The engine of one checkpoint: mode eager or lora (both sides), or compiled."""
    from vllm import LLM
    from vllm.model_executor.layers.fusion import fused_act_quant

    from tq.contract import report

    began = time.time()
    rows = dict(fused_act_quant._FUSED_ACT_QUANT), dict(fused_act_quant._FUSED_ACT_QUANT_SUPPORT)
    while not (checkpoint / "config.json").exists():
        time.sleep(0.1)
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8} if mode == "lora" else {}
    if mode == "compiled":
        options["compilation_config"] = {"cudagraph_capture_sizes": GRAPH_SIZES}
    if torch.cuda.is_available():
        options |= {"kv_cache_memory_bytes": 3 << 30, "attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.1}
    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=mode != "compiled",
        max_model_len=512,
        max_num_seqs=max(BATCHES),
        linear_backend=backend,
        enable_prefix_caching=False,
        **options,
    )
    found, name = report(), f"{mode}_{side}" if side else mode
    findings = Findings(folder / f"{scheme}_{name}.json")
    findings.add(
        {
            "started": name,
            "seconds": round(time.time() - began),
            "fused": found.fused,
            "boundaries": found.total,
            "schemes": sorted({f"{boundary.scheme} {boundary.layout}" for boundary in found.boundaries}),
            "kernels": sorted({str(boundary.kernel) for boundary in found.boundaries}),
            "reasons": sorted({boundary.reason for boundary in found.boundaries if boundary.reason}),
        }
    )
    if mode == "compiled":
        with turn(folder / "lock"):
            findings.add(in_place(llm, name, scheme))
        measure(llm, {name: lambda: None}, folder, findings, deadline, mode)
        with turn(folder / "lock"):
            findings.add(busy(llm, name, 64))
        return
    (model,) = llm.apply_model(lambda model: model)
    switch = Switch(model, rows)
    if mode == "lora":
        with turn(folder / "lock"):
            with_adapter(llm, switch, findings, checkpoint / "adapter")
        return
    sides = {f"eager_{side}": lambda on=side == "tq": switch.set(on) for side in ("stock", "tq")}
    with turn(folder / "lock"):
        seen: list[list[int]] = []
        findings.add(*compare(llm, lambda: seen.append(generate(llm, 4, 4)[1])))
        # Observed calls are decided one by one; all others are repeated.
        findings.add({"repeated": True, "tokens_equal_observed": generate(llm, 4, 4)[1] == seen[0]})
        for name, enter in sides.items():
            enter()
            findings.add(in_place(llm, name, scheme))
    measure(llm, sides, folder, findings, deadline, mode)
    for name, enter in sides.items():
        with turn(folder / "lock"):
            enter()
            findings.add(busy(llm, name, 64), host(llm, model, name, 64))
