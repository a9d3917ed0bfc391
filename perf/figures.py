"""Writes the figures of the README from the committed results.

python -m perf.figures
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import tq
from tq.bench.timing import LARGE_BYTES
from tq.cli.report import PEER_NAMES
from tq.kernels.plan import replaced

README = Path("README.md")
RESULTS = Path("perf/results/nvidia_h200")
BEGIN, END = "<!-- figures: begin -->\n", "<!-- figures: end -->"


def geometric_mean(values: list[float]) -> float:
    """exp(mean(log(values)))"""
    return math.exp(sum(map(math.log, values)) / len(values))


def matrix() -> list[str]:
    """Every producer with every scheme, and what vLLM has for the pair."""
    lines = [f"| | {' | '.join(f'`{name}`' for name in tq.PRODUCERS)} |", "|---" * (len(tq.PRODUCERS) + 1) + "|"]
    for scheme in tq.SCHEMES.values():
        cells = []
        for producer in tq.PRODUCERS.values():
            op = replaced(producer, scheme).op
            cells.append("" if scheme.quantizer == "none" else "2" if " + " in op else "1")
        lines.append(f"| `{scheme.name}` | {' | '.join(cell or 'tq' for cell in cells)} |")
    return [
        *lines,
        "",
        "1: stands for one op of vLLM; 2: for two, in turn; tq: vLLM has none. Compared below as far as stated.",
        "",
    ]


def speed(document: dict[str, Any]) -> list[str]:
    """Speedup per producer and scheme, and the share of the bandwidth of the large calls."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in document["rows"]:
        groups[row["producer"], row["scheme"]].append(row)
    peers = [peer for peer in PEER_NAMES if peer != "tq" and any(row.get(peer) for row in document["rows"])]
    over = " | ".join(f"over {PEER_NAMES[peer]}" for peer in peers)
    lines = [f"| producer | scheme | {over} | of bandwidth, >= 64 MiB |", "|---" * (len(peers) + 3) + "|"]
    for (producer, scheme), rows in groups.items():
        cells = []
        for peer in peers:
            ratios = [row[peer] / row["tq"] for row in rows if row.get(peer)]
            spread = (
                f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "no such op"
            )
            cells.append(spread)
        large = [row["bytes"] / row["tq"] * 1e6 for row in rows if row["bytes"] >= LARGE_BYTES]
        share = 100 * min(large) / document["bandwidth_bytes_per_s"]
        lines.append(f"| `{producer}` | `{scheme}` | {' | '.join(cells)} | {share:.0f} % or more |")
    rows = document["rows"]
    tokens = sorted({row["rows"] for row in rows})
    sizes = sorted({row["hidden_size"] for row in rows})
    lines += [
        "",
        f"Geometric mean of the speedup (lowest to highest) over {tokens[0]} to {tokens[-1]} tokens and hidden sizes "
        f"{', '.join(map(str, sizes))}; {document['method']}.",
    ]
    return lines


def engine(document: dict[str, Any]) -> list[str]:
    """Tokens per second with and without the plugin, for each checkpoint."""
    checkpoints: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in document["rows"]:
        checkpoints[row.get("checkpoint") or document["checkpoint"]].append(row)
    lines = []
    for checkpoint, rows in checkpoints.items():
        lines += [f"{checkpoint}:", "", *rates(rows), *agreement(rows), ""]
    methods = "; ".join(f"{mode}: {method}" for mode, method in document["method"].items())
    return [*lines, f"{methods}. tq {document['versions']['tq']}."]


def rates(rows: list[dict[str, Any]]) -> list[str]:
    """A table of tokens per second, and of the part of a step that the host does not hold."""
    rates = {(row["engine"], row["batch"]): row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    gpu = {(row["busy"], row["batch"]): row["gpu_us"] for row in rows if "busy" in row}
    lines = [
        "| engine | batch | new tokens/s, vLLM | vLLM with tq | GPU in a decode step, us, vLLM | vLLM with tq |",
        "|---|---|---|---|---|---|",
    ]
    for mode in ("eager", "compiled"):
        for batch in sorted({batch for _, batch in rates}):
            sides = [(f"{mode}_{name}", batch) for name in ("stock", "tq")]
            if all(side in rates for side in sides):
                cells = [f"{middle} ({low} to {high})" for low, middle, high in map(rates.get, sides)]  # type: ignore
                cells += [str(gpu.get(side, "")) for side in sides]
                lines.append(f"| {mode} | {batch} | {' | '.join(cells)} |")
    return lines


def agreement(rows: list[dict[str, Any]]) -> list[str]:
    """What differs from vLLM's own ops."""
    lines = []
    for row in rows:
        if "agreement" in row:
            residual = f", {row['residual_differ']} residual elements" if "residual_differ" in row else ""
            step = f", by one step of {row['scheme'].split('_')[0]} each" if row.get("worst_step") == 1 else ""
            scales = f", {row['scales_differ']} of {row['scales']:,} scales" if "scales_differ" in row else ""
            lines.append(
                f"\nIn the engine, `{row['agreement']}`: {row['codes_differ']} of {row['codes']:,} codes{scales}"
                f"{residual} differ from those of vLLM's own ops on the same tensors{step}."
            )
    return lines


def figures() -> str:
    """The part of the README between the marks."""
    rows = json.loads((RESULTS / "rows.json").read_text())
    verify = json.loads((RESULTS / "verify.json").read_text())
    versions = ", ".join(f"{name} {version}" for name, version in rows["versions"].items() if version)
    lines = matrix()
    lines += [f"On one {rows['gpu']}, {rows['date']}: {versions}.", "", *speed(rows), ""]
    lines += engine(json.loads((RESULTS / "engine.json").read_text()))
    exhaustive = [row for row in verify["rows"] if "made" in row]
    named = " (named in the data, what became of them in `perf/notes.md`)" if verify["failures"] else ""
    made = sum(row["made"] for row in exhaustive)
    lines += [
        "",
        f"Checked there: {verify['checks']} checks, {verify['failures']} failures{named}, among them {made:,} "
        "encodings, roundings, divisions and reciprocals, all of bf16 and fp16.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Rewrites the README."""
    text = README.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    README.write_text(before + BEGIN + figures() + END + after)


if __name__ == "__main__":
    main()
