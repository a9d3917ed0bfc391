"""One vLLM engine of `perf.state_engine`, in a process of its own: starts, generates, is timed in turns, and writes
what it finds, with the second at which each stage ended, as it goes."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from perf.engine_time import busy
from perf.engine_turns import alone
from perf.engine_turns import generate as timed_batch
from perf.state_verdict import CODES, RECIPES, Engine

NEW_TOKENS = 32
BATCHES = (1, 64, 256)
TURNS = 15
STEP = 512  # tokens of a step
PROMPTS = (1, 33, 500, 1300, 7, 700)  # some go on while others decode
EVEN = (64,) * 8  # one step
VOCABULARY = 900  # of prompts
CACHE = 5 << 29  # bytes
ATTENTION = {"qwen3_next": "TRITON_ATTN", "kimi_linear": "TRITON_MLA"}
OPTIONS: dict[str, Any] = {  # of LLM, in all engines
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": STEP,
    "max_num_seqs": max(BATCHES),
    "gpu_memory_utilization": 0.03,
    "kv_cache_memory_bytes": CACHE,
    "enable_prefix_caching": False,
    "disable_custom_all_reduce": True,
    "additional_config": {"gdn_prefill_backend": "triton"},  # FlashInfer need not be there
    "seed": 0,
}


class Plan(NamedTuple):
    """folder: of all engines' files. engines: how many there are to wait for. Times as of `time.time()`: begin; turns
    start at `turns` at the latest, and end at `profile`, when GPU times are taken until `end`."""

    folder: Path
    engines: int
    begin: float
    turns: float
    profile: float
    end: float


def environment_of(engine: Engine, folder: Path) -> dict[str, str]:
    """TQ_STATE_RECIPE and others, with the recipe written."""
    steps = {"TQ_DISABLE_BOUNDARIES": "gdn_decode,kda_decode"} if engine.apart else {}
    if engine.recipe == "plugin_off":
        return {"VLLM_PLUGINS": ""}
    if engine.recipe == "none":
        return {}
    kinds = zip(("gdn", "kda"), RECIPES[engine.recipe], strict=True)
    rules = ", ".join(f"{{quantizer_name: '*{kind}_state_quantizer', cfg: {{{cfg}}}}}" for kind, cfg in kinds)
    path = folder / f"{engine.recipe}.yaml"
    path.write_text(f"quantize: {{quant_cfg: [{rules}]}}\n")
    return {"TQ_STATE_RECIPE": str(path)} | steps


def import_vllm() -> None:
    """What all engines share, once; kernels of vLLM that are tuned while they run may add in another order in each
    process, so none is tuned."""
    if "vllm" in sys.modules:
        return
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def with_one(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        original(self, fn, arg_names, configs[:1], *args, **kwargs)

    Autotuner.__init__ = with_one  # type: ignore[method-assign]
    from vllm import LLM, SamplingParams  # noqa: F401


def split_alike(model: str) -> None:
    """vLLM's latent attention adds over as many parts as the longest sequence may have, which is the context's length
    while a graph is captured: with one part, graphs and eager steps add in the same order."""
    if ATTENTION[model] == "TRITON_MLA":
        from vllm.v1.attention.backends.mla import triton_mla

        triton_mla._compute_num_kv_splits = lambda *arguments: 1


def start(checkpoint: Path, model: str, engine: Engine, options: dict[str, Any]) -> Any:
    from vllm import LLM

    given = OPTIONS | {"attention_backend": ATTENTION[model]} | options
    given |= {"mamba_ssm_cache_dtype": engine.state, "tensor_parallel_size": engine.gpus}
    if engine.mode == "graphs":
        given["compilation_config"] = {
            "cudagraph_capture_sizes": [1, 8, 64, 256], "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
        }  # fmt: skip
    elif engine.mode == "default":
        given["compilation_config"] = {"cudagraph_capture_sizes": [1, 8, 64, 256]}
    if engine.drafts:
        given["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": engine.drafts, "prompt_lookup_max": 2, "prompt_lookup_min": 1,
        }  # fmt: skip
    return LLM(str(checkpoint), enforce_eager=engine.mode == "eager", **given)


def generate(llm: Any, lengths: tuple[int, ...], new_tokens: int | None = None) -> tuple[float, list[Any]]:
    """(seconds, token ids and sum of log probabilities of each prompt) of one greedy batch; NEW_TOKENS for None."""
    from vllm import SamplingParams

    count = new_tokens or NEW_TOKENS
    sampling = SamplingParams(max_tokens=count, temperature=0, detokenize=False, ignore_eos=True, logprobs=0)
    prompts = [
        {"prompt_token_ids": [(7 * i + j * j) % VOCABULARY + 3 for j in range(length)]}
        for i, length in enumerate(lengths)
    ]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return seconds, [[list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob] for o in outputs]


def watch(llm: Any, engine: Engine) -> dict[str, int]:
    """What a watched engine did in one batch of prompts."""
    from perf.state_watch import Watch
    from tq.contract import report

    watched = Watch(CODES[engine.recipe])
    (model,) = llm.apply_model(lambda model: model)
    with watched(model):
        generate(llm, PROMPTS)
    layers = sum(hasattr(module, "tq_state_options") for module in model.modules())
    inside = sum(state.reason is None for state in report(model).states)
    return {"layers": layers, "layers_inside": inside, **watched.counts}


def memory(llm: Any, engine: Engine) -> dict[str, Any]:
    """What vLLM made of the bytes it was given. state_bytes: of a request in one layer, without the convolution's; a
    page also has that, and what makes attention's pages as large."""
    cache = llm.llm_engine.vllm_config.cache_config
    found = {
        "cache_bytes": cache.kv_cache_memory_bytes, "state_slots": cache.num_gpu_blocks,
        "requests": cache.kv_cache_max_concurrency, "block_tokens": cache.block_size,
        "page_bytes": cache.kv_cache_memory_bytes // cache.num_gpu_blocks,
    }  # fmt: skip
    if engine.gpus == 1:
        (model,) = llm.apply_model(lambda model: model)
        layer = next(module for module in model.modules() if hasattr(module, "get_state_shape"))
        tensors = list(zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True))[1:]
        found["state_bytes"] = sum(prod(shape) * dtype.itemsize for shape, dtype in tensors)
    return found


