"""Calls like an earlier one run its kernel without being decided anew; whatever changed in between is seen."""

from __future__ import annotations

import pytest
import torch
from contract_fakes import HIDDEN, Activation, Adapter, Attention, Key, Linear, bits, known_decoder, repeat_calls, signs

import tq
from tq import contract
from tq.contract import pairing, route

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the launch of a compiled kernel is stood in for")


@pytest.fixture
def adapter(monkeypatch):
    adapter = Adapter()
    monkeypatch.setattr(route.state, "adapter", adapter)
    return adapter


@pytest.fixture
def repeated(monkeypatch):
    return repeat_calls(monkeypatch)


@pytest.fixture(params=["static", "token", "group"])
def paired(adapter, monkeypatch, repeated, request):
    layer = known_decoder(monkeypatch, lambda: Linear(Key(request.param), 0.25 if request.param == "static" else None))
    assert all(boundary.reason is None for boundary in pairing.pair_model(layer))
    return layer


def same(a, b):
    return torch.equal(bits(a.data), bits(b.data)) and torch.equal(a.scale, b.scale) and a.reads == b.reads


@pytest.mark.parametrize("residual", [False, True])
def test_the_second_call_is_repeated_and_the_same(paired, repeated, residual):
    norm = paired.input_layernorm
    given = [(signs(seed=seed), signs(seed=seed + 9)) if residual else (signs(seed=seed),) for seed in (1, 2, 3)]
    got = [norm(*args) for args in given]
    assert len(repeated) == 2
    pairing.pair_model(paired)  # forgets
    for args, mine in zip(given, got, strict=True):
        expected = contract.rms_norm_input_quant(norm, *args, *([] if residual else [None]), paired.self_attn.qkv_proj)
        if residual:
            assert torch.equal(mine[1], expected[1]) and mine[1] is not args[1]
            mine, expected = mine[0], expected[0]
        assert isinstance(mine, Activation) and same(mine, expected)
        assert (mine.orig_dtype, mine.orig_shape) == (torch.bfloat16, args[0].shape)


def test_an_act_is_repeated(paired, repeated):
    act, linear = paired.mlp.act_fn, paired.mlp.down_proj
    for seed in (1, 2, 3):
        x = torch.cat([signs(seed=seed), signs(seed=seed + 9)], -1)
        assert same(act(x), contract.silu_mul_input_quant(act, x, linear))
    assert len(repeated) == 2 and paired.mlp.act_fn.tq_boundary.calls == 3


def test_the_residual_is_written_where_the_plain_norm_writes_it(adapter, paired, repeated):
    adapter.norm_rounding = route.NormRounding("after_weight", True, in_place=True)
    for seed in (1, 2, 3):
        x, residual = signs(seed=seed), signs(seed=seed + 9)
        wanted = x + residual
        assert paired.input_layernorm(x, residual)[1] is residual and torch.equal(residual, wanted)
    assert len(repeated) == 2


def test_each_description_is_learned_once(paired, repeated):
    norm = paired.input_layernorm
    for m in (3, 5, 3, 5, 3):
        assert norm(signs(m)).data.shape == (m, HIDDEN)
    assert len(repeated) == 3
    strided = torch.zeros(3, 2 * HIDDEN, dtype=torch.bfloat16)[:, :HIDDEN]
    norm(strided.copy_(signs()))
    norm(signs().view(1, 3, HIDDEN))
    assert len(repeated) == 3 and len(norm.tq_repeats.calls) == 4


def test_observers_and_the_reference_see_every_call(paired, repeated):
    norm, seen = paired.input_layernorm, []
    norm(signs())
    with contract.observe(lambda *call: seen.append(call)):
        norm(signs())
    with tq.use_reference():
        norm(signs())
    assert len(seen) == 1 and repeated == []
    norm(signs())
    assert len(repeated) == 1


CHANGES = {
    "the adapter": lambda layer, adapter: setattr(route.state, "adapter", None),
    "what it refuses": lambda layer, adapter: setattr(adapter, "refuses_all", "batch-invariant mode"),
    "the plain norm": lambda layer, adapter: setattr(adapter, "norm_rounding", None),
    "the layer": lambda layer, adapter: setattr(layer.self_attn, "qkv_proj", Linear()),
    "its parent": lambda layer, adapter: setattr(layer, "self_attn", Attention(Linear())),
    "its key": lambda layer, adapter: setattr(layer.self_attn.qkv_proj, "_input_quant_key", None),
    "its switch": lambda layer, adapter: setattr(layer.self_attn.qkv_proj, "tq_off", True),
    "what it takes": lambda layer, adapter: setattr(layer.self_attn.qkv_proj, "requires_unquantized_input", True),
    "what it splits": lambda layer, adapter: setattr(layer.self_attn.qkv_proj, "input_is_parallel", False),
    "the norm's weight": lambda layer, adapter: layer.input_layernorm.float(),
    "the norm's variance": lambda layer, adapter: setattr(layer.input_layernorm, "variance_size_override", 8),
    "the pairing": lambda layer, adapter: pairing.unpair(layer.input_layernorm),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_ends_the_repeating(paired, adapter, repeated, change):
    norm = paired.input_layernorm
    for _ in range(2):
        assert isinstance(norm(signs()), Activation)
    assert len(repeated) == 1
    CHANGES[change](paired, adapter)
    assert isinstance(norm(signs()), torch.Tensor) and len(repeated) == 1


def test_another_value_is_the_next_calls(adapter, monkeypatch, repeated):
    """Everything a call reads, changed while it stays fusable."""
    layer = known_decoder(monkeypatch)
    pairing.pair_model(layer)
    norm, linear = layer.input_layernorm, layer.self_attn.qkv_proj
    changes = (
        lambda: linear.input_scale.data.fill_(0.5),  # in place: the same memory, still repeated
        lambda: setattr(linear.input_scale, "data", torch.tensor([0.125])),
        lambda: setattr(linear, "input_scale", torch.nn.Parameter(torch.tensor(0.0625), requires_grad=False)),
        lambda: norm.weight.data.mul_(2),
        lambda: setattr(norm.weight, "data", norm.weight.data * 2),
        lambda: setattr(norm, "variance_epsilon", 12.0),
        lambda: setattr(adapter, "norm_rounding", route.NormRounding("none", False)),
        lambda: setattr(linear, "_input_quant_key", Key("token")),
    )
    for change in changes:
        norm(signs()), norm(signs())
        change()
        assert same(norm(signs()), contract.rms_norm_input_quant(norm, signs(), None, linear))
    # All calls but the first and those after a change, except the two changes in place.
    assert len(repeated) == 2 * len(changes) - 1 + 2


def test_what_could_change_unnoticed_is_decided_each_time(adapter, monkeypatch, repeated):
    class Computing(Linear):
        @property
        def input_is_parallel(self):
            return self.parallel

    layer = known_decoder(monkeypatch, lambda: Computing(Key("static"), 0.25))
    for linear in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
        linear.parallel = True
    pairing.pair_model(layer)
    layer.input_layernorm(signs()), layer.input_layernorm(signs())
    layer.self_attn.qkv_proj.parallel = False
    assert isinstance(layer.input_layernorm(signs()), torch.Tensor) and repeated == []


def test_a_forced_configuration_is_not_passed_by(paired, repeated):
    from tq.kernels import tuning

    norm = paired.input_layernorm
    norm(signs()), norm(signs())
    with tuning.force(tuning.RowConfig(1, HIDDEN, 1, 4)):
        norm(signs())
    assert len(repeated) == 1
