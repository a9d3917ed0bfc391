"""One vLLM engine of `perf.engine`, in a process of its own: starts, takes its turns, writes what it finds.

Eager engines hold both sides: `Switch` takes tq out of the model and puts it back, so that stock and tq are measured
turn by turn on the same weights and the same memory. A compiled engine is one side.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from perf.agreement import compare
from perf.engine_time import busy, host
from perf.engine_turns import BATCHES, Findings, Order, alone, generate, leave, measure

GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
# For what follows the turns: each engine looks at the GPU's work for each batch.
AFTER_TURNS_S = 8


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


def in_place(llm: Any, name: str, scheme: str) -> dict[str, Any]:
    """Whether replays read a scale, or where there is none a norm's weight, that was changed in place.

    Prompts of one token, so that with graphs every step is the replay of one: prompts of many tokens run without.
    """

    def tokens() -> list[int]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the engine may have a stream of its own
        return generate(llm, 4, 8, prompt_tokens=1).tokens

    (model,) = llm.apply_model(lambda model: model)
    wanted = "input_scale" if "static" in scheme else "input_layernorm.weight"
    changed = [parameter for key, parameter in model.named_parameters() if key.endswith(wanted)]
    before = tokens()
    values = [parameter.data.clone() for parameter in changed]
    for parameter in changed:
        parameter.data.mul_(1 / 64 if wanted == "input_scale" else -3)  # most codes saturate
    after = tokens()
    for parameter, value in zip(changed, values, strict=True):
        parameter.data.copy_(value)
    again = tokens()
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
        found[side] = [generate(llm, 4, 8, given).tokens for given in (None, request)]
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
        layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
        # The largest batch with its prompts takes 11/12 of it.
        options |= {
            "kv_cache_memory_bytes": layers * (3 << 26),
            "attention_backend": "TRITON_ATTN",
            "gpu_memory_utilization": 0.1,
        }
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
    order = Order(folder, findings.path.stem)
    last = deadline - 10 - AFTER_TURNS_S * int((folder / "engines").read_text())
    if mode == "compiled":
        with alone(folder):
            findings.add(in_place(llm, name, scheme))
        measure(llm, {name: lambda: None}, order, findings, last, mode)
        for batch in BATCHES:
            with alone(folder):
                findings.add(busy(llm, name, batch))
        return
    (model,) = llm.apply_model(lambda model: model)
    switch = Switch(model, rows)
    if mode == "lora":
        with alone(folder):
            with_adapter(llm, switch, findings, checkpoint / "adapter")
        leave(folder, order.name)
        return
    sides = {f"eager_{side}": lambda on=side == "tq": switch.set(on) for side in ("stock", "tq")}
    with alone(folder):
        seen: list[list[int]] = []
        findings.add(*compare(llm, lambda: seen.append(generate(llm, 4, 4).tokens)))
        # Observed calls are decided one by one; all others are repeated.
        findings.add({"repeated": True, "tokens_equal_observed": generate(llm, 4, 4).tokens == seen[0]})
        for name, enter in sides.items():
            enter()
            findings.add(in_place(llm, name, scheme))
    measure(llm, sides, order, findings, last, mode)
    for batch in BATCHES:
        for name, enter in sides.items():
            with alone(folder):
                enter()
                findings.add(busy(llm, name, batch))
    for name, enter in sides.items():
        with alone(folder):
            enter()
            findings.add(host(llm, model, name, 64))
