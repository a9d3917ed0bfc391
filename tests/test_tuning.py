"""Tuned tables: searched with a clock that is told what to say, found, applied, and never in the way of a call."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from helpers import DEVICE
from typer.testing import CliRunner

import tq
from tq.bench import ahead, provenance, search
from tq.bench.cases import Case
from tq.cli import tune
from tq.kernels import cut, launch, plan, tables, tuning
from tq.kernels.tuning import Key, RowConfig

GPU, HIDDEN = "made_up_gpu", 256
OTHER = RowConfig(2, 128, 2, 1)
STATIC = {"scale": torch.tensor([0.05], device=DEVICE)}


@pytest.fixture(autouse=True)
def gpu(tmp_path, monkeypatch):
    """A GPU of a name of its own, without a table, and nothing known."""
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(search, "_decided", {})
    monkeypatch.setattr(tuning, "AUTOTUNE", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a CPU build has none
    tables.table.cache_clear()
    yield
    tables.table.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """Every configuration that a kernel was launched with."""
    seen = []

    def cut_and_note(*given, real=launch.cut):
        made = real(*given)
        tiling, config = made
        assert (tiling.BLOCK_M.value, tiling.TILES.value) == (config.block_m, config.tiles)
        seen.append(config)
        return made

    monkeypatch.setattr(launch, "cut", cut_and_note)
    return seen


def norm_arguments(rows=3, dtype=torch.bfloat16):
    x, residual = torch.randn(2, rows, HIDDEN, device=DEVICE).to(dtype)
    return (x, torch.ones(HIDDEN, device=DEVICE, dtype=dtype)), residual


def key_of(name, scheme, rows=3, dtype=torch.bfloat16, hidden_size=HIDDEN, **more):
    producer = tq.PRODUCERS[name]
    arguments, options = producer.example(rows, hidden_size, dtype, DEVICE)
    options |= STATIC if scheme == "fp8_tensor" else {}
    return cut.key_of(plan.prepare(producer, arguments, scheme, {**options, **more}))


def put_table(*rows):
    document = {"gpu": GPU, "runs": [{}]}
    lines = [{**key._asdict(), **config._asdict(), "gain": 1.0, "run": 0} for key, config in rows]
    provenance.write(tables.FOLDER / f"{GPU}.json", document, lines)
    tables.table.cache_clear()


# Keys


def test_a_key_says_what_moves_and_what_is_summed():
    assert key_of("quantize", "fp8_token") == Key("quantize_rows", 0, 0, 2, "token", HIDDEN, "few")
    assert key_of("quantize", "fp8_token", dtype=torch.float32).row_bytes == 4
    assert key_of("silu_mul", "fp8_tensor").row_bytes == key_of("swiglu_oai", "fp8_tensor").row_bytes == 4
    assert key_of("rms_norm", "fp8_group128") == Key("quantize_rows", 1, 0, 6, "group128", HIDDEN, "any")
    assert key_of("rms_norm", "fp8_group128", residual=None).row_bytes == 2
    assert key_of("layer_norm", "fp8_token").moments == 2
    assert key_of("qk_norm_rope", "mxfp8").mean_group == 128 and key_of("qk_norm_rope", "mxfp8").row_bytes == 2
    assert key_of("quantize", "fp8_token", data_width=512).hidden_size == 512


@pytest.mark.parametrize("name", tq.PRODUCERS)
def test_the_number_of_tokens_is_no_part_of_a_key_where_sums_are_made(name):
    """Else a token's bits would depend on its batch. Elsewhere there are few of them or many."""
    many = tuning.FEW_ELEMENTS // HIDDEN + 1
    keys = [key_of(name, "fp8_group128", rows) for rows in (1, many - 1, many)]
    assert keys[0] == keys[1]
    assert (keys[1] == keys[2]) == bool(tq.PRODUCERS[name].moments)


def test_returning_y_changes_no_sum():
    assert key_of("rms_norm", "fp8_token", return_unquantized=True) == key_of("rms_norm", "fp8_token")


# Lookup


def test_a_table_is_applied_where_its_key_is_met(asked):
    (x, weight), residual = norm_arguments()
    want, _ = tq.rms_norm(x, weight, scheme="fp8_token", residual=residual)
    before = asked.pop()
    assert before != OTHER
    put_table((key_of("rms_norm", "fp8_token"), OTHER))
    plan._plans.clear()
    for given, expected in ((residual, OTHER), (None, before)):
        tq.rms_norm(x, weight, scheme="fp8_token", residual=given)
        assert asked.pop() == expected
    tq.rms_norm(x, weight, scheme="fp8_group128", residual=residual)
    assert asked.pop() == before
    got, _ = tq.rms_norm(x, weight, scheme="fp8_token", residual=residual)
    assert (got.data.view(torch.uint8) != want.data.view(torch.uint8)).sum() <= 1


