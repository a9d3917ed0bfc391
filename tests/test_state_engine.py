"""Recurrent states in a running vLLM: on a CPU, with its Triton kernels of GDN stood in for (`state_engine.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("safetensors")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).with_name("state_engine.py")
ENGINES = "plugin_off-eager,none-eager,int8-eager,int8-eager-apart,packed-eager,replay-eager"
PACKED_KERNEL = "fused_recurrent_gated_delta_rule_packed_decode"
REFUSED = {
    "packed-eager-drafts3": "drafts are verified on states in 4 slots; disable speculative decoding",
    "int8-eager-bfloat16": "its states are torch.bfloat16 and ModelOpt rounds float32",
}


@pytest.fixture(scope="module")
def found():
    """What the engines found, all of them run at once."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("TQ_STATE_RECIPE", None)
    command = [sys.executable, str(SCRIPT), "600", ",".join([ENGINES, *REFUSED])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, (done.stdout + done.stderr)[-4000:]
    return json.loads(results[0])


@pytest.fixture(scope="module")
def engines(found):
    return {row["engine"].replace("-eager", ""): row for row in found["rows"]}


def test_nothing_fails(found):
    assert found["failures"] == []


def test_every_engine_repeats_itself(engines):
    assert all(engines[name.replace("-eager", "")]["repeats"] for name in ENGINES.split(","))


def test_engines_take_turns(engines):
    rows = [engines[name.replace("-eager", "")] for name in ENGINES.split(",")]
    assert all(row["turns"] == 1 and set(row["tokens_per_s"]) == {"1", "2"} for row in rows)


@pytest.mark.parametrize("name", REFUSED)
def test_engines_that_could_not_do_it_do_not_start(engines, name):
    assert REFUSED[name] in engines[name.replace("-eager", "")]["refused"]


def test_without_a_recipe_nothing_differs(engines):
    assert engines["none"]["mixed"] == engines["plugin_off"]["mixed"]


@pytest.mark.parametrize("name", ["int8", "int8-apart"])
def test_every_state_that_is_read_is_rounded_and_nothing_else(engines, name):
    """Once a layer and step; whichever kernel reads it, that of chunks, of decodes, or of decodes that meet chunks.
    That of decodes alone rounds itself, unless it is told not to."""
    seen = engines[name]["watched"]
    layers, way = seen["layers"], "decode" if name == "int8-apart" else "inside"
    assert layers == 3 and {key: count for key, count in seen.items() if key.startswith("wrong_") and count} == {}
    assert seen["roundings_prefill"] + seen[f"roundings_{way}"] == layers * seen["steps"]
    assert seen["prompts_continued"] > 0 and seen["nonzero_states_read"] > 0
    for kernel in ("fla_chunk_gated_delta_rule", "fused_sigmoid_gating_delta_rule_update"):
        assert seen[f"read_by_{kernel}"] > 0, kernel
    assert (seen.get(f"read_by_{PACKED_KERNEL}", 0) > 0) == (name == "int8-apart")
    assert seen.get("elements_after_steps", 0) > 0 or name == "int8-apart"
    assert engines[name]["mixed"] != engines["none"]["mixed"]


@pytest.mark.parametrize("form", ["packed", "replay"])
def test_packed_states_are_served(engines, form):
    """Close to fp32: each prompt's first token is the same, and most others; in fewer bytes, as vLLM counts them."""
    packed, plain = ([tokens for tokens, _ in engines[name]["mixed"]] for name in (form, "none"))
    assert [tokens[0] for tokens in packed] == [tokens[0] for tokens in plain]
    same = [ours == theirs for pair in zip(packed, plain, strict=True) for ours, theirs in zip(*pair, strict=True)]
    assert sum(same) > 0.75 * len(same) and engines[form]["mixed"] != engines["none"]["mixed"]
    assert engines[form]["state_bytes"] < engines["none"]["state_bytes"]
