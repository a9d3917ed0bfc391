"""vLLM on a GPU with hybrid models, with states as they are, rounded and packed: agreement, what is rounded, and speed.

    python -m perf.state_engine [MODELS] [--engines NAMES] [--out perf/results/<gpu>/state_engine.json]

Random weights (`perf.state_checkpoints`), greedy, token ids in and out. All engines start together and take turns.
Prompts are longer than a step may be, so that they are continued and meet decodes of others. What must hold: a run
repeats itself; without a recipe nothing differs from a run without the plugin; captured graphs give what eager steps of
the same kernels give; in watched engines every state that a call reads is rounded as ModelOpt rounds it, and nothing
else in the cache changes; a page of packed states is at most 0.35 of one of fp32.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_KIMI_K3_GEMM_AR", "0")  # wants CUTLASS in Python
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # CUDA starts in engines, not before them

import typer

from perf.engine_process import turn
from perf.provenance import gpu_folder, provenance, write
from perf.state_checkpoints import MODELS, write_checkpoint
from perf.state_verdict import CODES, ENGINES, RECIPES, Engine, failures

NEW_TOKENS, ROUNDS = 32, 3
BATCHES = (1, 64, 256)
STEP = 512  # tokens of a step
PROMPTS = (1, 33, 500, 1300, 7, 700)  # some go on while others decode
CACHE = 5 << 29  # bytes, of every engine that is timed
ATTENTION = {"qwen3_next": "TRITON_ATTN", "kimi_linear": "TRITON_MLA"}


def runs(model: str, engine: Engine) -> bool:
    """vLLM 0.33's layer of Kimi-Linear has fp32 states, whatever is asked for."""
    return model != "kimi_linear" or engine.state == "float32"


