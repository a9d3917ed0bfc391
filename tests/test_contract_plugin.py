"""The plugin's entry point, without vLLM."""

from __future__ import annotations

import pytest
from contract_fakes import (
    Norm,
)

import tq
from tq import contract
from tq.contract import boundaries, plugin, vllm


@pytest.fixture
def unregistered(monkeypatch):
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(boundaries, "_disabled", None)
    monkeypatch.delenv("TQ_DISABLE", raising=False)
    calls = []
    monkeypatch.setattr(vllm, "unsupported_version", lambda: None)
    for name in ("hook_cache_identity", "supply_missing_quantizer", "hook_model_loading"):
        monkeypatch.setattr(vllm, name, lambda *args, name=name: calls.append(name))
    return calls


def test_register_twice_hooks_once(unregistered):
    plugin.register()
    plugin.register()
    assert unregistered == ["hook_cache_identity", "supply_missing_quantizer", "hook_model_loading"]


def test_register_disabled(unregistered, monkeypatch):
    monkeypatch.setenv("TQ_DISABLE", "1")
    plugin.register()
    assert unregistered == [] and contract.report().disabled == "TQ_DISABLE=1"


def test_register_with_an_unsupported_version_warns_once(unregistered, monkeypatch, caplog):
    monkeypatch.setattr(vllm, "unsupported_version", lambda: "vLLM 0.40.0 is not supported")
    monkeypatch.setattr(vllm.logger, "propagate", True)
    plugin.register()
    plugin.register()
    assert unregistered == [] and "0.40.0" in contract.report().disabled


def test_register_never_raises(unregistered, monkeypatch):
    def broken(*args):
        raise RuntimeError("moved")

    monkeypatch.setattr(vllm, "hook_model_loading", broken)
    plugin.register()
    assert "moved" in contract.report().disabled


def test_failed_pairing_leaves_the_model_plain(layer, unregistered, monkeypatch):
    monkeypatch.setattr(vllm, "load_adapter", lambda: None)
    monkeypatch.setattr(vllm, "norms_stand_aside", lambda: None)
    monkeypatch.setattr(boundaries, "record", lambda *args: 1 / 0)
    plugin._after_loading(layer)
    assert type(layer.input_layernorm) is Norm and "division" in contract.report().disabled


def test_fingerprint_names_version_and_sources():
    version, digest = plugin.fingerprint().split(":")
    assert version == tq.__version__ and len(digest) == 16
