"""vLLM on a GPU with hybrid models, with states as they are and rounded: agreement, what is rounded, and speed.

    python -m perf.state_engine [MODELS] [--engines NAMES] [--out perf/results/<gpu>/state_engine.json]

Random weights (`perf.state_checkpoints`), greedy, token ids in and out. All engines of a model start together and take
turns. Three kinds of run: without a plugin, with it and no recipe, with one. Prompts are longer than a step may be, so
that they are continued and meet decodes of others. What must hold: a run repeats itself; without a recipe nothing
differs from a run without the plugin; graphs give what eager steps of the same kernels give; in watched engines every
state that a call reads is rounded as ModelOpt rounds it, and nothing else in the cache changes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_KIMI_K3_GEMM_AR", "0")  # wants CUTLASS in Python

import typer

from perf.engine import turn
from perf.provenance import gpu_folder, provenance, write
from perf.state_checkpoints import MODELS, write_checkpoint

NEW_TOKENS, ROUNDS = 32, 3
BATCHES = (1, 64, 256)
STEP = 512  # tokens of a step
PROMPTS = (1, 33, 500, 1300, 7, 700)  # longer than a step, so that some go on while others decode
ATTENTION = {"qwen3_next": "TRITON_ATTN", "kimi_linear": "TRITON_MLA"}
CODES = {"int8": "int8_narrow", "fp8": "fp8_e4m3"}
PACKED = "num_bits: 8, type: dynamic, axis: [0, 1, 3], narrow_range: true, packed: true"
RECIPES = {  # rules for GDN and for KDA
    "int8": ("num_bits: 8, type: dynamic, axis: [0, 1], narrow_range: true",) * 2,
    "fp8": ("num_bits: [4, 3], type: dynamic, axis: [0, 1]",) * 2,
    "packed": (PACKED,) * 2,
    "replay": (f"{PACKED}, replay: 16", f"{PACKED}, replay: 8"),
}


class Engine(NamedTuple):
    """recipe: a name in RECIPES, "none", or "plugin_off". mode: "eager", "graphs" (of the kernels of eager mode) or
    "default" (vLLM's own choice). watched: look at all states in a small cache, no speed. drafts: tokens guessed from
    the prompt. state: dtype of the states."""

    recipe: str
    mode: str
    watched: bool = False
    drafts: int = 0
    state: str = "float32"

    @property
    def name(self) -> str:
        parts = [self.recipe, self.mode, "watched" * self.watched, f"drafts{self.drafts}" * (self.drafts > 0)]
        return "-".join(part for part in [*parts, "" if self.state == "float32" else self.state] if part)


ENGINES = {
    engine.name: engine
    for engine in (
        *(
            Engine(recipe, mode)
            for mode in ("eager", "graphs", "default")
            for recipe in ("plugin_off", "none", *RECIPES)
        ),
        Engine("plugin_off", "default", state="bfloat16"),
        *(Engine(recipe, "eager", watched=True, drafts=drafts) for recipe in CODES for drafts in (0, 3)),
    )
}


def first_configuration_only() -> None:
    """Kernels of vLLM that are tuned while they run may add in another order in each process: let none be tuned."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def with_one(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        original(self, fn, arg_names, configs[:1], *args, **kwargs)

    Autotuner.__init__ = with_one  # type: ignore[method-assign]


def start(checkpoint: Path, engine: Engine) -> Any:
    from vllm import LLM

    model = json.loads((checkpoint / "config.json").read_text())["model_type"]
    options: dict[str, Any] = {"enforce_eager": engine.mode == "eager"}
    if engine.mode != "eager":
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 64, 256]}
    if engine.mode == "graphs":
        options["compilation_config"] |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if engine.drafts:
        options["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": engine.drafts, "prompt_lookup_max": 2, "prompt_lookup_min": 1,
        }  # fmt: skip
    return LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_batched_tokens=STEP,
        max_num_seqs=256,
        gpu_memory_utilization=0.03,
        kv_cache_memory_bytes=(1 if engine.watched else 4) << (28 if engine.watched else 30),
        mamba_ssm_cache_dtype=engine.state,
        enable_prefix_caching=False,
        attention_backend=ATTENTION[model],
        additional_config={"gdn_prefill_backend": "triton"},
        seed=0,
        **options,
    )


