"""Says where one result of `perf.sweep` is slower than an earlier one, and fails if it is anywhere.

python -m perf.compare OLD.json NEW.json [--part]
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tq.bench.peers import PEERS

MOST_LOSS = 0.03
SHOWN = 12
PLACE = "producer", "scheme", "rows", "hidden_size"
OURS = "tq"


class Change(NamedTuple):
    """One row in both results: microseconds and their spread."""

    place: tuple
    old: float
    old_spread: float
    new: float
    new_spread: float

    @property
    def ratio(self) -> float:
        """1.03: three percent slower than before."""
        return self.new / self.old

    @property
    def lost(self) -> bool:
        """Slower by more than `MOST_LOSS`, even at the fast end of the new spread and the slow end of the old one."""
        return self.new - self.new_spread > (1 + MOST_LOSS) * (self.old + self.old_spread)


def read(path: Path) -> tuple[dict[str, Any], dict[tuple, dict[str, Any]]]:
    """A document, and its rows by what they measure."""
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = {tuple(row[name] for name in PLACE): row for row in document["rows"] if row.get(OURS)}
    if not rows:
        raise typer.BadParameter(f"compare: {path} must have rows with {OURS!r}, got none; give a result of perf.sweep")
    return document, rows


def changes(old: dict[tuple, dict[str, Any]], new: dict[tuple, dict[str, Any]], name: str = OURS) -> list[Change]:
    """What was measured in both, the greatest loss first."""
    both = [(place, old[place], new[place]) for place in old if place in new]
    found = [
        Change(place, *(row[key] for row in (before, after) for key in (name, f"{name}_spread")))
        for place, before, after in both
        if before.get(name) and after.get(name)
    ]
    return sorted(found, key=lambda change: -change.ratio)


def mean(found: list[Change]) -> str:
    """Geometric mean of new / old, as a change in percent."""
    if not found:
        return "not measured"
    return percent(math.exp(sum(math.log(change.ratio) for change in found) / len(found)))


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def show(console: Console, found: list[Change]) -> None:
    """The losses; where there are none, the rows that came nearest to one."""
    lost = [change for change in found if change.lost]
    title = "Lost" if lost else "Nothing lost; the nearest to it"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in (*PLACE, "old us", "new us", "change"):
        table.add_column(name, justify="left" if name in PLACE[:2] else "right")
    for change in lost[:SHOWN] or found[:3]:
        old, new = (f"{us:.3f} ± {by:.3f}" for us, by in (change[1:3], change[3:5]))
        style = "red" if change.lost else ""
        table.add_row(*map(str, change.place), old, new, percent(change.ratio), style=style)
    console.print(table)
    if len(lost) > SHOWN:
        console.print(f"and {len(lost) - SHOWN} more")


def compare(
    old: Annotated[Path, typer.Argument(help="The earlier result.")],
    new: Annotated[Path, typer.Argument(help="The later one, of the same GPU.")],
    part: Annotated[bool, typer.Option(help="NEW may lack rows of OLD.")] = False,
) -> None:
    """Exit with 1 if a row of NEW is slower than in OLD by over 3 % and outside the recorded spread, or missing."""
    console = Console()
    if not console.is_terminal:
        console.width = 120
    (before, old_rows), (after, new_rows) = read(old), read(new)
    if before["gpu"] != after["gpu"]:
        raise typer.BadParameter(f"compare: both must be of one GPU, got {before['gpu']} and {after['gpu']}")
    found, missing = changes(old_rows, new_rows), [place for place in old_rows if place not in new_rows]
    if not found:
        raise typer.BadParameter("compare: both must have some rows in common, got none")
    show(console, found)
    # A machine that is slower as a whole shows in the peers too.
    peers = ", ".join(f"{peer} {mean(changes(old_rows, new_rows, peer))}" for peer in PEERS if peer != OURS)
    lost = sum(change.lost for change in found)
    console.print(f"{len(found)} rows: {lost} lost; in the mean {OURS} {mean(found)}, {peers}", soft_wrap=True)
    if missing:
        first = " ".join(map(str, missing[0]))
        console.print(f"{len(missing)} rows of {old} are missing, the first {first}", soft_wrap=True)
    raise typer.Exit(1 if lost or (missing and not part) else 0)


if __name__ == "__main__":
    typer.run(compare)