def test_another_gpu_has_the_heuristic(asked, monkeypatch):
    put_table((key_of("quantize", "fp8_token"), OTHER))
    monkeypatch.setattr(tables, "gpu_of", lambda device: "another_gpu")
    tq.quantize(torch.randn(3, HIDDEN, device=DEVICE).bfloat16(), scheme="fp8_token")
    assert asked.pop() != OTHER


def test_what_is_forced_comes_before_the_table(asked):
    put_table((key_of("quantize", "fp8_token"), OTHER))
    forced = RowConfig(1, 256, 1, 2)
    with tuning.force(forced):
        tq.quantize(torch.randn(3, HIDDEN, device=DEVICE).bfloat16(), scheme="fp8_token")
    assert asked.pop() == forced


def test_a_planned_call_looks_nothing_up(monkeypatch):
    looked = []
    monkeypatch.setattr(tables, "find", lambda device, key: looked.append(key))
    x = torch.randn(3, HIDDEN, device=DEVICE).bfloat16()
    for _ in range(3):
        tq.quantize(x, scheme="fp8_token")
    assert len(looked) == 1


def test_a_check_adds_in_the_order_of_the_table(monkeypatch):
    """Where sums are made its programs are those of the kernel; where none are, they see whole rows all the same."""
    put_table(
        (key_of("rms_norm", "fp8_group128"), OTHER), (key_of("quantize", "fp8_group128"), RowConfig(1, 128, 1, 1))
    )
    seen = []
    monkeypatch.setattr(cut, "tiling_of", lambda *given, real=cut.tiling_of: seen.append(real(*given)) or real(*given))
    (x, weight), residual = norm_arguments()
    assert tq.check("rms_norm", x, weight, scheme="fp8_group128", residual=residual).ok
    assert len(seen) == 2 and seen[0] == seen[1] and seen[0].BLOCK_M.value == OTHER.block_m
    assert tq.check("quantize", x, scheme="fp8_group128").ok
    assert [tiling.PROGRAMS.value for tiling in seen[2:]] == [2, 1]


@pytest.mark.parametrize(
    "config",
    [RowConfig(1, 128, 1, 1), RowConfig(3, 256, 1, 1), RowConfig(1, 256, 1, 64), RowConfig(1, 96, 3, 1)],
    ids=["leaves out half a row", "rows", "warps", "columns"],
)
def test_a_table_that_cannot_be_right_is_refused(config):
    put_table((key_of("rms_norm", "fp8_token"), config))
    with pytest.raises(ValueError, match="tune again"):
        tq.rms_norm(*norm_arguments()[0], scheme="fp8_token")


def test_a_group_is_never_cut():
    put_table((key_of("quantize", "fp8_group128"), RowConfig(1, 64, 4, 1)))
    with pytest.raises(ValueError, match="cover groups"):
        tq.quantize(torch.randn(3, HIDDEN, device=DEVICE).bfloat16(), scheme="fp8_group128")


# The model


def test_the_model_counts():
    config, key = RowConfig(1, 1024, 4, 4), Key("quantize_rows", 1, 0, 6, "token", 4096, "any")
    # 8 elements a thread in each of 4 tiles: 88 registers of 128 threads, which go 5 times into 65536.
    assert search.model(config, key) == (8.0, 0.0, max(88 * 128 / 65536, 88 / 255), 5 * 4096 * 6)
    assert search.model(config, key._replace(hidden_size=3072)).idle == 0.25
    assert search.model(config._replace(tiles=1), key._replace(hidden_size=1536)).idle == 0.25


@pytest.mark.parametrize("scale", ["tensor", "token", "group16", "group128"])
@pytest.mark.parametrize("hidden_size", [128, 576, 2880, 4096, 14336, 32768])
def test_candidates_can_be_launched(scale, hidden_size):
    for moments, tokens in ((0, "many"), (1, "any")):
        key = Key("quantize_rows", moments, 0, 2, scale, hidden_size, tokens)
        found = search.candidates(key)
        assert len(set(found)) == len(found) <= 64
        assert found
        for config in found:
            assert tables.entry({**key._asdict(), **config._asdict()}) == (key, config)


@pytest.mark.parametrize("hidden_size", [576, 2880, 4096, 5120, 7168, 8192, 14336, 28672])
@pytest.mark.parametrize(("moments", "scale"), [(0, "tensor"), (0, "token"), (0, "group128"), (1, "tensor")])
def test_the_model_keeps_what_was_found_on_a_gpu(moments, scale, hidden_size):
    """The heuristic was found by hand; a model that leaves it out would leave out the best."""
    key = Key("quantize_rows", moments, 0, 2, scale, hidden_size, "any" if moments else "many")
    assert tuning.heuristic(hidden_size, key.least, key.whole_row, False) in search.candidates(key)


