"""Recipes followed in vLLM: which states are rounded before a call, what is refused. vLLM itself is stood in for."""

from __future__ import annotations

import functools
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
import yaml
from comparing import assert_same_bits
from helpers import DEVICE
from state_helpers import cache, indices, rounded

from tq.contract import state
from tq.state import parse_recipe

RECIPE = """
quantize:
  quant_cfg:
    - quantizer_name: '*'
      enable: false
    - quantizer_name: '*gdn_state_quantizer'
      cfg: {num_bits: 8, type: dynamic, axis: [0, 1], narrow_range: true}
    - quantizer_name: '*kda_state_quantizer'
      cfg: {num_bits: [4, 3], type: dynamic, axis: [0, 1]}
    - quantizer_name: 'layers.2.*'
      enable: false
"""
OPTIONS = parse_recipe(yaml.safe_load(RECIPE)).options("layers.0.linear_attn.gdn_state_quantizer")


class Layer(torch.nn.Module):
    """What a layer of vLLM has that matters here; a call adds one to every state, so that its order shows."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.prefix = f"layers.{number}.linear_attn"
        self.cache_config = SimpleNamespace(mamba_cache_mode="none", use_kda_recoverssm=False, use_replayssm=False)
        self.kv_cache = (torch.zeros(1, device=DEVICE), cache(8, 2, 8, 8)[0])
        self.dtype = torch.float32

    def get_state_dtype(self):
        return torch.bfloat16, self.dtype


def layers(kind: str, count: int = 3):
    """A model of `count` layers of a class of its own, named and with methods as vLLM's are."""

    def method(self, *arguments):
        self.kv_cache[1].add_(1.0)
        return arguments

    methods = {name: method for name in state.SITES[kind].methods}
    made = type(kind, (Layer,), methods)
    return torch.nn.ModuleList([made(i) for i in range(count)])


