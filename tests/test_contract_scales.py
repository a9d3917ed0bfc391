"""The scales that a producer reads from a consumer, without vLLM."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import pytest
import torch
from contract_fakes import (
    DEVICE,
    KernelLinear,
    Key,
    Linear,
    Norm,
    bits,
    e4m3,
    signs,
)

import tq
from tq import contract
from tq.contract import pairing, scales
from tq.contract.consumers import Reads


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


@pytest.fixture
def nvfp4(adapter, monkeypatch):
    """A consumer of NVFP4 whose scales all differ, and what the producer was given for it."""
    stand_in = dataclasses.replace(tq.SCHEMES["fp8_group128"], name="nvfp4")
    monkeypatch.setitem(tq.SCHEMES, "nvfp4", tq.SCHEMES.get("nvfp4", stand_in))
    adapter.native[Key("nvfp4")] = Reads(Key("nvfp4"), "nvfp4", "row_major")
    linear, given = Linear(Key("nvfp4"), 3.0), []
    linear.input_global_scale = torch.nn.Parameter(torch.tensor([4.0]), requires_grad=False)
    linear.input_global_scale_inv = torch.nn.Parameter(torch.tensor([0.25]), requires_grad=False)
    linear.input_scale_ub = torch.tensor([5.0])

    def rms_norm(x, weight, eps, **options):
        given.append(options)
        return tq.quantize(x, scheme="fp8_group128")

    monkeypatch.setitem(tq.PRODUCERS, "rms_norm", rms_norm)
    return linear, given


def test_nvfp4_takes_the_inverse_of_the_global_scale_and_no_other(nvfp4):
    linear, given = nvfp4
    contract.rms_norm_input_quant(Norm(), signs(), None, linear)
    assert given[-1]["global_scale_inv"] is linear.input_global_scale_inv
    assert "scale" not in given[-1] and "scale_ub" not in given[-1]
    assert contract.get_input_quant_scales(linear).global_scale_inv.item() == 0.25


def test_nvfp4_takes_the_scale_that_is_there_at_the_call(nvfp4):
    linear, given = nvfp4
    contract.rms_norm_input_quant(Norm(), signs(), None, linear)
    linear.input_global_scale_inv = torch.nn.Parameter(torch.tensor([0.125]), requires_grad=False)
    contract.rms_norm_input_quant(Norm(), signs(), None, linear)
    assert given[-1]["global_scale_inv"].item() == 0.125
    del linear.input_global_scale_inv
    assert isinstance(contract.rms_norm_input_quant(Norm(), signs(), None, linear), torch.Tensor) and len(given) == 2


def test_int8_scale_is_read_under_its_kernels_name():
    linear = KernelLinear()
    linear.quant_method.fp8_linear.layer_param_names = ("w", "w_s", "in_s", "in_zp", "azp_adj")
    linear.in_s, linear.in_zp, linear.input_scale = torch.tensor(2.0), torch.tensor(3.0), torch.tensor(5.0)
    found = contract.get_input_quant_scales(linear)
    assert found.static_scale is linear.in_s and found.scale_ub is None


def test_scale_of_a_moved_or_reloaded_layer_is_the_new_one(layer):
    pairing.pair_model(layer)
    linear, norm, x = layer.self_attn.qkv_proj, layer.input_layernorm, signs()
    y = (x.float() / 2).to(x.dtype) * norm.weight
    before = linear.input_scale
    layer.to(torch.float64).to(torch.float32).to(DEVICE)  # replaces the data of every parameter
    norm.weight.data = norm.weight.data.to(torch.bfloat16)
    layer.load_state_dict(
        {name: value * 2 if name.endswith("input_scale") else value for name, value in layer.state_dict().items()}
    )
    out = norm(x)
    assert out.scale is linear.input_scale and out.scale.item() == 0.5 and before is linear.input_scale
    assert torch.equal(bits(out.data), bits(e4m3(y, 0.5)))
    layer.load_state_dict({"self_attn.qkv_proj.input_scale": torch.tensor(0.0625)}, strict=False, assign=True)
    out = norm(x)
    assert before is not linear.input_scale and torch.equal(bits(out.data), bits(e4m3(y, 0.0625)))


def test_each_layer_has_its_own_scale(layer):
    pairing.pair_model(layer)
    layer.self_attn.qkv_proj.input_scale.data.fill_(0.5)
    layer.mlp.gate_up_proj.input_scale.data.fill_(0.125)
    x = signs()
    layer(x, torch.zeros_like(x))
    assert layer.self_attn.qkv_proj.seen[0].scale.item() == 0.5
    assert layer.mlp.gate_up_proj.seen[0].scale.item() == 0.125 and layer.mlp.down_proj.seen[0].scale.item() == 0.25
