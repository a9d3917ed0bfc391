"""Two results: what is a loss, and what is not."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from perf import compare
from tq.bench.provenance import write

PLACE = {"producer": "rms_norm", "scheme": "fp8_token", "rows": 16, "hidden_size": 4096}


def row(tq, spread=0.0, vllm=5.0, **place):
    return {**PLACE, **place, "tq": tq, "tq_spread": spread, "vllm": vllm, "vllm_spread": 0.0}


@pytest.fixture
def run(tmp_path):
    """Compares two lists of rows."""
    app = compare.typer.Typer()
    app.command()(compare.compare)

    def run(old, new, *options, gpus=("a", "a")):
        paths = tmp_path / "old.json", tmp_path / "new.json"
        for path, rows, gpu in zip(paths, (old, new), gpus, strict=True):
            write(path, {"gpu": gpu}, rows)
        return CliRunner().invoke(app, [*map(str, paths), *options])

    return run


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ((1.0, 0.0), (1.0, 0.0), False),
        ((1.0, 0.0), (0.5, 0.0), False),
        ((1.0, 0.0), (1.029, 0.0), False),
        ((1.0, 0.0), (1.031, 0.0), True),
        # Slower by 8 %, of which the spreads explain 5.
        ((1.0, 0.02), (1.08, 0.02), True),
        # And where they explain all but 3.
        ((1.0, 0.02), (1.08, 0.03), False),
        ((1.0, 0.05), (1.08, 0.0), False),
        ((100.0, 0.1), (103.3, 0.1), True),
        ((100.0, 0.1), (103.15, 0.1), False),
    ],
)
def test_a_loss_is_more_than_three_percent_outside_the_spread(run, old, new, lost):
    assert compare.Change((), *old, *new).lost == lost
    result = run([row(*old)], [row(*new)])
    assert result.exit_code == int(lost), result.output
    assert f"1 rows: {int(lost)} lost" in result.output


def test_one_loss_among_gains_is_enough_and_is_named(run):
    """It is a loss of its row, whatever the mean is."""
    old = [row(2.0, hidden_size=size) for size in (576, 4096, 8192)]
    new = [row(time, hidden_size=size) for size, time in ((576, 1.0), (4096, 2.2), (8192, 1.0))]
    result = run(old, new)
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if "rms_norm" in line]
    assert "4096" in line and "+10.0 %" in line and "2.200" in line
    assert "tq -35.0 %" in result.output and "vllm +0.0 %" in result.output and "inductor not measured" in result.output


def test_rows_are_told_apart_by_all_that_they_measure(run):
    """In whatever order."""
    places = [{}, {"producer": "silu_mul"}, {"scheme": "mxfp8"}, {"rows": 1}, {"hidden_size": 576}]
    old = [row(1.0 + i, **place) for i, place in enumerate(places)]
    assert run(old, old[::-1]).exit_code == 0
    for i, place in enumerate(places):
        new = [*old[:i], row(1.1 * (1.0 + i), **place), *old[i + 1 :]]
        result = run(old, new[::-1])
        assert result.exit_code == 1 and "5 rows: 1 lost" in result.output


def test_a_missing_row_fails_unless_a_part_is_compared(run):
    old, new = [row(1.0), row(1.0, rows=1)], [row(1.0), row(9.0, rows=77)]
    result = run(old, new)
    assert result.exit_code == 1 and "1 rows of" in result.output and "rms_norm fp8_token 1 4096" in result.output
    assert run(old, new, "--part").exit_code == 0
    assert run(old, [row(2.0)], "--part").exit_code == 1


def test_the_table_is_short(run):
    sizes = range(1, 41)
    result = run([row(1.0, hidden_size=n) for n in sizes], [row(1.0 + n / 10, hidden_size=n) for n in sizes])
    lines = [line for line in result.output.splitlines() if "rms_norm" in line]
    assert len(lines) == compare.SHOWN and "+400.0 %" in lines[0] and "and 28 more" in result.output
    quiet = run([row(1.0, hidden_size=n) for n in sizes], [row(1.0, hidden_size=n) for n in sizes])
    assert len([line for line in quiet.output.splitlines() if "rms_norm" in line]) == 3


@pytest.mark.parametrize(
    ("old", "new", "gpus", "message"),
    [
        ([row(1.0)], [row(1.0)], ("a", "b"), "one GPU"),
        ([row(1.0)], [row(1.0, rows=1)], ("a", "a"), "in common"),
        ([row(1.0)], [row(None)], ("a", "a"), "perf.sweep"),
    ],
)
def test_what_cannot_be_compared_is_said(run, old, new, gpus, message):
    result = run(old, new, gpus=gpus)
    assert result.exit_code == 2 and message in " ".join(result.output.split())
