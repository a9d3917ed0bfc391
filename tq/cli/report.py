"""`python -m tq report`: pictures of the committed results."""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tq.bench.timing import LARGE_BYTES

OURS = "tq"
PEER_NAMES = {
    "tq": "tq",
    "vllm": "vLLM's op",
    "inductor": "Inductor",
    "inductor_dynamic": "Inductor, any number of tokens",
    "helion": "vLLM's Helion kernel",
    "flashinfer": "FlashInfer",
}
FEW_TOKENS = 16
MOST_CELLS_WITH_NUMBERS = 24  # side by side
WIDTH, DPI = 9.0, 100  # inches, dots per inch

Rows = list[dict[str, Any]]


def peers_of(rows: Rows) -> list[str]:
    """Who was measured beside tq."""
    return sorted({name.removesuffix("_spread") for row in rows for name in row if name.endswith("_spread")} - {OURS})


def unique(rows: Rows, name: str) -> list[Any]:
    """Values of a column: numbers ascending, names as they come."""
    values = list(dict.fromkeys(row[name] for row in rows))
    return sorted(values) if values and not isinstance(values[0], str) else values


def by_producer(rows: Rows) -> dict[str, Rows]:
    groups: dict[str, Rows] = defaultdict(list)
    for row in rows:
        groups[row["producer"]].append(row)
    return groups


def speedups(rows: Rows, peer: str) -> dict[tuple[str, int, int], float]:
    """Times faster than `peer`, by (scheme, hidden size, tokens)."""
    return {(row["scheme"], row["hidden_size"], row["rows"]): row[peer] / row[OURS] for row in rows if row.get(peer)}


def heat_map(document: dict[str, Any], peer: str) -> Any:
    """Speedup over one peer: a block for each producer, a line for each scheme, a column for each shape."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    blocks = {}
    for producer, rows in by_producer(document["rows"]).items():
        found = speedups(rows, peer)
        if found:
            blocks[producer] = (found, list(dict.fromkeys(scheme for scheme, _, _ in found)), rows)
    heights = [len(schemes) + 2.2 for _, schemes, _ in blocks.values()]
    figure, axes = plt.subplots(
        len(blocks),
        1,
        figsize=(WIDTH, 0.19 * sum(heights) + 0.5),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    most = max(len({shape[1:] for shape in found}) for found, _, _ in blocks.values())
    image: Any = None
    for axis, (producer, (found, schemes, rows)) in zip(axes[:, 0], blocks.items(), strict=True):
        sizes, tokens = unique(rows, "hidden_size"), unique(rows, "rows")
        shapes = [(size, count) for size in sizes for count in tokens]
        cells = [[found.get((scheme, *shape), math.nan) for shape in shapes] for scheme in schemes]
        # Below 1 red, above it green; the same for all blocks.
        image = axis.imshow(cells, cmap="RdYlGn", norm=LogNorm(1 / 3, 3), aspect="auto")
        if len(shapes) <= MOST_CELLS_WITH_NUMBERS:
            for y, line in enumerate(cells):
                for x, value in enumerate(line):
                    if value == value:
                        dark = value > 2.2 or value < 0.45
                        shown, color = f"{value:.1f}" if value >= 1.05 else f"{value:.2f}", "white" if dark else "black"
                        axis.text(x, y, shown, ha="center", va="center", fontsize=6, color=color)
        axis.set_yticks(range(len(schemes)), schemes, fontsize=7)
        axis.set_xticks(range(len(shapes)), [str(count) for _, count in shapes], fontsize=6)
        axis.set_xlim(-0.5, max(most, len(shapes)) - 0.5)
        axis.tick_params(length=0, pad=2)
        for name in ("top", "right", "bottom", "left"):
            axis.spines[name].set_visible(False)
        axis.set_title(producer, fontsize=8, loc="left", pad=12, fontweight="bold")
        for i, size in enumerate(sizes):
            start = i * len(tokens)
            axis.text(start - 0.4, -0.65, f"hidden size {size}", fontsize=6.5, va="bottom")
            if i:
                axis.axvline(start - 0.5, color="white", linewidth=3)
    axes[-1, 0].set_xlabel("tokens", fontsize=7)
    figure.colorbar(image, ax=axes[:, 0], shrink=0.5, aspect=30, pad=0.01, ticks=[1 / 3, 0.5, 1, 2, 3], format="%.2g")
    figure.axes[-1].minorticks_off()
    figure.axes[-1].tick_params(labelsize=6)
    figure.suptitle(f"Times faster than {PEER_NAMES.get(peer, peer)}", fontsize=10, x=0.01, ha="left")
    return figure


def roofline(document: dict[str, Any]) -> Any:
    """Bytes per second against bytes moved, under the measured bandwidth and the least time of a launch."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(WIDTH * 0.62, 3.4), layout="constrained")
    bandwidth, floor = document["bandwidth_bytes_per_s"], document["launch_floor_us"] * 1e-6
    for producer, rows in by_producer(document["rows"]).items():
        moved = [row["bytes"] for row in rows]
        rates = [row["bytes"] / row[OURS] / 1e6 for row in rows]
        axis.plot(moved, rates, ".", markersize=4, alpha=0.6, label=producer)
    ends = min(row["bytes"] for row in document["rows"]), max(row["bytes"] for row in document["rows"])
    knee = bandwidth * floor
    line = [ends[0], knee, max(ends[1], knee)]
    axis.plot(line, [min(bytes_ / floor, bandwidth) / 1e12 for bytes_ in line], "k-", linewidth=1)
    axis.annotate(f"{bandwidth / 1e12:.2f} TB/s measured", (line[2], bandwidth / 1e12), (0, 5), **LABEL, ha="right")
    axis.annotate(f"an empty launch, {floor * 1e6:.2f} us", (knee / 30, bandwidth / 3e13), (-4, 4), **LABEL, ha="right")
    axis.axvline(LARGE_BYTES, color="grey", linewidth=0.6, linestyle=":")
    axis.set(
        xscale="log", yscale="log", ylim=(None, bandwidth / 5e11), xlabel="bytes that a call must move", ylabel="TB/s"
    )
    axis.set_title("How near to the memory bandwidth", fontsize=10, loc="left")
    axis.legend(fontsize=7, loc="lower right", frameon=False)
    axis.tick_params(labelsize=7)
    return figure


