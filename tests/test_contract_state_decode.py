"""Decode calls of vLLM's own layers whose step rounds the states: what it comes to, and what else stays as it was.

The layers' methods and the batches are vLLM's: see decode_layers.py.
"""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from comparing import assert_same_bits
from decode_layers import CLASSES, HEADS, SIZE, Engine, ReadElsewhereError
from formulas import float64
from helpers import DEVICE
from state_helpers import assert_same_states, rounded
from test_contract_state_batches import plain

from tq.contract import boundaries, state, state_decode
from tq.contract.state_decode import NATIVE

pytestmark = pytest.mark.vllm
FORMS = {
    "int8_narrow head": "num_bits: 8, axis: [0, 1], narrow_range: true",
    "fp8_e4m3 value_channel": "num_bits: [4, 3], axis: [0, 1, 3]",
    "int8 key_channel": "num_bits: 8, axis: [0, 1, 2]",
    "int8 group32": "num_bits: 8, block_sizes: {-1: 32}",
}
RECIPE = "quantize: {{quant_cfg: [{{quantizer_name: '*_state_quantizer', cfg: {{{}, type: dynamic}}}}]}}\n"
DECODES = [plain(9, 1, 3), plain(70, 1, 12), plain(2, 1, 8)]
MIXED = [plain(9, 1, 3), plain(64, 20, 12)]
SPECULATIVE = [(9, 4, [3, 4, 5, 6], 3, 2), (20, 4, [8, 9, 10, 11], 3, 4)]
every_kind = pytest.mark.parametrize("kind", CLASSES)


@pytest.fixture
def engine(kind, native, monkeypatch, tmp_path):
    """An engine, asked for a recipe."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(FORMS["int8_narrow head"]))
    monkeypatch.setenv("TQ_STATE_RECIPE", str(path))
    monkeypatch.delenv("TQ_DISABLE_BOUNDARIES", raising=False)
    made = Engine(kind, monkeypatch, native[kind])
    made.recipe = path
    return made


def forbid(monkeypatch):
    def separate(*args, **kwargs):
        raise AssertionError("a pass of its own")

    monkeypatch.setattr(state, "qdq_", separate)


def assert_close(got, want):
    """Interpreted, sums have one order; on a GPU within the rounding of fp32."""
    if DEVICE == "cpu":
        assert_same_bits(got, want)
    else:
        assert abs(float64(got) - float64(want)).max() < 1e-6 * float(want.abs().max())


INSIDE = [
    (kind, form) for kind, (_, name) in CLASSES.items() for form in FORMS if form.split()[1] not in NATIVE[name].slow
]


@pytest.mark.parametrize(("kind", "form"), INSIDE)
@pytest.mark.parametrize("graphs", [False, True])
def test_the_step_is_that_of_the_rounded_state(engine, monkeypatch, form, graphs):
    """As `qdq_` and then vLLM's kernel; neither runs, and no other byte of the cache changes."""
    engine.recipe.write_text(RECIPE.format(FORMS[form]))
    layer = engine.layer()
    before, states = layer.memory.clone(), layer.kv_cache[1].clone()
    changes = {"padding": 1, "graphs": True} if graphs else {}
    want = layer.memory.clone()
    theirs = want[1:-1, : states[0].numel()].unflatten(1, states.shape[1:])
    layer.kv_cache = layer.kv_cache[0], theirs
    slots = [3, 12, 8]
    theirs[slots] = rounded(theirs[slots], *form.split())
    want_out = engine.run(layer, DECODES, **changes)
    assert engine.calls == 1 and not hasattr(layer, "tq_decode")

    layer.kv_cache = layer.kv_cache[0], layer.memory[1:-1, : states[0].numel()].unflatten(1, states.shape[1:])
    state.apply_recipe(torch.nn.ModuleList([layer]))
    forbid(monkeypatch)
    out = engine.run(layer, DECODES, **changes)
    assert engine.calls == 1
    assert_close(out, want_out)
    assert_close(layer.kv_cache[1][slots], theirs[slots])
    assert not torch.equal(layer.kv_cache[1][slots], states[slots])
    layer.kv_cache[1][slots] = states[slots]
    assert_same_bits(layer.memory, before)


