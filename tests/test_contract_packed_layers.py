"""Which layers of vLLM get packed states, which are refused, and what vLLM takes from them. Its layers are stood in
for, but where its own classes are what is asked about."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from packed_fakes import CFG, NATIVE, RECIPE, Base, QwenGatedDeltaNetAttention, config

from tq.contract import packed_layers, packed_state, state
from tq.state import StateOptions


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mamba_cache_mode": "align"}, "prefix caching copies states"),
        ({"use_replayssm": True}, "ReplaySSM"),
        ({"use_kda_recoverssm": True}, "RecoverSSM"),
        ({"mamba_ssm_cache_dtype": "bfloat16"}, "--mamba-ssm-cache-dtype bfloat16"),
        ({"num_spec": 2}, "drafts are verified on states in 3 slots"),
        ({"kv_transfer_config": object()}, "KV transfer"),
    ],
)
def test_what_cannot_be_packed_is_refused(make_packed, change, reason):
    make_packed("gdn")  # for the recipe
    made, vllm_config = packed_layers.gdn_layer(NATIVE), config()
    for name, value in change.items():
        owner = vllm_config if hasattr(vllm_config, name) else vllm_config.cache_config
        setattr(owner, name, value)
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        made(None, vllm_config, "layers.3.mixer")
    assert "layers.3.mixer" in str(caught.value)


def test_a_layer_without_a_packed_form_is_refused(make_packed, monkeypatch):
    make_packed("kda")
    monkeypatch.setattr(state, "platform_refusal", lambda: None)
    layer = type("KimiK3DeltaAttention", (Base,), {"kda": True})(None, config(), "layers.0.mixer")
    with pytest.raises(ValueError, match="KimiK3DeltaAttention has no packed form"):
        state.apply_recipe(torch.nn.ModuleList([layer]))


def test_a_packed_layer_is_not_rounded_too(make_packed, monkeypatch):
    layer = make_packed("gdn", 4)
    monkeypatch.setattr(state, "platform_refusal", lambda: None)
    before = QwenGatedDeltaNetAttention._forward_core
    recipe = state.apply_recipe(torch.nn.ModuleList([layer]))
    assert recipe.rules == ((
        "layers.0.mixer.gdn_state_quantizer", StateOptions("int8", "value_channel", True, 4)
    ),)  # fmt: skip
    assert QwenGatedDeltaNetAttention._forward_core is before and not hasattr(layer, "tq_state_options")


def test_only_a_recipe_that_packs_changes_vllms_layers(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(packed_layers, "register_layers", lambda: called.append(True))
    monkeypatch.delenv("TQ_STATE_RECIPE", raising=False)
    packed_layers.prepare_layers()
    path = tmp_path / "recipe.yaml"
    monkeypatch.setenv("TQ_STATE_RECIPE", str(path))
    path.write_text(RECIPE.format(cfg="num_bits: 8, type: dynamic, axis: [0, 1]"))
    packed_layers.prepare_layers()
    assert called == []
    path.write_text(RECIPE.format(cfg=CFG))
    packed_layers.prepare_layers()
    assert called == [True]


@pytest.fixture
def registry(monkeypatch):
    """vLLM's registry of replaced layers, restored afterwards."""
    custom_op = pytest.importorskip("vllm.model_executor.custom_op")
    monkeypatch.setattr(custom_op, "op_registry_oot", custom_op.op_registry_oot.copy())
    return custom_op.op_registry_oot


@pytest.mark.vllm
def test_vllm_makes_packed_layers(registry):
    """Its own classes, asked for a layer, make the packed one, once registered; whose methods take what theirs do."""
    qwen, kimi = (pytest.importorskip(name) for name in (packed_layers.GDN, packed_layers.KDA))
    packed_layers.register_layers()
    packed_layers.register_layers()
    for native, name, method in (
        (qwen, "QwenGatedDeltaNetAttention", "_forward_core"),
        (kimi, "KimiGatedDeltaNetAttention", "_forward"),
    ):
        owner = getattr(native, name)
        made = type(owner.__new__(owner))
        assert made is registry[name] and issubclass(made, packed_state.PackedCache) and made.__mro__[2] is owner
        theirs = inspect.signature(inspect.unwrap(getattr(owner, method))).parameters
        assert list(inspect.signature(inspect.unwrap(getattr(made, method))).parameters) == list(theirs)
        assert list(inspect.signature(owner.__init__).parameters)[1:4] == ["config", "vllm_config", "prefix"]
    for name in ("causal_conv1d_fn", "causal_conv1d_update", "fused_post_conv_prep", "is_conv_state_dim_first"):
        assert callable(getattr(qwen, name)) and (name == "fused_post_conv_prep" or callable(getattr(kimi, name)))


@pytest.mark.vllm
def test_another_plugins_layer_is_not_replaced(registry):
    pytest.importorskip(packed_layers.GDN)
    registry["QwenGatedDeltaNetAttention"] = Base
    with pytest.raises(ValueError, match="must be vLLM's own"):
        packed_layers.register_layers()


@pytest.mark.vllm
def test_vllm_sizes_its_pages_by_what_layers_declare(make_packed, monkeypatch):
    vllm_config = pytest.importorskip("vllm.config")
    layer = make_packed("gdn", 4)
    monkeypatch.setattr(vllm_config, "get_layers_from_vllm_config", lambda config, kind: {"a": layer, "b": layer})
    model = type("Model", (torch.nn.Module,), {})()
    packed_layers.declare_pages(model)
    assert not hasattr(type(model), "get_mamba_specs_from_config")
    model.layer = layer
    packed_layers.declare_pages(model)
    first, second = type(model).get_mamba_specs_from_config(None)
    assert first == second and first.page_size_bytes == layer.pages.shape[1] - 64