LABEL: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7}


def small_calls(document: dict[str, Any]) -> Any:
    """Time of calls with few tokens, each producer's over all schemes, beside an empty launch."""
    import matplotlib.pyplot as plt

    groups = by_producer([row for row in document["rows"] if row["rows"] <= FEW_TOKENS])
    figure, axes = plt.subplots(1, len(groups), figsize=(WIDTH, 2.8), sharey=True, squeeze=False, layout="constrained")
    names = [OURS, *peers_of(document["rows"])]
    for axis, (producer, rows) in zip(axes[0], groups.items(), strict=True):
        sizes = unique(rows, "hidden_size")
        for i, name in enumerate(names):
            times = [[row[name] for row in rows if row["hidden_size"] == size and row.get(name)] for size in sizes]
            held = [(x + 0.22 * (i - (len(names) - 1) / 2), each) for x, each in enumerate(times) if each]
            middle = [math.exp(sum(map(math.log, each)) / len(each)) for _, each in held]
            places, lowest, highest = [x for x, _ in held], [min(e) for _, e in held], [max(e) for _, e in held]
            axis.vlines(places, lowest, highest, f"C{i}", alpha=0.4)
            axis.plot(places, middle, f"C{i}o", markersize=4, label=PEER_NAMES.get(name, name))
        axis.axhline(document["launch_floor_us"], color="black", linewidth=1, label="an empty launch")
        axis.set_xticks(range(len(sizes)), list(map(str, sizes)), fontsize=7)
        axis.set_title(producer, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("hidden size", fontsize=7)
    axes[0, 0].set_ylabel("us", fontsize=7)
    axes[0, 0].legend(fontsize=6, frameon=False)
    figure.suptitle(
        f"Calls of at most {FEW_TOKENS} tokens: lowest, mean and highest of schemes and tokens",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    return figure


def pictures(document: dict[str, Any]) -> dict[str, Any]:
    """Name of the file -> figure."""
    maps = {f"speedup_{peer}": heat_map(document, peer) for peer in peers_of(document["rows"])}
    return {**maps, "roofline": roofline(document), "small_calls": small_calls(document)}


def save(figure: Any, path: Path, source: str) -> None:
    """A PNG of at most 128 colours, a quarter of the bytes."""
    from PIL import Image, PngImagePlugin

    drawn, told = io.BytesIO(), PngImagePlugin.PngInfo()
    figure.savefig(drawn, dpi=DPI)
    told.add_text("Source", source)
    image = Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    image.save(path, optimize=True, pnginfo=told)


def digest(path: Path) -> str:
    """What a picture says of the data it was drawn from."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def report(
    results: Annotated[Path, typer.Option(help="Folder of a GPU's results, with rows.json.")] = Path(
        "perf/results/nvidia_h200"
    ),
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("perf/report"),
) -> None:
    """Draw a heat map of the speedup over each peer, a roofline, and the time of small calls."""
    try:
        import matplotlib
    except ImportError as error:
        raise typer.BadParameter("report: matplotlib must be installed, it is not; pip install 'tq[perf]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path = results / "rows.json"
    if not path.exists():
        raise typer.BadParameter(f"report: {results} must have rows.json; write it with python -m perf.sweep")
    document = json.loads(path.read_text(encoding="utf-8"))
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items() if version)
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures(document).items():
        figure.supxlabel(
            f"{document['gpu']}, {document['date']}: {versions}", fontsize=6, color="grey", x=0.99, ha="right"
        )
        save(figure, out / f"{name}.png", digest(path))
        plt.close(figure)
        typer.echo(out / f"{name}.png")
