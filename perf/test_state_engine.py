"""What `perf.state_engine` says of rows, without an engine."""

from __future__ import annotations

import pytest

from perf.state_engine import last_error, runs, stages
from perf.state_process import environment_of, summed_up
from perf.state_verdict import ENGINES, failures
from tq.state import StateOptions, read_recipe

SEEN = {"layers": 3, "layers_inside": 3, "steps": 2, "roundings_prefill": 3, "roundings_inside": 3}
SEEN |= {"prompts_continued": 1, "nonzero_states_read": 4}
APART = SEEN | {"layers_inside": 0, "roundings_inside": 0, "roundings_decode": 3}


def row(name: str, **changes):
    """Of an engine that did what it must."""
    text = "rounded" if ENGINES[name].recipe in ("int8", "packed") else "plain"
    found = {"engine": name, "repeats": True, "mixed": text, "even": text, "page_bytes": 100, "state_bytes": 96}
    found |= {"state_slots": 10} | ({"state_bytes": 25, "state_slots": 40} if ENGINES[name].recipe == "packed" else {})
    return found | ({"watched": APART if ENGINES[name].apart else SEEN} if ENGINES[name].watched else {}) | changes


def test_nothing_is_wrong_with_what_is_right():
    names = "plugin_off-eager", "plugin_off-graphs", "none-eager", "int8-eager", "int8-graphs", "packed-eager"
    names = *names, "int8-eager-apart", "int8-graphs-apart"
    refused = {"engine": "packed-eager-drafts3", "refused": "so disable speculative decoding"}
    assert failures([*map(row, names), refused]) == []


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("none-eager", {"error": "ValueError: no"}, "none-eager: ValueError: no"),
        ("none-eager", {"repeats": False}, "none-eager: does not repeat itself"),
        ("none-eager", {"mixed": "other"}, "none-eager: differs from the engine without the plugin"),
        ("int8-graphs", {"even": "other"}, "int8-graphs: differs from eager steps"),
        ("int8-graphs", {"mixed": "plain"}, "int8-graphs: rounding makes no difference"),
        ("packed-eager", {"state_bytes": 40}, "packed-eager: 40 bytes a state, 96 of fp32"),
        ("packed-eager", {"state_slots": 20}, "packed-eager: 20 slots, 10 of fp32"),
        ("int8-eager", {"watched": SEEN | {"wrong_elements_read": 7}}, "int8-eager: 7 wrong_elements_read"),
        ("int8-eager", {"watched": SEEN | {"roundings_inside": 2}}, "int8-eager: 5 roundings in 2 steps of 3 layers"),
        (
            "int8-eager",
            {"watched": SEEN | {"roundings_decode": 1}},
            "int8-eager: 3 roundings inside decode steps, 1 before them",
        ),
        (
            "int8-eager-apart",
            {"watched": APART | {"roundings_inside": 1}},
            "int8-eager-apart: 1 roundings inside decode steps, 3 before them",
        ),
        (
            "int8-eager",
            {"watched": SEEN | {"layers_inside": 2}},
            "int8-eager: 2 of 3 layers are reported to round inside decode steps",
        ),
        (
            "int8-graphs",
            {"kernels": {"decode_kernel": 3.0, "move_kernel": 1.0}},
            "int8-graphs: decode steps run move_kernel",
        ),
        ("int8-graphs", {"kernels": {"gemm": 3.0}}, "int8-graphs: decode steps run no decode_kernel"),
        ("int8-eager", {"watched": SEEN | {"prompts_continued": 0}}, "int8-eager: no prompts_continued"),
    ],
)
def test_what_is_wrong_is_said(name, changes, said):
    names = {"plugin_off-eager", "plugin_off-graphs", "int8-eager"} - {name}
    assert failures([*map(row, sorted(names)), row(name, **changes)]) == [said]


def test_engines_that_started_or_did_not():
    started = row("packed-eager-drafts3", watched=None)
    del started["watched"]
    assert failures([started]) == ["packed-eager-drafts3: was not refused"]
    assert failures([{"engine": "none-eager"}]) == ["none-eager: generated nothing"]


def test_which_engines_a_machine_can_run():
    models = "qwen3_next", "kimi_linear"
    count = {gpus: sum(runs(model, engine, gpus) for model in models for engine in ENGINES.values()) for gpus in (1, 2)}
    assert count[2] == count[1] + 4
    assert not runs("kimi_linear", ENGINES["plugin_off-graphs-bfloat16"], 1)


@pytest.mark.parametrize("name", ["int8-eager", "packed-graphs", "replay-graphs"])
def test_recipes_are_read_as_meant(name, tmp_path):
    recipe = read_recipe(environment_of(ENGINES[name], tmp_path)["TQ_STATE_RECIPE"])
    packed, granularity = not name.startswith("int8"), "head" if name.startswith("int8") else "value_channel"
    for kind, replay in (("gdn", 16), ("kda", 8)):
        want = StateOptions("int8_narrow", granularity, packed, replay if name.startswith("replay") else 0)
        assert recipe.options(f"model.layers.0.{kind}_state_quantizer") == want


def test_the_last_error_of_a_log():
    assert (
        last_error("a\nTraceback:\nValueError: first\nx.y.MyError: second\nwarnings.warn('late')")
        == "x.y.MyError: second"
    )
    assert last_error("killed") == "killed" and last_error("") == "nothing"


def test_how_far_engines_are():
    rows = [{"ended_s": {"imported": 1, "started": 2}}, {"ended_s": {"imported": 1}, "error": "no"}, {}]
    assert stages(rows) == "1 started, 1 error, 1 ?"


def test_turns_are_summed_up():
    found = summed_up({64: [(100.0, 3.0, 2.0), (120.0, 5.0, 4.0), (110.0, 9.0, 3.0)]})
    assert found["tokens_per_s"] == {64: 110} and found["spread"] == {64: [100, 120]}
    assert found["step_us"] == {64: 5} and found["fast_step_us"] == {64: 3}
