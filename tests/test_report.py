"""The pictures are drawn from the results, are those of the committed data, and are small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="the pictures need the extra perf")
from PIL import Image
from typer.testing import CliRunner

from tq.bench.provenance import write
from tq.cli import report

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "perf/results/nvidia_h200/rows.json", ROOT / "perf/report"
MOST_BYTES = 150_000
HEAD = {
    "gpu": "Made-up GPU",
    "date": "2026-01-02",
    "versions": {"tq": "0.0", "vllm": None},
    "bandwidth_bytes_per_s": 1e12,
    "launch_floor_us": 1.0,
}


def row(producer="quantize", scheme="fp8_token", rows=1, hidden_size=256, tq=2.0, vllm=3.0, **more):
    spreads = {"tq_spread": 0.1, "vllm_spread": 0.1}
    sizes = {"rows": rows, "hidden_size": hidden_size, "bytes": 1000 * rows}
    return {"producer": producer, "scheme": scheme, **sizes, "tq": tq, "vllm": vllm, **spreads, **more}


def run(*options):
    app = report.typer.Typer()
    app.command()(report.report)
    return CliRunner().invoke(app, list(map(str, options)))


def test_speedups_are_ratios_of_what_was_measured():
    rows = [row(), row(rows=16, tq=4.0), row(scheme="fp8_group128", vllm=None)]
    assert report.speedups(rows, "vllm") == {("fp8_token", 256, 1): 1.5, ("fp8_token", 256, 16): 0.75}
    assert report.peers_of(rows) == ["vllm"]


def test_a_heat_map_has_a_cell_for_each_shape():
    """By hidden size, then tokens; nothing where the peer has no such op, and no line for a scheme it never has."""
    rows = [
        row(scheme=scheme, rows=count, hidden_size=size, tq=2.0 * size / 256, vllm=None if scheme == "mxfp8" else 3.0)
        for scheme in ("fp8_tensor", "fp8_token", "mxfp8")
        for size in (512, 256)
        for count in (16, 1)
        if (scheme, size) != ("fp8_token", 512)
    ]
    figure = report.heat_map(HEAD | {"rows": rows}, "vllm")
    axis = figure.axes[0]
    cells = axis.images[0].get_array()
    assert cells.shape == (2, 4)
    assert cells[0].tolist() == [1.5, 1.5, 0.75, 0.75] and cells[1, :2].tolist() == [1.5, 1.5]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["fp8_tensor", "fp8_token"]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1", "16", "1", "16"]
    shown = [text.get_text() for text in axis.texts]
    assert shown.count("1.5") == 4 and shown.count("0.75") == 2 and "hidden size 512" in shown


def test_the_roofline_is_the_lower_of_both_bounds():
    rows = [row(rows=count, tq=1.0 + count / 1e3) for count in (1, 1000, 100_000)]
    figure = report.roofline(HEAD | {"rows": rows})
    points, bound, *_ = figure.axes[0].lines
    # 1 us and 1 TB/s meet at 1 MB.
    assert list(bound.get_xdata()) == [1e3, 1e6, 1e8] and list(bound.get_ydata()) == pytest.approx([1e-3, 1.0, 1.0])
    assert list(points.get_ydata()) == pytest.approx([0.001 / 1.001, 0.5, 0.1 / 0.101])


def test_small_calls_stand_over_an_empty_launch():
    rows = [row(rows=count, tq=count + 1.0, vllm=8.0) for count in (1, 7, 17)]
    axis = report.small_calls(HEAD | {"rows": rows}).axes[0]
    lines = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    assert lines["tq"] == pytest.approx([4.0]) and lines["vLLM's op"] == pytest.approx([8.0])
    assert lines["an empty launch"] == [1.0, 1.0]


def test_the_command_draws_all_of_them(tmp_path):
    write(tmp_path / "rows.json", HEAD, [row(), row(rows=16)])
    result = run("--results", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    drawn = sorted(path.stem for path in (tmp_path / "out").iterdir())
    assert drawn == ["roofline", "small_calls", "speedup_vllm"]
    for name in drawn:
        with Image.open(tmp_path / "out" / f"{name}.png") as image:
            assert image.text["Source"] == report.digest(tmp_path / "rows.json") and image.width > 400


def test_there_must_be_results(tmp_path):
    result = run("--results", tmp_path, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "rows.json" in result.output and not (tmp_path / "out").exists()


def test_the_committed_pictures_are_those_of_the_committed_data():
    peers = report.peers_of(json.loads(RESULTS.read_text())["rows"])
    wanted = {"roofline", "small_calls", *(f"speedup_{peer}" for peer in peers)}
    assert {path.stem for path in PICTURES.iterdir()} == wanted
    for path in PICTURES.iterdir():
        with Image.open(path) as image:
            assert image.text["Source"] == report.digest(RESULTS), "the data changed: run python -m tq report"
        assert path.stat().st_size < MOST_BYTES
        assert f"perf/report/{path.name}" in (ROOT / "README.md").read_text(), "the README shows it"