def test_the_search_keeps_to_its_tokens():
    key = Key("quantize_rows", 0, 0, 2, "token", 4096, "few")
    assert search.tokens_of(key) == [16, 1]
    assert search.tokens_of(key._replace(tokens="many")) == [8192, 1024, 128]
    assert search.tokens_of(key._replace(tokens="any", moments=1)) == list(search.TOKENS)


# The search, by a clock that is told


def clock(monkeypatch, time_of):
    """time_of(configuration): microseconds. Returns what was asked for."""
    asked = []

    def device_time_us(calls):
        asked.append(tuning.forced())
        return time_of(tuning.forced()), 0.0

    monkeypatch.setattr(search, "device_time_us", device_time_us)
    return asked


def searched(monkeypatch, time_of, tokens=(8, 1), name="rms_norm", scheme="fp8_token"):
    asked = clock(monkeypatch, time_of)
    case = Case(tq.PRODUCERS[name], (), scheme, 1, 4096)
    return search.search_case(case, tokens, DEVICE), asked


def test_the_fastest_wins(monkeypatch):
    best = RowConfig(1, 2048, 2, 8)
    found, asked = searched(monkeypatch, lambda config: 1.0 if config == best else 1.2)
    assert found.config == best and math.isclose(found.gain, 1.2)
    assert set(asked) == set(search.tried(found.key, asked[0])) and found.tried == len(asked) / 2


def test_the_heuristic_stays_within_the_noise(monkeypatch):
    heuristic = tuning.heuristic(4096, 0, True, False)
    found, _ = searched(monkeypatch, lambda config: 1.0 if config == heuristic else 0.995)
    assert found.config == heuristic and found.gain == 1.0


def test_nothing_wins_that_loses_somewhere(monkeypatch):
    """Half the time at the first number of tokens, a tenth more at the second."""
    times = itertools.cycle
    heuristic, seen = tuning.heuristic(4096, 0, True, False), {}

    def time_of(config):
        turn = next(seen.setdefault(config, times((0, 1))))
        return 1.0 if config == heuristic else (0.5, 1.1)[turn]

    found, _ = searched(monkeypatch, time_of)
    assert found.config == heuristic


def test_the_hopeless_are_timed_once(monkeypatch):
    best = RowConfig(1, 2048, 2, 8)
    found, asked = searched(monkeypatch, lambda config: 1.0 if config == best else 2.0, tokens=(8, 4, 2, 1))
    heuristic = asked[0]
    assert all(asked.count(config) == (4 if config in (best, heuristic) else 1) for config in set(asked))
    assert found.config == best


def test_what_triton_cannot_make_is_passed_over(monkeypatch):
    from triton.runtime.errors import OutOfResources

    best, heuristic = RowConfig(1, 2048, 2, 8), tuning.heuristic(4096, 0, True, False)

    def time_of(config):
        if config not in (best, heuristic):
            raise OutOfResources(70000, 65536, "registers")
        return 1.0 if config == best else 2.0

    found, _ = searched(monkeypatch, time_of)
    assert found.config == best


def test_every_candidate_is_run_on_its_own_terms(monkeypatch, asked):
    """What is timed is the kernel, cut as the candidate says."""

    def device_time_us(calls):
        for call in calls:
            call()
        assert asked[-1] == tuning.forced()
        return 1.0, 0.0

    monkeypatch.setattr(search, "device_time_us", device_time_us)
    monkeypatch.setattr(search, "copies_of", lambda call_bytes: 2)
    key = key_of("silu_mul", "fp8_token")
    found = search.search_case(Case(tq.PRODUCERS["silu_mul"], (), "fp8_token", 1, HIDDEN), (3,), DEVICE)
    assert (
        len(asked)
        == found.tried
        == len(search.candidates(key)) + (tuning.heuristic(HIDDEN, 0, True, True) not in search.candidates(key))
    )


# TQ_AUTOTUNE


def running_clock(monkeypatch):
    """Runs what it times, twice, and prefers `OTHER`."""
    timed = []

    def device_time_us(calls):
        timed.append(tuning.forced())
        for call in [*calls, *calls]:
            call()
        return (1.0 if tuning.forced() == OTHER else 2.0), 0.0

    monkeypatch.setattr(search, "device_time_us", device_time_us)
    monkeypatch.setattr(search, "copies_of", lambda call_bytes: 2)
    monkeypatch.setattr(search, "candidates", lambda key: [RowConfig(1, 256, 1, 1), OTHER])
    return timed