@every_kind
@pytest.mark.parametrize(
    ("rows", "changes", "read"),
    [(MIXED, {}, [3, 12]), (SPECULATIVE, {"drafts": 3}, [4, 11])],
    ids=["mixed", "speculative"],
)
def test_other_batches_are_rounded_before(engine, rows, changes, read):
    layer = engine.layer()
    want = layer.kv_cache[1].clone()
    want[read] = rounded(want[read], "int8_narrow")
    state.apply_recipe(torch.nn.ModuleList([layer]))
    with pytest.raises(ReadElsewhereError):
        engine.run(layer, rows, **changes)
    assert_same_states(layer.kv_cache[1], want)
    assert layer.tq_decode.state.reason is None


def assert_rounded_before(engine, layer, form="int8_narrow head"):
    """Whatever vLLM's layer decodes by, it finds the states rounded by a pass of their own."""
    model = torch.nn.ModuleList([layer])
    state.apply_recipe(model)
    want = layer.kv_cache[1].clone()
    want[[3, 12, 8]] = rounded(want[[3, 12, 8]], *form.split())
    engine.kernel = engine.elsewhere
    with pytest.raises(ReadElsewhereError):
        engine.run(layer, DECODES)
    assert_same_bits(layer.kv_cache[1], want)
    return boundaries.report(model).states[0].reason


@every_kind
@pytest.mark.parametrize("pattern", ["{step}", "layers.0.*", "*kda_state_quantizer,*gdn_state_quantizer"])
def test_switched_off_by_name(engine, monkeypatch, pattern):
    monkeypatch.setenv("TQ_DISABLE_BOUNDARIES", pattern.format(step=engine.native.step))
    assert assert_rounded_before(engine, engine.layer()) == "switched off by TQ_DISABLE_BOUNDARIES"


@pytest.mark.parametrize("kind", ["kda"])
@pytest.mark.parametrize("form", ["int8 key_channel", "int8 group32"])
def test_recipes_that_would_not_be_faster(engine, form):
    engine.recipe.write_text(RECIPE.format(FORMS[form]))
    found = assert_rounded_before(engine, engine.layer(), form)
    assert found == f"a scale a {form.split()[1]} makes kda_decode no faster than that"


@pytest.mark.parametrize("kind", ["gdn"])
def test_vllm_told_not_to_pack(engine, monkeypatch):
    """VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE=0: q, k and v go apart to another kernel."""
    layer = engine.layer()
    layer.enable_packed_recurrent_decode = False
    monkeypatch.setattr(engine.layers_of, "fused_sigmoid_gating_delta_rule_update", engine.elsewhere)
    layer.rearrange_mixed_qkv = lambda qkv: (qkv, qkv, qkv)
    assert assert_rounded_before(engine, layer) == "its enable_packed_recurrent_decode is False, not True"


def code_changed(engine):
    engine.patch.setattr(engine.owner, engine.native.caller, lambda self, **given: None)


REASONS = {
    "calls no fused_recurrent_": code_changed,
    "has no fused_recurrent_": lambda engine: engine.patch.delattr(engine.module, engine.native.kernel),
    "other kernels on ROCm": lambda engine: engine.patch.setattr(state_decode, "on_rocm", lambda: True),
    "does not round to int8_narrow": lambda engine: engine.patch.setattr(state_decode, "FORMATS", {}),
}


@every_kind
@pytest.mark.parametrize("reason", REASONS)
def test_what_is_not_known_is_rounded_before(engine, reason):
    REASONS[reason](engine)
    model = torch.nn.ModuleList([engine.layer()])
    state.apply_recipe(model)
    (found,) = boundaries.report(model).states
    assert reason in found.reason and model[0].tq_decode is None


