"""`tq tune`: tables written, resumed and put together, with a clock that is told what to say."""

from __future__ import annotations

import itertools
import json

import pytest
from tuned import GPU, HIDDEN, OTHER, clock, key_of, norm_arguments
from typer.testing import CliRunner

import tq
from tq.bench import ahead, provenance
from tq.cli import tune
from tq.kernels import tables


@pytest.fixture
def command(monkeypatch):
    """Runs `tq tune` with a made-up clock, and without a compiler."""
    monkeypatch.setattr(ahead, "compile_all", lambda todo: todo)
    monkeypatch.setattr(provenance.torch.cuda, "get_device_name", lambda *given: "Made-up GPU")
    ticks = itertools.cycle(({"sm": 1980, "mem": 3201}, {"sm": 1755, "mem": 3201}))
    monkeypatch.setattr(provenance, "clocks", lambda: next(ticks))
    monkeypatch.setattr(tune, "CLOCKS_EVERY", 1)
    app = tune.typer.Typer()
    app.command()(tune.tune)

    def run(*options, time_of=lambda config: 1.0 if config == OTHER else 1.5):
        clock(monkeypatch, time_of)
        result = CliRunner().invoke(app, ["--tokens", "16,1", "--sizes", str(HIDDEN), *options])
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    return run


SMALL = "--producers", "rms_norm,silu_mul", "--schemes", "fp8_token,mxfp8"


def test_the_table_goes_round(command, asked):
    """Searched, written, read, looked up, launched."""
    said = command(*SMALL)
    path = tables.FOLDER / f"{GPU}.json"
    document = tables.read(path)
    run = document["runs"][0]
    assert document["gpu"] == GPU and run["clocks_mhz"] == {"sm": [1755, 1980], "mem": [3201, 3201]}
    assert run["date"] and run["command"].startswith("python -m tq") and run["versions"]["triton"]
    assert len(document["rows"]) == 6 and f"{path}: 6 of 6 keys" in said
    lines = path.read_text().splitlines()
    assert len([line for line in lines if '"template"' in line]) == 6, "one line an entry"
    keys = [tables.entry(row)[0] for row in document["rows"]]
    assert keys == sorted(keys) and set(tables.table(path)) == set(keys)
    (x, weight), _ = norm_arguments()
    tq.rms_norm(x, weight, scheme="fp8_token")
    chosen = tables.table(path)[key_of("rms_norm", "fp8_token", residual=None)]
    assert asked.pop() == chosen
    gains = {tables.entry(row)[1]: row["gain"] for row in document["rows"]}
    assert gains[OTHER] == 1.5 and "1.500" in said


def test_runs_are_put_together(command):
    command("--producers", "rms_norm", "--schemes", "fp8_token")
    path = tables.FOLDER / f"{GPU}.json"
    command("--producers", "silu_mul", "--schemes", "fp8_token")
    document = tables.read(path)
    assert [row["run"] for row in document["rows"]] == [1, 0, 0] and len(document["runs"]) == 2
    command(*SMALL[:2], "--schemes", "fp8_token")
    document = tables.read(path)
    assert {row["run"] for row in document["rows"]} == {0} and len(document["runs"]) == 1, "nothing is left of the old"


def test_resuming_leaves_out_what_is_there(command):
    command("--producers", "rms_norm", "--schemes", "fp8_token")
    assert "1 of 1 keys" in command("--producers", "rms_norm,silu_mul", "--schemes", "fp8_token", "--resume")
    assert "0 of 0 keys" in command("--producers", "rms_norm,silu_mul", "--schemes", "fp8_token", "--resume")
    assert len(tables.table(tables.FOLDER / f"{GPU}.json")) == 3


def test_time_runs_out(command):
    assert "0 of 2 keys" in command("--producers", "rms_norm", "--schemes", "fp8_token", "--minutes", "-1")
    assert not (tables.FOLDER / f"{GPU}.json").exists()


def test_a_table_is_written_elsewhere(command, tmp_path):
    command("--producers", "quantize", "--schemes", "fp8_token", "--out", str(tmp_path / "there" / "table.json"))
    assert len(json.loads((tmp_path / "there" / "table.json").read_text())["rows"]) == 1


def test_there_must_be_a_gpu(monkeypatch):
    monkeypatch.setattr(tables, "gpu_of", lambda device: None)
    with pytest.raises(tune.typer.BadParameter, match="there must be a GPU"):
        tune.tune()
