"""The plugin's entry point, without vLLM."""

from __future__ import annotations

import sys
import types

import pytest
from contract_fakes import (
    Norm,
)

import tq
from tq import contract
from tq.contract import boundaries, hooks, plugin, vllm


@pytest.fixture
def unregistered(monkeypatch):
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(boundaries, "_disabled", None)
    monkeypatch.delenv("TQ_DISABLE", raising=False)
    calls = []
    monkeypatch.setattr(vllm, "unsupported_version", lambda: None)
    for name in ("hook_cache_identity", "supply_missing_quantizer", "hook_model_building", "hook_model_loading"):
        monkeypatch.setattr(hooks, name, lambda *args, name=name: calls.append(name))
    return calls


def test_register_twice_hooks_once(unregistered):
    plugin.register()
    plugin.register()
    assert unregistered == [
        "hook_cache_identity", "supply_missing_quantizer", "hook_model_building", "hook_model_loading",
    ]  # fmt: skip


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

    monkeypatch.setattr(hooks, "hook_model_loading", broken)
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


def test_fingerprint_tells_settings_apart(monkeypatch):
    """A compiled graph with a boundary fused must not be found by a process that leaves it alone."""
    found = set()
    for patterns in ("", "silu_mul", "rms_norm"):
        monkeypatch.setenv("TQ_DISABLE_BOUNDARIES", patterns)
        found.add(plugin.fingerprint())
        assert plugin.fingerprint() in found
    assert len(found) == 3


@pytest.mark.parametrize(
    ("version", "on_cpu", "refused"),
    [
        ("0.33.0", False, None),
        ("0.33.0+cu130", False, None),
        ("0.32.0+cpu", True, None),
        ("0.32.0", False, "CPU build alone"),
        ("0.33.1", False, "not supported"),
        ("0.34.0", False, "not supported"),
        ("0.33.0rc1", False, "not supported"),
    ],
)
def test_versions_that_were_tested_and_no_others(monkeypatch, version, on_cpu, refused):
    module = types.ModuleType("vllm.version")
    module.__version__ = version
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.version", module)
    monkeypatch.setattr(vllm, "on_cpu", lambda: on_cpu)
    found = vllm.unsupported_version()
    assert found is None if refused is None else refused in found and version in found
