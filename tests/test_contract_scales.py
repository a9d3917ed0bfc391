"""The scales that a producer reads from a consumer, without vLLM."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from contract_fakes import (
    DEVICE,
    Key,
    Linear,
    Norm,
    bits,
    e4m3,
    signs,
)

from tq import contract
from tq.contract import pairing, scales


@pytest.mark.parametrize("scale", [0.5, [0.5], [[0.5]]])
def test_scale_of_one_element_in_any_shape(scale):
    linear = Linear(Key("static"), scale)
    assert contract.get_input_quant_scales(linear).static_scale is linear.input_scale


def test_scale_absent_or_ambiguous_is_none():
    assert contract.get_input_quant_scales(Linear(Key("static"))) == contract.InputQuantScales()
    assert contract.get_input_quant_scales(Linear(Key("static"), [0.5, 0.25])).static_scale is None


def test_scales_are_read_under_the_kernels_names():
    linear = Linear(Key("static"), 0.5)
    linear.in_s, linear.in_ub = torch.tensor(2.0), torch.tensor(3.0)
    kernel = type("Kernel", (), {"layer_param_names": ["w", "w_s", "in_s", "in_ub"]})()
    linear.scheme = type("Scheme", (), {"fp8_linear": kernel})()
    found = contract.get_input_quant_scales(linear)
    assert found.static_scale is linear.in_s and found.scale_ub is linear.in_ub


def test_the_engines_own_accessor_wins(monkeypatch):
    own = namedtuple("Own", "static_scale")(torch.tensor(8.0))
    monkeypatch.setattr(scales, "own_accessor", lambda linear: own)
    assert contract.get_input_quant_scales(Linear(Key("static"), 0.5)).static_scale is own.static_scale


def test_upper_bound_reaches_the_kernel(adapter):
    linear = Linear(Key("token"))
    linear.input_scale_ub = torch.tensor([0.5], device=DEVICE)
    out = contract.rms_norm_input_quant(Norm(), signs(), None, linear)
    assert torch.equal(out.scale, torch.full((3, 1), 0.5 / 448, device=DEVICE))


def test_scale_is_bound_at_the_call(layer):
    pairing.pair_model(layer)
    linear, norm, x = layer.self_attn.qkv_proj, layer.input_layernorm, signs()
    y = (x.float() / 2).to(x.dtype) * norm.weight
    linear.input_scale = torch.nn.Parameter(torch.tensor([0.5], device=DEVICE), requires_grad=False)
    assert torch.equal(bits(norm(x).data), bits(e4m3(y, 0.5)))
    linear.input_scale.data.copy_(torch.tensor([0.125]))
    assert torch.equal(bits(norm(x).data), bits(e4m3(y, 0.125)))
    del linear.input_scale
    assert torch.equal(norm(x), y)


def test_an_attribute_is_found_as_getattr_finds_it():
    class Delegating(torch.nn.Linear):
        def __getattr__(self, name):
            return 5 if name == "delegated" else super().__getattr__(name)

    class Plain(torch.nn.Linear):
        of_class = 3

        @property
        def computed(self):
            return self.of_class + 1

    for owner in (Plain(2, 2), Delegating(2, 2), type("Object", (), {"of_class": 1})()):
        owner.of_instance = None
        if isinstance(owner, torch.nn.Module):
            owner.register_buffer("buffer", torch.ones(1))
            owner.child = torch.nn.Identity()
        for name in ("of_instance", "weight", "buffer", "child", "of_class", "computed", "delegated", "absent"):
            assert scales.attribute(owner, name) is getattr(owner, name, None)
