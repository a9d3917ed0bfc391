"""`python -m tq tune`: the table of this machine's GPU."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tq
from tq.bench import ahead, provenance, search
from tq.bench.cases import SIZES, Case
from tq.kernels import tables
from tq.kernels.tuning import Key

METHOD = "CUDA-graph replay, inputs rotated over 200 MB, median, bf16; gain: over the heuristic, mean over tokens"
COMPILED_AT_ONCE = 64  # keys
CLOCKS_EVERY = 8  # keys: to ask is to start a program


def cases_of(
    producers: Sequence[str], schemes: Sequence[str], sizes: Sequence[int], tokens: Sequence[int]
) -> Iterator[Case]:
    """Everything there is to tune, in the order of the names; no names: all of them."""
    for producer in map(tq.PRODUCERS.__getitem__, producers or tq.PRODUCERS):
        for scheme in map(tq.SCHEMES.__getitem__, schemes or tq.SCHEMES):
            for hidden_size in sizes or SIZES[producer.width]:
                for left_out in [producer.optional, ()] if producer.optional else [()]:
                    if not hidden_size % max(scheme.group, scheme.code.per_byte):
                        yield from (Case(producer, left_out, scheme.name, rows, hidden_size) for rows in tokens)


def merged(path: Path, gpu: str, run: dict[str, Any], found: Sequence[search.Found]) -> tuple[dict[str, Any], list]:
    """The document and its rows: those found in this run, and those of earlier runs that it did not look for."""
    earlier = tables.read(path) if path.exists() else {"runs": [], "rows": []}
    rows = {tables.entry(row)[0]: (row, earlier["runs"][row["run"]]) for row in earlier["rows"]}
    for each in found:
        rows[each.key] = ({**each.key._asdict(), **each.config._asdict(), "gain": round(each.gain, 3)}, run)
    runs = [old for old in [*earlier["runs"], run] if any(old is of for _, of in rows.values())]
    places = {id(of): i for i, of in enumerate(runs)}
    lines = [{**row, "run": places[id(of)]} for _, (row, of) in sorted(rows.items())]
    return {"gpu": gpu, "method": METHOD, "runs": runs}, lines


def show(console: Console, found: Sequence[search.Found]) -> None:
    """What was gained over the heuristic, by kind of call."""
    table = Table(box=SIMPLE_HEAD, title="Times faster than the heuristic", title_justify="left")
    for name in ("moments", "bytes", "scale", "keys", "changed", "mean", "most", "at hidden size"):
        table.add_column(name, justify="left" if name == "scale" else "right")
    kinds: dict[tuple, list[search.Found]] = defaultdict(list)
    for each in found:
        kinds[each.key.moments, each.key.row_bytes, each.key.scale].append(each)
    for kind, same in sorted(kinds.items()):
        best = max(same, key=lambda each: each.gain)
        changed = sum(each.gain > 1.0 for each in same)
        cells = (*kind[:2], kind[2], len(same), changed, f"{mean(same):.3f}", f"{best.gain:.3f}", best.key.hidden_size)
        table.add_row(*map(str, cells))
    console.print(table)
    console.print(
        f"{len(found)} keys, {sum(each.tried for each in found)} configurations: {mean(found):.3f} in the mean"
    )


def mean(found: Sequence[search.Found]) -> float:
    return math.exp(sum(math.log(each.gain) for each in found) / len(found)) if found else 1.0


def names(text: str) -> list[str]:
    return text.split(",") if text else []


def tune(
    out: Annotated[Path | None, typer.Option(help="The table; default: that of this GPU, in the package.")] = None,
    producers: Annotated[str, typer.Option(help="Names, with commas between; default all.")] = "",
    schemes: Annotated[str, typer.Option(help="Names, with commas between; default all.")] = "",
    sizes: Annotated[str, typer.Option(help="Hidden sizes; default those that are measured.")] = "",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = ",".join(map(str, search.TOKENS)),
    resume: Annotated[bool, typer.Option(help="Leave out what the table has.")] = False,
    minutes: Annotated[float, typer.Option(help="Start nothing new after so long.")] = math.inf,
) -> None:
    """Find the fastest way to cut each kind of call on this machine's GPU, and write it to the table of that GPU.

    What other runs found stays in the table, unless it is found anew.
    """
    began, console, device = time.monotonic(), Console(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu = tables.gpu_of(device)
    if gpu is None:
        raise typer.BadParameter("tune: there must be a GPU, found none; run it on the machine that is to be tuned")
    for given, known in ((producers, tq.PRODUCERS), (schemes, tq.SCHEMES)):
        if unknown := [name for name in names(given) if name not in known]:
            raise typer.BadParameter(f"tune: names must be of {', '.join(known)}; got {unknown[0]}")
    path = out or tables.FOLDER / f"{gpu}.json"
    numbers = sorted(map(int, names(tokens)), reverse=True)
    todo: dict[Key, Case] = {}
    for case in cases_of(names(producers), names(schemes), list(map(int, names(sizes))), numbers):
        todo.setdefault(search.describe(case)[0], case)
    if resume and path.exists():
        todo = {key: case for key, case in todo.items() if key not in tables.table(path)}
    run: dict[str, Any] = provenance.provenance("tq")
    del run["gpu"]
    seen: dict[str, list[int]] = defaultdict(list)
    found: list[search.Found] = []
    keys = list(todo)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("tuning", total=len(keys))
        for lot in (keys[i : i + COMPILED_AT_ONCE] for i in range(0, len(keys), COMPILED_AT_ONCE)):
            if time.monotonic() - began > 60 * minutes:
                break
            calls = [(todo[key], config) for key in lot for config in search.tried(*search.describe(todo[key]))]
            configs = [ahead.describe(case, config=config) for case, config in calls]
            for i, _ in enumerate(ahead.compile_all(configs)):
                progress.update(task, description=f"compiled {i + 1}/{len(configs)}")
            for key in lot:
                if time.monotonic() - began > 60 * minutes:
                    break
                progress.update(task, description=f"{key.scale} {key.hidden_size}")
                found.append(search.search_case(todo[key], numbers, device))
                for name, clock in provenance.clocks().items() if (len(found) - 1) % CLOCKS_EVERY == 0 else ():
                    seen[name].append(clock)
                progress.advance(task)
                run["clocks_mhz"] = {name: [min(clocks), max(clocks)] for name, clocks in seen.items()}
                provenance.write(path, *merged(path, gpu, run, found))  # whatever ends this leaves a table
    tables.table.cache_clear()
    show(console, found)
    console.print(f"{path}: {len(found)} of {len(keys)} keys tuned", soft_wrap=True)
