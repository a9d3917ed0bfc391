"""A small model in vLLM's engine with the plugin, on its CPU build: see contract_engine.py."""

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

ENGINE = Path(__file__).with_name("contract_engine.py")
cpu_build = pytest.mark.skipif(torch.cuda.is_available(), reason="the script is for a CPU build of vLLM")


def run_engine(tmp_path, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, str(ENGINE), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "VLLM_CACHE_ROOT": str(tmp_path), **environment},
        timeout=550,
        check=False,
    )
    found = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(found.group(1)), done.stdout + done.stderr


def boundaries(scheme):
    """Those of two layers, all fused."""
    return [
        [f"model.layers.{i}.{producer}", f"model.layers.{i}.{linear}", scheme, None]
        for i in (0, 1)
        for producer, linear in (
            ("input_layernorm", "self_attn.qkv_proj"),
            ("post_attention_layernorm", "mlp.gate_up_proj"),
            ("mlp.act_fn", "mlp.down_proj"),
        )
    ]


@cpu_build
@pytest.mark.parametrize(
    ("arguments", "scheme", "kernel"),
    [
        ((), "fp8_tensor", "PerTensorTorchFP8ScaledMMLinearKernel row_major"),
        (("--family", "qwen3"), "fp8_tensor", "PerTensorTorchFP8ScaledMMLinearKernel row_major"),
        (("--scheme", "token"), "fp8_token", "ChannelWiseTorchFP8ScaledMMLinearKernel row_major"),
        (("--scheme", "block", "--family", "qwen3"), "fp8_group128", "TorchFp8BlockScaledMMKernel column_major"),
        (("--scheme", "int8", "--smollm2"), "int8_token", "CPUInt8ScaledMMLinearKernel row_major"),
        (("--scheme", "int8_azp"), "int8_token_azp", "CPUInt8ScaledMMLinearKernel row_major"),
        (("--scheme", "int8_static"), "int8_tensor", "CPUInt8ScaledMMLinearKernel row_major"),
        (("--scheme", "int8_static_azp", "--smollm2"), "int8_tensor_azp", "CPUInt8ScaledMMLinearKernel row_major"),
        (("--smollm2",), "fp8_tensor", "PerTensorTorchFP8ScaledMMLinearKernel row_major"),
        (("--scheme", "token", "--smollm2"), "fp8_token", "ChannelWiseTorchFP8ScaledMMLinearKernel row_major"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_engine_runs_every_boundary_fused(tmp_path, arguments, scheme, kernel):
    if "--smollm2" in arguments:
        smollm2 = pytest.importorskip("tq.cli.smollm2")
        try:
            smollm2.gguf_file()
        except RuntimeError as error:
            pytest.skip(str(error))
    result, log = run_engine(tmp_path, *arguments)
    assert result["boundaries"] == boundaries(scheme) and result["kernels"] == [kernel]
    assert log.count("boundaries fused (rms_norm 4, silu_mul 2)") == 1
    # Three forwards: the prompts together, then two steps of one token each.
    assert result["calls"] == len(result["watched"]) == 3 * 6
    for call in result["watched"]:
        assert call["worst_step"] <= 1 and call["differing"] < 0.005 and all(call["others"]), call
        assert call["worst_scale"] == 0, call
        if call["producer"] == "rms_norm":
            assert call["options"]["rounding"] == "before_and_after_weight"
    assert result["fingerprint"] == result["expected_fingerprint"]


@cpu_build
@pytest.mark.skipif("gemma_rms_norm" not in tq.PRODUCERS, reason="Gemma's norm and GELU are not producers yet")
def test_engine_fuses_gemmas_norm_and_gelu(tmp_path):
    result, log = run_engine(tmp_path, "--family", "gemma2", "--scheme", "token")
    assert log.count("boundaries fused (gelu_mul 2, gemma_rms_norm 4)") == 1
    assert result["calls"] == len(result["watched"]) == 3 * 6
    for call in result["watched"]:
        assert call["worst_step"] <= 1 and call["differing"] < 0.005 and all(call["others"]), call
        assert call["worst_scale"] == 0, call


@cpu_build
@pytest.mark.skipif("gemma_rms_norm" not in tq.PRODUCERS, reason="Qwen3-Next's norm is not a producer yet")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_engine_gives_a_norm_with_two_readers_to_both(tmp_path, compiled):
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    arguments = ("--family", "qwen3_next", "--scheme", "int8", *["--compile"] * compiled)
    result, _ = run_engine(tmp_path, *arguments, **inductor)
    expected = boundaries("int8_token")
    expected[0][1] = "model.layers.0.linear_attn.in_proj_qkvz"
    assert result["boundaries"] == expected
    # What kernels still quantize: the input of the other projection, and what comes out of both kinds of attention.
    if compiled:
        code = "".join(path.read_text() for path in tmp_path.rglob("*.py"))
        assert code.count("torch.ops._C.dynamic_scaled_int8_quant.default(") == 3
        calls = re.findall(r"torch\.ops\.tq\.gemma_rms_norm\.default\((.*)\)", code)
        assert ["return_unquantized=True" in options for options in calls].count(True) == 1 and len(calls) == 4
        return
    assert result["quantized_by_int8_kernels"] == 3 * 3 and result["calls"] == len(result["watched"]) == 3 * 6
    for call in result["watched"]:
        assert call["worst_step"] <= 1 and call["differing"] < 0.005 and all(call["others"]), call
        assert call["worst_scale"] == 0, call
        shared = call["name"] == "model.layers.0.input_layernorm"
        assert len(call["others"]) == (1 if shared else call["producer"] != "silu_mul")
        assert ("return_unquantized" in call["options"]) == shared


@cpu_build
def test_engine_leaves_alone_what_is_switched_off(tmp_path):
    result, log = run_engine(tmp_path, "--scheme", "token", TQ_DISABLE_BOUNDARIES="silu_mul,model.layers.1.*")
    fused = [name for name, _, _, reason in result["boundaries"] if reason is None]
    assert fused == ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"]
    assert {name for name in (call["name"] for call in result["watched"])} == set(fused)
    assert "2 of 6 boundaries fused (rms_norm 2); not fused: 4 (switched off by TQ_DISABLE_BOUNDARIES)" in log


@cpu_build
@pytest.mark.parametrize(
    ("arguments", "scheme", "given"),
    [
        (("--inductor-rounding", "none"), "fp8_tensor", "rounding='none'"),
        # vLLM keeps the quantizer of blocks an operator, so that what enters it is written, and so rounded.
        (("--scheme", "block"), "fp8_group128", "layout='column_major'"),
    ],
    ids=["static", "block"],
)
def test_engine_compiled_calls_the_ops_with_what_the_consumer_reads(tmp_path, arguments, scheme, given):
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    result, _ = run_engine(tmp_path, "--compile", *arguments, **inductor)
    assert result["boundaries"] == boundaries(scheme) and result["watched"] == []
    assert [len(tokens) for tokens in result["tokens"]] == [3, 3]
    code = "".join(path.read_text() for path in tmp_path.rglob("*.py"))
    calls = re.findall(r"torch\.ops\.tq\.(\w+)\.default\((.*)\)", code)
    assert {producer for producer, _ in calls} == {"rms_norm", "silu_mul"}
    assert all(given in options and f"scheme='{scheme}'" in options for _, options in calls)
    if scheme == "fp8_group128":
        expected = {"rms_norm": "rounding='after_weight'", "silu_mul": "rounding='product'"}
        assert all(expected[producer] in options for producer, options in calls)
