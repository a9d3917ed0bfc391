"""Producers of a loaded model and the layers they feed, without vLLM."""

from __future__ import annotations

import gc

import pytest
import torch
from contract_fakes import (
    Act,
    Activation,
    Attention,
    Decoder,
    Key,
    Linear,
    LoraLinear,
    Norm,
    OtherNorm,
    known_decoder,
    signs,
)

from tq import contract
from tq.contract import boundaries, pairing


def test_lora_added_after_pairing_gets_the_plain_activation(layer):
    pairing.pair_model(layer)
    base, norm, x = layer.self_attn.qkv_proj, layer.input_layernorm, signs()
    assert isinstance(norm(x), Activation)
    layer.self_attn.qkv_proj = LoraLinear(base)
    y = (x.float() / 2).to(x.dtype) * norm.weight
    assert torch.equal(
        layer.self_attn(norm(x)), base(y) + y.float() @ layer.self_attn.qkv_proj.a @ layer.self_attn.qkv_proj.b
    )
    layer.self_attn.qkv_proj = base
    assert isinstance(norm(x), Activation)


def test_pairing_a_layer(layer):
    keys, modules = list(layer.state_dict()), len(list(layer.modules()))
    found = pairing.pair_model(layer)
    assert [(b.name, b.consumer, b.scheme, b.reason) for b in found] == [
        ("input_layernorm", "self_attn.qkv_proj", "fp8_tensor", None),
        ("post_attention_layernorm", "mlp.gate_up_proj", "fp8_tensor", None),
        ("mlp.act_fn", "mlp.down_proj", "fp8_tensor", None),
    ]
    assert list(layer.state_dict()) == keys and len(list(layer.modules())) == modules
    x, residual = signs(), signs(seed=2)
    layer(x, residual)
    linears = layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj
    assert all(isinstance(linear.seen[0], Activation) for linear in linears)
    pairing.pair_model(Decoder(Linear))
    assert [b.calls for b in contract.report(layer).boundaries] == [1, 1, 1]


def test_pairing_twice_routes_once(layer):
    pairing.pair_model(layer)
    pairing.pair_model(layer)
    gc.collect()  # models of other tests leave the report
    total = contract.report().total
    norm = layer.input_layernorm
    assert type(norm).__mro__[1] is Norm
    seen = []
    with contract.observe(lambda *call: seen.append(call[0])):
        norm(signs())
    assert seen == ["input_layernorm"] and norm.tq_boundary.calls == 1
    pairing.pair_model(layer)
    assert contract.report().total == total
    pairing.unpair(norm)
    assert type(norm) is Norm and isinstance(norm(signs()), torch.Tensor)


def test_explicit_call_on_a_paired_norm_ignores_the_pairing(layer):
    pairing.pair_model(layer)
    assert isinstance(contract.rms_norm_input_quant(layer.input_layernorm, signs(), None, None), torch.Tensor)


def test_unknown_forward_is_left_alone_with_a_reason(layer):
    class Changed(Decoder):
        def forward(self, x, residual):
            y, residual = self.input_layernorm(x, residual)
            return y * 2, residual

    changed = Changed(lambda: Linear(Key("static"), 0.25))
    found = pairing.pair_model(changed)
    assert [b.reason for b in found if b.producer == "rms_norm"] == ["the forward of Changed is not a known one"] * 2
    assert type(changed.input_layernorm) is Norm


def test_a_subclass_that_keeps_the_forward_is_paired(layer):
    class Renamed(Decoder):
        pass

    assert all(b.reason is None for b in pairing.pair_model(Renamed(lambda: Linear(Key("static"), 0.25))))


def test_norm_scaled_before_the_consumer_is_left_alone(layer):
    layer.scaled_by = torch.nn.Identity()
    found = {b.name: b.reason for b in pairing.pair_model(layer)}
    assert found["input_layernorm"] is None and "multiplied" in found["post_attention_layernorm"]


def test_norms_stand_aside_but_acts_do_not(layer):
    found = pairing.pair_model(layer, "all-reduce fusion")
    assert [b.reason for b in found] == ["all-reduce fusion", "all-reduce fusion", None]
    expected = "1 of 3 boundaries fused (silu_mul 1); not fused: 2 (all-reduce fusion)"
    assert boundaries.summary(found) == expected


def test_pairing_anew_undoes_what_no_longer_holds(layer):
    pairing.pair_model(layer)
    layer.self_attn.qkv_proj._input_quant_key = None
    found = pairing.pair_model(layer)
    assert found[0].reason == "the consumer takes no quantized input (Linear)" and type(layer.input_layernorm) is Norm