def import_vllm() -> None:
    """What all engines share, before they are forked; kernels of vLLM that are tuned while they run may add in another
    order in each process, so none is tuned."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def with_one(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        original(self, fn, arg_names, configs[:1], *args, **kwargs)

    Autotuner.__init__ = with_one  # type: ignore[method-assign]
    from vllm import LLM, SamplingParams  # noqa: F401


def prepare(model: str, folder: Path) -> None:
    """Writes a checkpoint, and lets vLLM look at the class of the model, which it remembers."""
    write_checkpoint(model, folder)
    from vllm import ModelRegistry

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    ModelRegistry.models[name].inspect_model_cls()


def start(checkpoint: Path, model: str, engine: Engine) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {"enforce_eager": engine.mode == "eager"}
    if engine.mode != "eager":
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 8, 64, 256]}
    if engine.mode == "graphs":
        options["compilation_config"] = {
            "cudagraph_capture_sizes": [1, 4, 8], "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
        }  # fmt: skip
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
        gpu_memory_utilization=0.01,
        kv_cache_memory_bytes=CACHE if engine.timed else 1 << (28 if engine.watched else 29),
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


def one_engine(folder: Path, model: str, engine: Engine, timed: int, environment: dict[str, str]) -> None:
    """In a process of its own: starts, waits until all have, and is timed in turns; writes what it finds as it goes."""
    os.environ.update(environment)
    path = folder / f"{model}.{engine.name}"
    log = path.with_name(f"{path.name}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    row: dict[str, Any] = {"model": model, "engine": engine.name}

    def note(**found: Any) -> None:
        row.update(found)
        path.with_name(f"{path.name}.json").write_text(json.dumps(row))

    begin = time.perf_counter()
    llm = start(folder / model, model, engine)
    cache = llm.llm_engine.vllm_config.cache_config
    note(start_s=round(time.perf_counter() - begin), cache_bytes=cache.kv_cache_memory_bytes)
    note(state_slots=cache.num_gpu_blocks, requests=cache.kv_cache_max_concurrency, block_tokens=cache.block_size)
    note(mixed=generate(llm, PROMPTS)[1], even=generate(llm, (64,) * 8)[1])
    note(repeats=row["mixed"] == generate(llm, PROMPTS)[1])
    if engine.watched:
        note(watched=watch(llm, engine))
    if not engine.timed:
        return
    for batch in BATCHES:
        generate(llm, (2,) * batch)
    path.with_name(f"{path.name}.ready").touch()
    while len(list(folder.glob("*.ready"))) < timed:
        time.sleep(0.2)
    rates: dict[int, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for batch in BATCHES:
            with turn(folder / "lock"):
                seconds, _ = generate(llm, (2,) * batch)
            rates[batch].append(batch * NEW_TOKENS / seconds)
            note(tokens_per_s={size: round(statistics.median(values)) for size, values in rates.items()})
            note(spread={size: [round(min(values)), round(max(values))] for size, values in rates.items()})


def environment_of(engine: Engine, folder: Path) -> dict[str, str]:
    if engine.recipe == "plugin_off":
        return {"VLLM_PLUGINS": ""}
    if engine.recipe == "none":
        return {}
    kinds = zip(("gdn", "kda"), RECIPES[engine.recipe], strict=True)
    rules = ", ".join(f"{{quantizer_name: '*{kind}_state_quantizer', cfg: {{{cfg}}}}}" for kind, cfg in kinds)
    path = folder / f"{engine.recipe}.yaml"
    path.write_text(f"quantize: {{quant_cfg: [{rules}]}}\n")
    return {"TQ_STATE_RECIPE": str(path)}


def all_engines(models: list[str], engines: list[Engine], patience: float) -> list[dict[str, Any]]:
    """A row an engine; one that came to no end in so many seconds has an `error`."""
    folder, fork = Path(tempfile.mkdtemp()), multiprocessing.get_context("fork")
    chosen = [(model, engine) for model in models for engine in engines if runs(model, engine)]
    import_vllm()
    with fork.Pool(len(models)) as pool:
        pool.starmap(prepare, [(model, folder / model) for model in models])
    timed = sum(engine.timed for _, engine in chosen)
    running = {}
    for model, engine in chosen:
        given = folder, model, engine, timed, environment_of(engine, folder)
        running[f"{model}.{engine.name}"] = process = fork.Process(target=one_engine, args=given)
        process.start()
    limit = time.monotonic() + patience
    while any(process.is_alive() for process in running.values()) and time.monotonic() < limit:
        for name, process in running.items():
            if not process.is_alive() and ENGINES[name.split(".")[1]].timed:
                (folder / f"{name}.ready").touch()  # nobody waits for what has failed
        time.sleep(0.2)
    rows = []
    for name, process in running.items():
        if process.is_alive():
            process.kill()
        process.join()
        path, (model, engine_name) = folder / f"{name}.json", name.split(".")
        row = json.loads(path.read_text()) if path.exists() else {"model": model, "engine": engine_name}
        if process.exitcode:
            row["error"] = (folder / f"{name}.log").read_text()[-6000:]
        rows.append(row)
    return rows


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(...) in a process of its own, so that CUDA does not start in this one."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(function, arguments)


def main(
    models: Annotated[str, typer.Argument(help="Names with commas between them.")] = ",".join(MODELS),
    engines: Annotated[str, typer.Option(help="Those to run, all by default.")] = ",".join(ENGINES),
    out: Path | None = None,
    patience: Annotated[float, typer.Option(help="Seconds after which engines are stopped.")] = 900.0,
) -> None:
    """Runs the engines of all models."""
    names = models.split(",")
    rows = all_engines(names, [ENGINES[name] for name in engines.split(",")], patience)
    wrong = [f"{model}: {each}" for model in names for each in failures([row for row in rows if row["model"] == model])]
    document = apart(provenance, "perf.state_engine") | {
        "method": f"median of {ROUNDS} turns, 2 prompt and {NEW_TOKENS} new tokens, greedy, native kernels in their "
        f"first configuration, {CACHE >> 20} MiB of cache; 4 layers, 3 of them recurrent with 32 heads of 128 x 128",
        "failures": wrong,
    }
    short = [{key: value for key, value in row.items() if key not in ("mixed", "even")} for row in rows]
    write(out or apart(gpu_folder) / "state_engine.json", document, short)
    for row in short:
        print(json.dumps({key: value for key, value in row.items() if key != "error"}))
    print(*wrong, sep="\n")
    sys.stdout.flush()
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