def metadata(**changes):
    """A decode step of two requests with a padded third."""
    fields = {
        "num_prefills": 0, "num_decodes": 2, "num_spec_decodes": 0, "num_actual_tokens": 3,
        "non_spec_state_indices_tensor": indices([5, 2, 0, 6]), "has_initial_state": None,
        "spec_state_indices_tensor": None, "num_accepted_tokens": None,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """The metadata of the next call, by layer; the recipe is asked for."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    monkeypatch.setenv("TQ_STATE_RECIPE", str(path))
    calls = {}
    monkeypatch.setattr(state, "current_metadata", lambda: calls)
    monkeypatch.setattr(state, "platform_refusal", lambda: None)
    return calls


@pytest.mark.parametrize("kind", state.SITES)
def test_states_are_rounded_before_the_call(engine, kind):
    model = layers(kind)
    recipe = state.apply_recipe(model)
    assert state.apply_recipe(model) == recipe and len(recipe.rules) == 2
    assert parse_recipe(recipe.document()) == recipe
    code = "int8_narrow" if "gdn" in state.SITES[kind].quantizer else "fp8_e4m3"
    for i, layer in enumerate(model):
        engine[layer.prefix] = metadata()
        for method in state.SITES[kind].methods:
            want = layer.kv_cache[1].clone()
            if i != 2:
                want[[5, 2]] = rounded(want[[5, 2]], code)
            assert getattr(layer, method)(1, 2) == (1, 2)
            assert_same_bits(layer.kv_cache[1], want + 1.0)


CALLS = {
    "padding in a captured graph": (metadata(num_decodes=4, num_actual_tokens=4), [5, 2, 6]),
    "a prompt's first chunk and a later one": (
        metadata(
            num_prefills=2, num_decodes=0, num_actual_tokens=70, has_initial_state=torch.tensor([False, True] * 2)
        ),
        [2],
    ),
    "decodes before prefills, and padding behind": (
        metadata(
            num_prefills=2,
            num_decodes=1,
            num_actual_tokens=70,
            non_spec_state_indices_tensor=indices([5, 2, 6, 1, 1]),
            has_initial_state=torch.tensor([True, False, True, True, True]),
        ),
        [5, 6],
    ),
    "accepted tokens": (
        metadata(
            num_decodes=0,
            num_spec_decodes=2,
            spec_state_indices_tensor=indices([[1, 2, 3], [4, 5, 6], [7, 7, 7]]),
            num_accepted_tokens=indices([3, 1, 1]),
        ),
        [3, 4],
    ),
    "accepted tokens and prefills": (
        metadata(
            num_prefills=1,
            num_decodes=0,
            num_spec_decodes=1,
            non_spec_state_indices_tensor=indices([2]),
            has_initial_state=torch.tensor([True]),
            spec_state_indices_tensor=indices([[4, 5, 6]]),
            num_accepted_tokens=indices([2]),
        ),
        [2, 5],
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_which_states_a_call_reads(call):
    found, slots = CALLS[call]
    if found.has_initial_state is not None:
        found.has_initial_state = found.has_initial_state.to(DEVICE)
    layer = Layer(0)
    layer.tq_state_options = OPTIONS
    want = layer.kv_cache[1].clone()
    want[slots] = rounded(want[slots], "int8_narrow")
    state.round_states(layer, {layer.prefix: found})
    assert_same_bits(layer.kv_cache[1], want)


@pytest.mark.parametrize("found", [None, {}, [metadata()]])
def test_a_run_without_requests_rounds_nothing(found):
    layer = Layer(0)
    layer.tq_state_options = OPTIONS
    before = layer.kv_cache[1].clone()
    state.round_states(layer, found)
    assert_same_bits(layer.kv_cache[1], before)


def test_without_a_recipe_nothing_is_touched(monkeypatch):
    monkeypatch.delenv("TQ_STATE_RECIPE", raising=False)
    model = layers("QwenGatedDeltaNetAttention")
    before = dict(vars(type(model[0])))
    assert state.apply_recipe(model) is None
    assert dict(vars(type(model[0]))) == before and not hasattr(model[0], "tq_state_options")


def test_what_breaks_a_graph_stays_outside(engine, monkeypatch):
    """A method that runs between captured parts of a graph rounds there too."""
    order = []

    def breaking(function):
        @functools.wraps(function)
        def wrapper(*arguments):
            order.append("break")
            return function(*arguments)

        return wrapper

    module = pytest.importorskip("vllm.compilation.breakable_cudagraph")
    monkeypatch.setattr(module, "eager_break_during_capture", breaking)
    monkeypatch.setattr(state, "round_states", lambda layer, found: order.append("round"))
    model = layers("KimiGatedDeltaNetAttention")
    owner = type(model[0])
    owner._forward = breaking(lambda self: order.append("call"))
    state.apply_recipe(model)
    state.apply_recipe(model)
    model[0]._forward()
    assert order == ["break", "round", "call"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer.cache_config, "mamba_cache_mode", "align"), "mamba_cache_mode 'align'"),
        (lambda layer: setattr(layer.cache_config, "use_kda_recoverssm", True), "RecoverSSM"),
        (lambda layer: setattr(layer.cache_config, "use_replayssm", True), "ReplaySSM"),
        (lambda layer: setattr(layer, "dtype", torch.bfloat16), "its states are torch.bfloat16"),
    ],
)
def test_what_cannot_be_served_is_refused(engine, change, reason):
    model = layers("KimiK3DeltaAttention")
    before = dict(vars(type(model[0])))
    change(model[1])
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        state.apply_recipe(model)
    assert "layers.1.linear_attn.kda_state_quantizer" in str(caught.value)
    assert dict(vars(type(model[0]))) == before and not hasattr(model[0], "tq_state_options")


def test_a_model_without_states_that_match(engine):
    assert state.apply_recipe(torch.nn.Linear(2, 2)).rules == ()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn", "QwenGatedDeltaNetAttention"),
        ("vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn", "OlmoHybridGatedDeltaNetAttention"),
        ("vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn", "KimiGatedDeltaNetAttention"),
    ],
)
def test_the_classes_of_vllm_are_what_is_hooked(module, name):
    """They have the methods, and read of the metadata what is read here."""
    pytest.importorskip("vllm")
    owner = getattr(pytest.importorskip(module), name)
    assert all(callable(getattr(owner, method)) for method in state.SITES[name].methods)
    source = inspect.getsource(inspect.unwrap(getattr(owner, state.SITES[name].methods[0])))
    assert "non_spec_state_indices_tensor" in source and ".get(self.prefix)" in source
    backend = pytest.importorskip("vllm.v1.attention.backends.gdn_attn")
    assert set(vars(metadata())) <= set(backend.GDNAttentionMetadata.__dataclass_fields__)