def test_models_that_are_gone_leave_the_report(layer):
    pairing.pair_model(layer)
    gc.collect()
    before = contract.report().total
    other = Decoder(lambda: Linear(Key("static"), 0.25))
    pairing.pair_model(other)
    assert contract.report().total == before + 3
    del other
    gc.collect()
    assert contract.report().total == before


@pytest.mark.parametrize(
    ("patterns", "off"),
    [
        ("silu_mul", [False, False, True]),
        ("*.down_proj, self_attn.*", [True, False, True]),
        ("post_attention_layernorm", [False, True, False]),
        ("post_attention", [False, False, False]),
        ("", [False, False, False]),
    ],
)
def test_boundaries_are_switched_off_by_name(layer, monkeypatch, patterns, off):
    monkeypatch.setenv("TQ_DISABLE_BOUNDARIES", patterns)
    found = pairing.pair_model(layer)
    reasons = ["switched off by TQ_DISABLE_BOUNDARIES" if one else None for one in off]
    assert [boundary.reason for boundary in found] == reasons
    # Not by a call of the model's own, or a row of vLLM's table, either.
    out = contract.silu_mul_input_quant(layer.mlp.act_fn, torch.cat([signs(), signs()], -1), layer.mlp.down_proj)
    assert isinstance(out, torch.Tensor) == off[2]


def test_a_boundary_switched_on_again_is_fused(layer, monkeypatch):
    monkeypatch.setenv("TQ_DISABLE_BOUNDARIES", "*")
    assert all(boundary.reason is not None for boundary in pairing.pair_model(layer))
    monkeypatch.delenv("TQ_DISABLE_BOUNDARIES")
    assert all(boundary.reason is None for boundary in pairing.pair_model(layer))


def test_what_the_output_enters_must_be_known_too(layer):
    class Changed(Attention):
        def forward(self, x):
            return self.qkv_proj(x) * x.float()

    layer.self_attn = Changed(layer.self_attn.qkv_proj)
    found = pairing.pair_model(layer)
    assert (found[0].reason, found[0].consumer) == ("the forward of Changed is not a known one", "self_attn")
    del layer.self_attn
    assert pairing.pair_model(layer)[0].reason == "the layer has no self_attn"


def test_a_norm_that_no_producer_computes_is_named(layer, adapter):
    layer.input_layernorm = OtherNorm()
    found = pairing.pair_model(layer)
    assert (found[0].producer, found[0].reason) == ("OtherNorm", "no producer for OtherNorm")


def test_a_model_of_unknown_layers_is_said_to_be_one(layer):
    assert boundaries.summary(pairing.pair_model(torch.nn.Sequential(Norm()))).endswith(
        "no layer of the model is a known one"
    )


def test_rows_that_groups_do_not_divide_are_seen_before_the_first_call(adapter, monkeypatch):
    layer = known_decoder(monkeypatch, lambda: Linear(Key("group")))
    layer.self_attn.qkv_proj.input_size_per_partition = 192
    layer.mlp.down_proj.input_size_per_partition = 256
    reasons = [boundary.reason for boundary in pairing.pair_model(layer)]
    assert reasons == ["the row is not a multiple of the scale group", None, None]


def two_layers(layer):
    """A model of two layers of one kind."""
    model = torch.nn.Module()
    model.first, model.second = layer, Decoder(lambda: Linear(Key("static"), 0.5))
    return model


def test_an_act_made_once_for_all_layers_is_each_layers_own(layer, monkeypatch):
    model = two_layers(layer)
    act = model.second.mlp.act_fn = model.first.mlp.act_fn
    for pattern, fused in (("", 2), ("first.mlp.*", 1), ("", 2)):
        monkeypatch.setenv("TQ_DISABLE_BOUNDARIES", pattern)
        found = {boundary.name: boundary for boundary in pairing.pair_model(model)}
        acts = [found[f"{name}.mlp.act_fn"] for name in ("first", "second")]
        assert sum(boundary.reason is None for boundary in acts) == fused
        for each, boundary, scale in zip((model.first, model.second), acts, (0.25, 0.5), strict=True):
            each.mlp.down_proj.seen.clear()
            each.mlp(signs())
            (given,) = each.mlp.down_proj.seen
            assert isinstance(given, Activation) == (boundary.reason is None)
            assert not isinstance(given, Activation) or given.scale.item() == scale
    assert type(act) is Act and act not in (model.first.mlp.act_fn, model.second.mlp.act_fn)


def test_a_norm_of_two_layers_is_left_alone_in_both(layer):
    model = two_layers(layer)
    norm = model.second.input_layernorm = model.first.input_layernorm
    found = {boundary.name: boundary.reason for boundary in pairing.pair_model(model)}
    assert found["first.input_layernorm"] == found["second.input_layernorm"] == "the module is shared by two parents"
    assert type(norm) is Norm and found["first.mlp.act_fn"] is None
