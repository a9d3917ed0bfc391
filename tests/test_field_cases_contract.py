"""Bugs that were reported of producers that read a layer's scales, as tests (O21, O22): see test_field_cases.py."""

from __future__ import annotations

import pytest
import torch
from contract_fakes import DEVICE, Activation, Key, Linear, LoraLinear, Norm, bits, known_decoder, signs

import tq
from tq import contract
from tq.contract import pairing
from tq.contract.consumers import Reads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def number(value, dtype=torch.float32):
    return torch.tensor([value], dtype=dtype, device=DEVICE)


def parameter(value, dtype=torch.float32):
    return torch.nn.Parameter(number(value, dtype), requires_grad=False)


# scheme -> (the layer's names of what it reads: option of the producer, three values of each, no two alike and none 1).
GIVEN = {
    "fp8_tensor": {"input_scale": ("scale", (0.5, 0.25, 0.125))},
    "int8_tensor_azp": {
        "input_scale": ("scale", (0.5, 0.25, 0.125)),
        "input_zero_point": ("zero_point", (3, -7, 11)),
    },
    "nvfp4": {"input_global_scale_inv": ("global_scale_inv", (4.0, 0.5, 16.0))},
}


def dtype_of(option):
    return torch.int32 if option == "zero_point" else torch.float32


@pytest.fixture(params=GIVEN)
def scheme(request, adapter):
    adapter.native[Key(request.param)] = Reads(Key(request.param), request.param, "row_major")
    return request.param


@pytest.fixture
def paired(scheme, adapter, monkeypatch):
    """A decoder whose layers read the first values, and have scales beside them that must not be taken for those."""
    layer = known_decoder(monkeypatch, lambda: Linear(Key(scheme)))
    for linear in (layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
        linear.input_global_scale = parameter(0.3)  # NVFP4's, the wrong way round
        linear.weight_scale = parameter(7.0)
        for name, (option, values) in GIVEN[scheme].items():
            setattr(linear, name, parameter(values[0], dtype_of(option)))
    assert all(boundary.reason is None for boundary in pairing.pair_model(layer))
    return layer


def expected(scheme, norm, x, i):
    given = {option: number(values[i], dtype_of(option)) for option, values in GIVEN[scheme].values()}
    if scheme == "nvfp4":
        given["layout"] = "row_major"
    return tq.rms_norm(x, norm.weight, 1e-30, scheme=scheme, rounding="before_and_after_weight", **given)


def assert_made(out, scheme, norm, x, i):
    wanted = expected(scheme, norm, x, i)
    assert torch.equal(bits(out.data), bits(wanted.data)) and torch.equal(bits(out.scale), bits(wanted.scale))


def test_o21_scales_replaced_written_and_deleted_after_loading(paired, scheme):
    norm, linear, x = paired.input_layernorm, paired.self_attn.qkv_proj, signs()
    for _ in range(2):
        assert_made(norm(x), scheme, norm, x, 0)
    for name, (option, values) in GIVEN[scheme].items():
        setattr(linear, name, parameter(values[1], dtype_of(option)))
    for _ in range(2):
        assert_made(norm(x), scheme, norm, x, 1)
    for name, (option, values) in GIVEN[scheme].items():
        getattr(linear, name).data.copy_(number(values[2], dtype_of(option)))
    for _ in range(2):
        assert_made(norm(x), scheme, norm, x, 2)
    for name in GIVEN[scheme]:
        held = getattr(linear, name)
        delattr(linear, name)
        for _ in range(2):
            assert torch.equal(norm(x), norm.tq_plain_forward(x))
        setattr(linear, name, held)
        assert_made(norm(x), scheme, norm, x, 2)


def test_o21_installing_and_loading_twice_inverts_nothing(paired, scheme):
    norm, x = paired.input_layernorm, signs()
    for _ in range(3):
        pairing.pair_model(paired)
        assert_made(norm(x), scheme, norm, x, 0)


@needs_gpu
def test_o21_a_replay_sees_a_scale_written_in_place(paired, scheme):
    norm, linear, x = paired.input_layernorm, paired.self_attn.qkv_proj, signs()
    norm(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = norm(x)
    for i in (0, 1, 2):
        for name, (option, values) in GIVEN[scheme].items():
            getattr(linear, name).data.copy_(number(values[i], dtype_of(option)))
        graph.replay()
        assert_made(out, scheme, norm, x, i)


@pytest.mark.parametrize("active", [True, False])
def test_o22_an_adapter_gets_the_activation_itself(layer, active):
    """Added after pairing, and after calls that were fused; idle, it is zero."""
    pairing.pair_model(layer)
    norm, base, x = layer.input_layernorm, layer.self_attn.qkv_proj, signs()
    for _ in range(2):
        assert isinstance(norm(x), Activation)
    wrapper = layer.self_attn.qkv_proj = LoraLinear(base)
    wrapper.b.mul_(active)
    plain = norm.tq_plain_forward(x)
    for _ in range(2):
        out = layer.self_attn(norm(x))
        assert torch.equal(out, plain.float() + plain.float() @ wrapper.a @ wrapper.b)
        assert isinstance(base.seen[-1], torch.Tensor)
    layer.self_attn.qkv_proj = base
    assert isinstance(norm(x), Activation)


def test_o22_an_activation_of_another_kind_is_an_error_and_never_dequantized(adapter):
    out = contract.rms_norm_input_quant(Norm(), signs(), None, Linear(Key("token")))
    with pytest.raises(TypeError, match="activation of"):
        Linear(Key("static"), 0.25)(out)