def one_engine(model: str, engine: Engine, gpu: int | None, plan: Plan, options: dict[str, Any]) -> None:
    """gpu: the number of the only GPU it sees, None for all."""
    os.environ.update(environment_of(engine, plan.folder))
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    path = plan.folder / f"{model}.{engine.name}"
    log = path.with_name(f"{path.name}.log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    row: dict[str, Any] = {"model": model, "engine": engine.name, "ended_s": {}}

    def note(stage: str, **found: Any) -> None:
        row.update(found)
        row["ended_s"][stage] = round(time.time() - plan.begin)
        partial = path.with_name(f"{path.name}.part")
        partial.write_text(json.dumps(row))
        partial.rename(path.with_name(f"{path.name}.json"))

    import_vllm()
    if engine.gpus == 1:
        split_alike(model)
    note("imported")
    try:
        llm = start(plan.folder / model, model, engine, options)
    except ValueError as error:
        if engine.refused is None:
            raise
        note("refused", refused=str(error).split("says, but ")[-1])
        os._exit(0)
    note("started", **memory(llm, engine))
    note("first", mixed=generate(llm, PROMPTS)[1], even=generate(llm, EVEN)[1])
    note("again", repeats=row["mixed"] == generate(llm, PROMPTS)[1])
    if engine.watched:
        note("watched", watched=watch(llm, engine))
    if engine.timed:
        timed(llm, engine, note, path, plan, gpu or 0)
    log.flush()
    os._exit(0)  # without what an engine does to end in order


def summed_up(turns: dict[int, list[tuple[float, float, float]]]) -> dict[str, Any]:
    """Medians of the turns of each batch; of tokens/s the least and the most too. fast_step_us: of the fastest tenth of
    the steps of a turn, which nothing has disturbed."""
    found: dict[str, Any] = defaultdict(dict)
    for batch, values in turns.items():
        rates, steps, fast = zip(*values, strict=True)
        found["tokens_per_s"][batch] = round(statistics.median(rates))
        found["spread"][batch] = [round(min(rates)), round(max(rates))]
        found["step_us"][batch] = round(statistics.median(steps))
        found["fast_step_us"][batch] = round(statistics.median(fast))
    return found


def timed(llm: Any, engine: Engine, note: Any, path: Path, plan: Plan, gpu: int) -> None:
    """Turns of all batches, one engine on a GPU at a time; then what the GPU does in a step, if the host allows it."""
    place = plan.folder / f"gpu{gpu}"
    place.mkdir(exist_ok=True)
    for batch in BATCHES:
        timed_batch(llm, batch, NEW_TOKENS, prompt_tokens=2)
    path.with_name(f"{path.name}.ready").touch()
    note("ready")
    while len(list(plan.folder.glob("*.ready"))) < plan.engines and time.time() < plan.turns:
        time.sleep(0.2)
    turns: dict[int, list[tuple[float, float, float]]] = {batch: [] for batch in BATCHES}
    while len(turns[BATCHES[0]]) < TURNS and time.time() < plan.profile:
        with alone(place):
            if time.time() > plan.profile and turns[BATCHES[0]]:
                break
            for batch in BATCHES:
                done = timed_batch(llm, batch, NEW_TOKENS, prompt_tokens=2)
                steps = statistics.median(done.steps_us), statistics.quantiles(done.steps_us, n=10)[0]
                turns[batch].append((batch * NEW_TOKENS / done.seconds, *steps))
        note("turns", turns=len(turns[BATCHES[0]]), **summed_up(turns))
    if engine.mode == "eager":
        return
    with alone(place):
        if time.time() < plan.end:
            note("profile", **busy(llm, "decode", max(BATCHES), prompt_tokens=2))
