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
RULE = "quantize: {{quant_cfg: [{{quantizer_name: '*_state_quantizer', cfg: {{{cfg}}}}}]}}"
INT8 = "num_bits: 8, type: dynamic, axis: [0, 1], narrow_range: true"
PACKED = "num_bits: 8, type: dynamic, axis: [0, 1, 3], packed: true, replay: 4"
ENGINES = {  # environment, recipe, arguments
    "off": ({"TQ_DISABLE": "1"}, None, []),
    "none": ({}, None, []),
    "int8": ({}, INT8, ["--watch", "int8_narrow"]),
    "packed": ({}, PACKED, []),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """What each engine found, all of them run at once."""
    from perf import state_checkpoints as checkpoints

    folder = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"HIDDEN": 64, "INTERMEDIATE": 64, "VOCABULARY": 128, "HEADS": 2, "WIDTH": 32}
        for name, size in sizes.items():
            patch.setattr(checkpoints, name, size)
        checkpoint = checkpoints.write_checkpoint("qwen3_next", folder / "checkpoint")
    running = {}
    for name, (changes, cfg, arguments) in ENGINES.items():
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **changes}
        environment.pop("TQ_STATE_RECIPE", None)
        if cfg is not None:
            environment["TQ_STATE_RECIPE"] = str(folder / f"{name}.yaml")
            (folder / f"{name}.yaml").write_text(RULE.format(cfg=cfg))
        command = [sys.executable, str(SCRIPT), str(checkpoint), *arguments]
        log = (folder / f"{name}.log").open("w")
        running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    found = {}
    for name, process in running.items():
        process.wait(600)
        lines = (folder / f"{name}.log").read_text().splitlines()
        results = [line.removeprefix("RESULT ") for line in lines if line.startswith("RESULT ")]
        assert results, f"{name}: " + "\n".join(lines[-30:])
        found[name] = json.loads(results[0])
    return found


def test_every_engine_repeats_itself(engines):
    for name, found in engines.items():
        assert found["generated"] == found["again"], name


def test_without_a_recipe_nothing_differs(engines):
    assert engines["none"] == engines["off"]


def test_every_state_that_is_read_is_rounded_and_nothing_else(engines):
    """Once a layer and step; whichever kernel reads it, that of chunks, of decodes, or of decodes that meet chunks."""
    seen, layers = engines["int8"]["watched"], engines["int8"]["layers"]
    assert layers == 3 and {key: count for key, count in seen.items() if key.startswith("wrong_") and count} == {}
    assert seen["roundings_prefill"] + seen["roundings_decode"] == layers * seen["steps"]
    assert seen["prompts_continued"] > 0 and seen["nonzero_states_read"] > 0
    for kernel in (
        "fla_chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule_packed_decode",
        "fused_sigmoid_gating_delta_rule_update",
    ):
        assert seen[f"read_by_{kernel}"] > 0, kernel
    assert engines["int8"]["generated"] != engines["none"]["generated"]


def test_packed_states_are_served(engines):
    """Close to fp32: each prompt's first token is the same, and most others."""
    packed, plain = ([tokens for tokens, _ in engines[name]["generated"]] for name in ("packed", "none"))
    assert [tokens[0] for tokens in packed] == [tokens[0] for tokens in plain]
    same = [ours == theirs for pair in zip(packed, plain, strict=True) for ours, theirs in zip(*pair, strict=True)]
    assert sum(same) > 0.75 * len(same) and engines["packed"]["generated"] != engines["none"]["generated"]
