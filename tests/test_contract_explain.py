"""`python -m tq explain`, and through it the table of forwards on vLLM's own models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tq
from tq.contract import vllm

pytestmark = pytest.mark.vllm
if vllm.unsupported_version() is not None:
    pytest.skip(vllm.unsupported_version(), allow_module_level=True)

cpu_build = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are those of a CPU build of vLLM")
SCRIPT = Path(__file__).with_name("contract_models.py")


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """Family -> [producer's name, consumer, producer, scheme, reason] of its boundaries."""
    folder = tmp_path_factory.mktemp("models")
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    found = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout[-2000:] + done.stderr[-4000:]
    return folder, json.loads(found.group(1))


def layer(i, *names):
    return [f"model.layers.{i}.{name}" for name in names]


DENSE = ("input_layernorm", "post_attention_layernorm", "mlp.act_fn")
EXPERT = ("mlp.shared_expert.act_fn",)
SHARED_MLP = ("input_layernorm", "post_attention_layernorm", "shared_mlp.act_fn")
SHARED = "mlp.shared_experts.act_fn"
Q_A = "self_attn.mla_attn.q_a_layernorm"
FUSED = {
    "LlamaForCausalLM": layer(0, *DENSE) + layer(1, *DENSE),
    "MistralForCausalLM": layer(0, *DENSE) + layer(1, *DENSE),
    "Qwen3MoeForCausalLM": layer(0, *DENSE) + layer(1, "input_layernorm"),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"), layer(0, *DENSE) + layer(1, *DENSE)),
    "Glm4ForCausalLM": layer(0, *DENSE) + layer(1, *DENSE),
    "GraniteForCausalLM": layer(0, *DENSE) + layer(1, *DENSE),
    "DeepseekV3ForCausalLM": layer(0, *DENSE, Q_A) + layer(1, "input_layernorm", Q_A, SHARED),
    "NemotronHForCausalLM": layer(0, "norm") + layer(1, "norm") + layer(2, "norm", "mixer.act_fn"),
    "GraniteMoeHybridForCausalLM": layer(0, *SHARED_MLP) + layer(1, *SHARED_MLP),
    "Qwen3NextForCausalLM": layer(0, "input_layernorm", *EXPERT) + layer(1, "input_layernorm", *EXPERT),
    "GptOssForCausalLM": layer(0, "input_layernorm") + layer(1, "input_layernorm"),
    "GPT2LMHeadModel": [],
}
NOT_FUSED = {
    ("Qwen3MoeForCausalLM", "model.layers.1.post_attention_layernorm"): "the forward of Qwen3MoeSparseMoeBlock is not",
    ("DeepseekV3ForCausalLM", "model.layers.1.post_attention_layernorm"): "the forward of DeepseekV2MoE is not",
}


@cpu_build
@pytest.mark.parametrize("family", FUSED)
def test_boundaries_of_a_family(explained, family):
    boundaries = explained[1][family]
    assert sorted(name for name, *_, reason in boundaries if reason is None) == sorted(FUSED[family])
    assert all((scheme is None) == (reason is not None) for *_, scheme, reason in boundaries)


@cpu_build
@pytest.mark.parametrize(("family", "name"), NOT_FUSED)
def test_reason_of_a_boundary_left_alone(explained, family, name):
    (reason,) = [reason for found, *_, reason in explained[1][family] if found == name]
    assert reason.startswith(NOT_FUSED[family, name])


@cpu_build
@pytest.mark.parametrize("family", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("producer", ["gemma_rms_norm", "gelu_mul"])
def test_gemma_waits_for_its_producers(explained, family, producer):
    boundaries = [boundary for boundary in explained[1][family] if boundary[2] == producer]
    assert len(boundaries) == {"gemma_rms_norm": 4, "gelu_mul": 2}[producer]
    assert {reason is None for *_, reason in boundaries} == {producer in tq.PRODUCERS}
    names = {name.split(".", 3)[3] for name, *_ in boundaries if producer == "gemma_rms_norm"}
    assert names <= {"input_layernorm", "pre_feedforward_layernorm"}  # those after attention feed the residual


def explain(*arguments, **environment):
    command = [sys.executable, "-m", "tq", "explain", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, **environment}
    )


DISABLED = "CPUFP8W8A8ScaledMMLinearKernel,CPUFp8PerTensorScaledMMLinearKernel"


@cpu_build
def test_command_writes_nothing_but_json(explained):
    model = explained[0] / "LlamaForCausalLM"
    done = explain(model / "config.json", "--json", VLLM_DISABLED_KERNELS=DISABLED, TQ_DISABLE_BOUNDARIES="silu_mul")
    found = json.loads(done.stdout)
    assert (done.returncode, found["fused"], len(found["boundaries"]), found["disabled"]) == (0, 4, 6, None)
    first = found["boundaries"][0]
    assert (first["kernel"], first["layout"]) == ("PerTensorTorchFP8ScaledMMLinearKernel", "row_major")
    assert found["boundaries"][2]["reason"] == "switched off by TQ_DISABLE_BOUNDARIES"


@cpu_build
def test_command_names_the_other_readers(explained):
    done = explain(explained[0] / "Qwen3NextForCausalLM", VLLM_DISABLED_KERNELS=DISABLED)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("model.layers.0.input_layernorm")]
    assert " -> model.layers.0.linear_attn.in_proj_qkvz [gemma_rms_norm] fp8_tensor, " in line
    assert line.endswith("; unquantized too, for model.layers.0.linear_attn.in_proj_ba")


@cpu_build
def test_command_in_words_and_a_model_it_cannot_find(explained, tmp_path):
    done = explain(explained[0] / "GptOssForCausalLM", VLLM_DISABLED_KERNELS=DISABLED)
    assert done.returncode == 0 and done.stdout.startswith("2 of 4 boundaries fused\n")
    assert "model.layers.1.mlp [rms_norm] not fused: the forward of MLPBlock is not a known one" in done.stdout
    done = explain(tmp_path)
    assert done.returncode == 1 and done.stdout == "" and "explain: model must be a folder with a config" in done.stderr
