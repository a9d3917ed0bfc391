"""Engines that are measured turn by turn, and what a turn measures.

A turn is one greedy batch, prompts and all. The host makes quartiles of tokens/s wide, so steps are timed as well:
those of the middle half of a turn, in which the whole batch decodes, and of these the fastest tenth, which nothing has
disturbed; and turns are short and many, so that what is compared was measured within seconds. Sides of one engine
change their order with each turn; of engines in processes of their own none is ever more than a turn ahead.
"""

from __future__ import annotations

import fcntl
import json
import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

PROMPT_TOKENS = 128
BATCHES = (1, 64, 256)
ROUNDS = 15
NEW_TOKENS = {"eager": 24, "compiled": 48}


class Generated(NamedTuple):
    """seconds: of the batch; tokens: the first of its first request; steps_us: of the middle half of its steps."""

    seconds: float
    tokens: list[int]
    steps_us: list[float]


def generate(
    llm: Any,
    batch: int,
    new_tokens: int,
    adapter: Any = None,
    prompt_tokens: int = PROMPT_TOKENS,
    after_step: Callable[[int], None] = lambda count: None,
) -> Generated:
    """One greedy batch. after_step(how many steps there have been) is called after each."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 500 + 3 for j in range(prompt_tokens)]} for i in range(batch)]
    engine, step, ends = llm.llm_engine, llm.llm_engine.step, []

    def timed() -> Any:
        outputs = step()
        ends.append(time.perf_counter())
        after_step(len(ends))
        return outputs

    engine.step = timed
    try:
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        seconds = time.perf_counter() - begin
    finally:
        del engine.step
    middle = ends[len(ends) // 4 : len(ends) - len(ends) // 4]
    steps = [(end - start) * 1e6 for start, end in pairwise(middle)]
    return Generated(seconds, list(outputs[0].outputs[0].token_ids[:8]), steps)


class Findings:
    """Rows of one engine, in its file as soon as they are found."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, []  # type: ignore[var-annotated]

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows += rows
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.rows))
        temporary.rename(self.path)


class Order:
    """Turns of the engines of a folder. An engine is there from `ready` until `leave`; its file has a byte a turn."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.mine = folder, name, folder / f"{name}.turns"

    def ready(self, deadline: float) -> None:
        """Waits for all other engines."""
        self.mine.touch()
        (self.folder / f"{self.name}.ready").touch()
        expected = int((self.folder / "engines").read_text())
        while len(list(self.folder.glob("*.ready"))) < expected and time.time() < deadline:
            time.sleep(0.1)

    @contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Alone, and once no other engine has had fewer turns."""
        while time.time() < deadline and self.mine.stat().st_size > min(self.others(), default=1 << 30):
            time.sleep(0.005)
        with alone(self.folder):
            yield
        with self.mine.open("ab") as file:
            file.write(b".")

    def others(self) -> Iterator[int]:
        """How many turns the other engines have had."""
        for path in self.folder.glob("*.turns"):
            try:
                if path != self.mine:
                    yield path.stat().st_size
            except FileNotFoundError:  # it has left
                continue


def leave(folder: Path, name: str) -> None:
    """Nobody waits for this engine any more."""
    (folder / f"{name}.turns").unlink(missing_ok=True)
    (folder / f"{name}.ready").touch()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One engine at a time."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    time.sleep(0.01)  # let another one have it


def measure(llm: Any, sides: dict[str, Any], order: Order, findings: Findings, deadline: float, mode: str) -> None:
    """A row for each side and batch: turns, [tokens/s, median step, fastest tenth of the steps, in us] each. sides:
    name -> what turns it on."""
    turns: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    tokens: dict[tuple[str, int], list[int]] = {}
    for batch in BATCHES:
        for enter in sides.values():
            enter()
            generate(llm, batch, NEW_TOKENS[mode])
    order.ready(deadline - 45)
    try:
        for number in range(ROUNDS * len(BATCHES)):
            batch, names = BATCHES[number % len(BATCHES)], list(sides)
            with order.turn(deadline):
                if time.time() > deadline:
                    break
                for name in names if number % 2 else reversed(names):
                    sides[name]()
                    done = generate(llm, batch, NEW_TOKENS[mode])
                    tokens[name, batch] = done.tokens
                    rate = batch * NEW_TOKENS[mode] / done.seconds
                    steps = statistics.median(done.steps_us), statistics.quantiles(done.steps_us, n=10)[0]
                    turns[name, batch].append([round(value, 1) for value in (rate, *steps)])
    finally:
        leave(order.folder, order.name)
    for (name, batch), values in turns.items():
        findings.add({"engine": name, "batch": batch, "turns": values, "first_tokens": tokens[name, batch]})


def spread(values: list[float], digits: int | None = None) -> list[float]:
    """Lower quartile, median, upper quartile."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(quartile, digits) for quartile in quartiles]


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a scheme and mode, measured ones summed up: quartiles, and beside stock's turn of the same number.

    over_stock, step_over_stock, fast_step_over_stock, gpu_over_stock: above 1 where tq is faster. gpu_share: of a step,
    that the GPU works; held_by: whether that is more than half, so that it is the GPU that holds the speed, or the
    host.
    """
    turns = {(row["engine"], row["batch"]): row["turns"] for row in rows if "turns" in row}
    gpu = {(row["busy"], row["batch"]): row["gpu_us"] for row in rows if "busy" in row}
    found = []
    for row in rows:
        if "turns" not in row:
            found.append(row)
            continue
        here = row["engine"], row["batch"]
        there = row["engine"].replace("_tq", "_stock"), row["batch"]
        rates, steps, fast = zip(*row["turns"], strict=True)
        made = {"engine": here[0], "batch": here[1], "turns": len(rates)}
        made |= {"tokens_per_s": spread(rates), "step_us": spread(steps), "fast_step_us": statistics.median(fast)}
        if here in gpu:
            made["gpu_us"], made["gpu_share"] = gpu[here], round(gpu[here] / statistics.median(steps), 2)
            made["held_by"] = "GPU" if made["gpu_share"] > 0.5 else "host"
        if here != there and there in turns:
            pairs = list(zip(row["turns"], turns[there], strict=False))
            made["over_stock"] = spread([mine[0] / theirs[0] for mine, theirs in pairs], 3)
            made["step_over_stock"] = spread([theirs[1] / mine[1] for mine, theirs in pairs], 3)
            calm = (statistics.median(turn[2] for turn in side) for side in (turns[there], row["turns"]))
            made["fast_step_over_stock"] = round(operator.truediv(*calm), 3)
            if here in gpu and there in gpu:
                made["gpu_over_stock"] = round(gpu[there] / gpu[here], 3)
        found.append(made | {"first_tokens": row["first_tokens"]})
    return found