def test_nothing_is_timed_unless_asked_for(monkeypatch):
    timed = running_clock(monkeypatch)
    tq.quantize(torch.randn(3, HIDDEN, device=DEVICE).bfloat16(), scheme="fp8_token")
    assert not timed


def test_autotune_times_once_and_leaves_the_tensors_alone(monkeypatch, asked):
    """The residual is written in place: once, and by the call alone."""
    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    timed = running_clock(monkeypatch)
    for rows in (3, 5):
        arguments, residual = norm_arguments(rows)
        kept = [tensor.clone() for tensor in arguments]
        want = arguments[0].float() + residual.float()
        _, new = tq.rms_norm(*arguments, scheme="fp8_token", residual=residual, residual_out=residual)
        assert new is residual and torch.equal(residual, want.bfloat16())
        assert all(map(torch.equal, arguments, kept))
        assert asked[-1] == OTHER
        assert len(timed) == 3, "the key is the same for every number of tokens"


def test_a_table_makes_timing_needless(monkeypatch, asked):
    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    timed = running_clock(monkeypatch)
    put_table((key_of("quantize", "fp8_token"), OTHER))
    tq.quantize(torch.randn(3, HIDDEN, device=DEVICE).bfloat16(), scheme="fp8_token")
    assert not timed and asked == [OTHER]


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch, asked):
    """And what is first seen then keeps the heuristic: a sum must not change its order later."""
    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    timed = running_clock(monkeypatch)
    arguments, _ = norm_arguments()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tq.rms_norm(*arguments, scheme="fp8_token")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plan._plans.clear()
    tq.rms_norm(*arguments, scheme="fp8_token")
    assert not timed and asked[0] == asked[1] != OTHER
    tq.quantize(arguments[0], scheme="fp8_token")
    assert timed and asked[-1] == OTHER


def test_without_memory_for_copies_the_call_goes_on(monkeypatch, asked):
    monkeypatch.setattr(tuning, "AUTOTUNE", True)

    def device_time_us(calls):
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(search, "device_time_us", device_time_us)
    x = torch.randn(3, HIDDEN, device=DEVICE).bfloat16()
    assert tq.quantize(x, scheme="fp8_token").data.shape == x.shape and len(asked) == 1


def test_a_copy_keeps_strides_and_what_is_one():
    producer, memory = tq.PRODUCERS["rms_norm"], torch.randn(4, 3 * HIDDEN, device=DEVICE)
    view = memory[:, HIDDEN : 2 * HIDDEN]
    options = {"residual": view, "residual_out": view, "scale_ub": torch.ones(1, device=DEVICE)}
    arguments = (memory[:, :HIDDEN], torch.ones(HIDDEN, device=DEVICE))
    first = plan.prepare(producer, arguments, "fp8_token", options)
    copy = search.copy_of(first)
    for mine, theirs in zip(copy.bound.args, first.bound.args, strict=True):
        for a, b in zip(*((each if isinstance(each, tuple) else (each,)) for each in (mine, theirs)), strict=True):
            if isinstance(a, torch.Tensor):
                assert a.stride() == b.stride() and torch.equal(a, b)
                assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    assert copy.options["residual"] is copy.options["residual_out"]
    assert torch.equal(copy.inputs.scale_ub, options["scale_ub"]) and copy.inputs.scale_ub is not options["scale_ub"]


# The command


@pytest.fixture
def command(monkeypatch):
    """Runs `tq tune` with a made-up clock, and without a compiler."""
    monkeypatch.setattr(ahead, "compile_all", lambda todo: None)
    monkeypatch.setattr(provenance.torch.cuda, "get_device_name", lambda *given: "Made-up GPU")
    ticks = itertools.cycle(({"sm": 1980, "mem": 3201}, {"sm": 1755, "mem": 3201}))
    monkeypatch.setattr(provenance, "clocks", lambda: next(ticks))
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


# What is shipped

SHIPPED_FOLDER = tables.FOLDER


@pytest.mark.parametrize("path", sorted(SHIPPED_FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables(path):
    """Readable, of this form, and the heuristic within a tenth of them."""
    document, table = tables.read(path), tables.table(path)
    assert len(table) == len(document["rows"]) and all(run["clocks_mhz"] and run["date"] for run in document["runs"])
    assert max(row["gain"] for row in document["rows"]) <= 1.10


def test_tables_travel_with_the_package():
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    (line,) = re.findall(r"^tq = (\[.*\])$", project.read_text(), re.MULTILINE)
    package = Path(tables.__file__).parents[1]
    assert (SHIPPED_FOLDER / "any.json").relative_to(package).match("kernels/tuned/*.json")
    assert "kernels/tuned/*.json" in json.loads(line)