def test_layers_that_decode_by_other_kernels(monkeypatch):
    """OLMo's, whose kernel takes gates that are made; Kimi-K3's, but with the backend that calls the packed kernel."""
    olmo = pytest.importorskip("vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn")
    options = SimpleNamespace(code="int8", granularity="head")
    owner = olmo.OlmoHybridGatedDeltaNetAttention
    assert "decodes by a kernel that takes something else" in state_decode.why_apart(None, owner, options)
    kimi = pytest.importorskip("vllm.models.kimi_k3.nvidia.kda").KimiK3DeltaAttention
    layer = SimpleNamespace(kda_decode_backend="native")
    assert "its kda_decode_backend is 'native'" in state_decode.why_apart(layer, kimi, options)
    layer.kda_decode_backend = "triton"
    assert state_decode.why_apart(layer, kimi, options) is None


@every_kind
def test_arguments_that_our_step_does_not_take(engine, caplog, monkeypatch):
    """They are given to vLLM's, on states that were rounded; and so from then on, and it is said."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    layer = engine.layer()
    layer.A_log = layer.A_log.double()
    model = torch.nn.ModuleList([layer])
    state.apply_recipe(model)
    assert boundaries.report(model).states[0].reason is None
    want = layer.kv_cache[1].clone()
    want[[3, 12, 8]] = rounded(want[[3, 12, 8]], "int8_narrow")
    engine.kernel = lambda **given: (torch.zeros(1, 3, HEADS, SIZE, device=DEVICE), None)
    for times in (1, 2):
        engine.run(layer, DECODES)
        assert engine.calls == times
        assert_same_bits(layer.kv_cache[1], want)
        want[[3, 12, 8]] = rounded(want[[3, 12, 8]], "int8_narrow")
    (found,) = boundaries.report(model).states
    assert re.search("A_log must be .*, got torch.float64", found.reason)
    assert caplog.text.count("apart from the decode step") == 1


@every_kind
def test_states_that_are_not_the_cache(engine):
    layer = engine.layer()
    state.apply_recipe(torch.nn.ModuleList([layer]))
    other = layer.kv_cache[1].clone()
    given = {"initial_state": other}
    engine.kernel = lambda **given: given["initial_state"]
    apart = []
    call = getattr(engine.module, engine.native.kernel)
    assert layer.tq_decode.run(layer, lambda: apart.append(True), lambda self: call(**given)) is other
    assert apart == [True] and "not those of the layer's cache" in layer.tq_decode.state.reason


@every_kind
def test_a_layer_that_decodes_in_another_way_is_not_served(engine):
    layer = engine.layer()
    state.apply_recipe(torch.nn.ModuleList([layer]))
    with pytest.raises(RuntimeError, match=f"must decode by {engine.native.kernel}, but did not"):
        layer.tq_decode.run(layer, None, lambda self: None)


@every_kind
def test_calls_of_others_are_vllms(engine):
    """Of layers without a recipe and of warm-ups, before and after, in the same process."""
    first, second = engine.layer(0), engine.layer(1)
    kernel = getattr(engine.module, engine.native.kernel)
    state.apply_recipe(torch.nn.ModuleList([first, engine.layer(2)]))
    state.apply_recipe(torch.nn.ModuleList([first]))
    standing = getattr(engine.module, engine.native.kernel)
    assert standing.tq_original == kernel
    want = second.kv_cache[1].clone()
    engine.run(first, DECODES)
    assert engine.calls == 0
    engine.run(second, DECODES)
    assert engine.calls == 1
    assert_same_bits(second.kv_cache[1][[1, 2, 4]], want[[1, 2, 4]])


@every_kind
def test_what_is_said_of_it(engine, monkeypatch):
    monkeypatch.setenv("TQ_DISABLE_BOUNDARIES", "layers.1.*")
    model = torch.nn.ModuleList([engine.layer(0), engine.layer(1), engine.layer(2)])
    state.apply_recipe(model)
    report, quantizer = boundaries.report(model), state.SITES[engine.owner.__name__].quantizer
    assert f"layers.0.mixer.{quantizer} [int8_narrow head] rounded inside the decode step" in str(report)
    assert f"layers.1.mixer.{quantizer} [int8_narrow head] rounded before: switched off by TQ" in str(report)
    assert boundaries.states_summary("Model", report.states) == (
        "states in 3 layers of Model: 2 rounded inside the decode step, "
        "1 rounded before: switched off by TQ_DISABLE_BOUNDARIES"
    )
