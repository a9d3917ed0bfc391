"""The random checkpoints of `perf.engine`, and what it keeps of earlier results."""

from __future__ import annotations

import json

import pytest
import torch

from perf.checkpoints import BLOCK, SCHEMES, Shape, described, quantized, write_adapter, write_checkpoint

load_file = pytest.importorskip("safetensors.torch").load_file
TINY = Shape(layers=1, hidden=256, intermediate=384, heads=4, kv_heads=2, vocabulary=64)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_times_scales_are_the_weight(scheme):
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    codes, scale = quantized(weight, scheme)
    if scheme == "block":
        assert scale.shape == (2, 2)
        scale = scale.repeat_interleave(BLOCK, 0)[:200].repeat_interleave(BLOCK, 1)
    integers = codes.dtype == torch.int8
    assert codes.float().abs().max() == (127 if integers else 448)
    # Half a step: of the integers, or of E4M3's three bits and of its least number.
    bound = scale / 2 if integers else torch.maximum(weight.abs() * 2**-4, scale * 2**-10)
    assert bool(((codes.float() * scale - weight).abs() <= bound * (1 + 1e-5)).all())


@pytest.mark.parametrize("scheme", ["static", "int8_token"])
def test_a_checkpoint_names_every_tensor_once(tmp_path, scheme):
    write_checkpoint(tmp_path / "model", scheme, TINY, "cpu")
    files = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    held = {name for file in set(files.values()) for name in load_file(tmp_path / "model" / file)}
    assert held == set(files) and "model.layers.0.mlp.down_proj.weight_scale" in held
    assert ("model.layers.0.mlp.down_proj.input_scale" in held) == (scheme == "static")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"] == SCHEMES[scheme]
    assert ("INT8" in described(scheme, TINY)) == (scheme == "int8_token")


def test_an_adapter_fits_its_layers(tmp_path):
    write_adapter(tmp_path, TINY, rank=4)
    held = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.mlp.down_proj"
    assert held[f"{prefix}.lora_A.weight"].shape == (4, 384) and held[f"{prefix}.lora_B.weight"].shape == (256, 4)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4


def test_results_of_other_modes_are_kept(tmp_path, monkeypatch):
    for name in (
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "VLLM_NO_USAGE_STATS",
        "HF_HUB_OFFLINE",
    ):
        monkeypatch.setenv(name, "0")  # set by the import, taken back with this
    from perf.engine import merged

    path = tmp_path / "engine.json"
    rows = [{"checkpoint": "a", "mode": mode, "engine": mode} for mode in ("eager", "compiled")]
    assert merged(path, rows) == rows
    path.write_text(json.dumps({"rows": rows}))
    again = [{"checkpoint": "a", "mode": "eager", "engine": "new"}, {"checkpoint": "b", "mode": "compiled"}]
    assert merged(path, again) == [rows[1], *again]
