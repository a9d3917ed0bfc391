"""Tuned tables: their keys, found, applied, and never in the way of a call."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from helpers import DEVICE
from tuned import HIDDEN, OTHER, key_of, norm_arguments, put_table

import tq
from tq.kernels import cut, plan, tables, tuning
from tq.kernels.tuning import Key, RowConfig

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


# The search, by a clock that is told


# TQ_AUTOTUNE


# The command


# What is shipped

SHIPPED_FOLDER = tables.FOLDER


@pytest.mark.parametrize("path", sorted(SHIPPED_FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables(path):
    """Readable, of this form, and the heuristic within a tenth of them."""
    document, table = tables.read(path), tables.table(path)
    assert len(table) == len(document["rows"]) and all(run["clocks_mhz"] and run["date"] for run in document["runs"])
    assert max(row["gain"] for row in document["rows"]) <= 1.10


def test_tables_travel_with_the_package():
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    (line,) = re.findall(r"^tq = (\[.*\])$", project.read_text(), re.MULTILINE)
    package = Path(tables.__file__).parents[1]
    assert (SHIPPED_FOLDER / "any.json").relative_to(package).match("kernels/tuned/*.json")
    assert "kernels/tuned/*.json" in json.loads(line)