def generate(llm: Any, lengths: tuple[int, ...], new_tokens: int = NEW_TOKENS) -> tuple[float, list[Any]]:
    """(seconds, token ids and sum of log probabilities of each prompt) of one greedy batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, detokenize=False, ignore_eos=True, logprobs=0)
    prompts = [
        {"prompt_token_ids": [(7 * i + j * j) % 900 + 3 for j in range(length)]} for i, length in enumerate(lengths)
    ]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return seconds, [[list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob] for o in outputs]


def watch(llm: Any, engine: Engine) -> dict[str, int]:
    """What a watched engine did in one batch of prompts."""
    from perf.state_watch import Watch

    watched = Watch(CODES[engine.recipe])
    (model,) = llm.apply_model(lambda model: model)
    with watched(model):
        generate(llm, PROMPTS)
    layers = sum(hasattr(module, "tq_state_options") for module in model.modules())
    return {"layers": layers, **watched.counts}


def one_engine(checkpoint: Path, engine: Engine, folder: Path, others: int) -> None:
    """Starts an engine, waits until all have, and measures in turns; writes its findings to the folder."""
    first_configuration_only()
    begin = time.perf_counter()
    llm = start(checkpoint, engine)
    cache = llm.llm_engine.vllm_config.cache_config
    row: dict[str, Any] = {
        "engine": engine.name,
        "start_s": round(time.perf_counter() - begin),
        "blocks": cache.num_gpu_blocks,
        "concurrency": cache.kv_cache_max_concurrency,
        "page_bytes": cache.mamba_page_size_padded,
    }
    result = folder / f"{engine.name}.json"
    runs = [generate(llm, PROMPTS)[1] for _ in range(2)]
    row |= {"repeats": runs[0] == runs[1], "mixed": runs[0], "even": generate(llm, (64,) * 8)[1]}
    result.write_text(json.dumps(row))
    if engine.watched:
        result.write_text(json.dumps(row | {"watched": watch(llm, engine)}))
    (folder / f"{engine.name}.ready").touch()
    if engine.watched:
        return
    for batch in BATCHES:
        generate(llm, (16,) * batch)
    while len(list(folder.glob("*.ready"))) < others:
        time.sleep(0.2)
    rates: dict[int, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for batch in BATCHES:
            with turn(folder / "lock"):
                seconds, _ = generate(llm, (16,) * batch)
            rates[batch].append(batch * NEW_TOKENS / seconds)
            row["tokens_per_s"] = {batch: round(statistics.median(values)) for batch, values in rates.items()}
            row["spread"] = {batch: [round(min(values)), round(max(values))] for batch, values in rates.items()}
            result.write_text(json.dumps(row))


def all_engines(model: str, engines: list[Engine]) -> list[dict[str, Any]]:
    """A row an engine; one that came to no end has an `error`."""
    folder = Path(tempfile.mkdtemp())
    checkpoint = write_checkpoint(model, folder / "checkpoint")
    running = {}
    for engine in engines:
        environment = {**os.environ}
        if engine.recipe == "plugin_off":
            environment["VLLM_PLUGINS"] = ""
        elif engine.recipe in RECIPES:
            recipe, kinds = folder / f"{engine.recipe}.yaml", zip(("gdn", "kda"), RECIPES[engine.recipe], strict=True)
            rules = ", ".join(f"{{quantizer_name: '*{kind}_state_quantizer', cfg: {{{cfg}}}}}" for kind, cfg in kinds)
            recipe.write_text(f"quantize: {{quant_cfg: [{rules}]}}\n")
            environment["TQ_STATE_RECIPE"] = str(recipe)
        command = [sys.executable, "-m", "perf.state_engine", str(checkpoint), "--engines", engine.name]
        command += ["--folder", str(folder), "--others", str(len(engines))]
        log = (folder / f"{engine.name}.log").open("w")
        running[engine.name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    while any(process.poll() is None for process in running.values()):
        for name, process in running.items():
            if process.poll() is not None:
                (folder / f"{name}.ready").touch()  # nobody waits for what has failed
        time.sleep(0.2)
    rows = []
    for name, process in running.items():
        path = folder / f"{name}.json"
        row = json.loads(path.read_text()) if path.exists() else {"engine": name}
        if process.returncode:
            row["error"] = (folder / f"{name}.log").read_text()[-6000:]
        rows.append({"model": model, **row})
    return rows


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What does not hold."""
    found = [f"{row['engine']}: came to no end" for row in rows if "error" in row]
    by_name = {row["engine"]: row for row in rows if "mixed" in row}
    found += [f"{name}: does not repeat itself" for name, row in by_name.items() if not row["repeats"]]
    for name, row in by_name.items():
        engine = ENGINES[name]
        off, eager = engine._replace(recipe="plugin_off").name, engine._replace(mode="eager").name
        if engine.recipe == "none" and off in by_name:
            same = all(row[batch] == by_name[off][batch] for batch in ("mixed", "even"))
            found += [] if same else [f"{name}: differs from {off}"]
        if engine.mode == "graphs" and eager in by_name:
            found += [] if row["even"] == by_name[eager]["even"] else [f"{name}: differs from {eager}"]
        if engine.recipe in RECIPES and off in by_name and row["mixed"] == by_name[off]["mixed"]:
            found.append(f"{name}: rounding makes no difference")
        seen = row.get("watched")
        if seen is not None:
            calls = sum(count for key, count in seen.items() if key.startswith("roundings_"))
            found += [f"{name}: {key} {count}" for key, count in seen.items() if key.startswith("wrong_") and count]
            if calls < seen["layers"] * seen["steps"] or not seen["layers"] or not seen["prompts_continued"]:
                found.append(f"{name}: {calls} roundings in {seen['steps']} steps of {seen['layers']} layers")
            if engine.drafts and not seen["later_columns"]:
                found.append(f"{name}: no draft was accepted")
    return [f"{rows[0]['model']}: {each}" for each in found]


def main(
    models: Annotated[str, typer.Argument(help="Names with commas between them.")] = ",".join(MODELS),
    engines: Annotated[str, typer.Option(help="Those to run, all by default.")] = ",".join(ENGINES),
    out: Path | None = None,
    folder: Path | None = None,
    others: int = 0,
) -> None:
    """Runs the engines of each model; `folder` and `others` are for the processes it starts."""
    chosen = [ENGINES[name] for name in engines.split(",")]
    if folder:
        one_engine(Path(models), chosen[0], folder, others)
        return
    rows, wrong = [], []
    for model in models.split(","):
        found = all_engines(model, chosen)
        rows, wrong = rows + found, wrong + failures(found)
        document = provenance("perf.state_engine") | {
            "method": f"median of {ROUNDS} turns, 16 prompt and {NEW_TOKENS} new tokens, greedy, states as the recipe "
            "says, native kernels in their first configuration, random weights",
            "failures": wrong,
        }
        short = [{key: value for key, value in row.items() if key not in ("mixed", "even")} for row in rows]
        write(out or gpu_folder() / "state_engine.json", document, short)
    for row in short:
        print(json.dumps(row))
    print(*wrong, sep="\n")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
