"""Kernels that quantize their own input, made to take it quantized; without vLLM."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract_fakes import (
    DEVICE,
    HIDDEN,
    KERNEL_ENTRY,
    Activation,
    Kernel,
    KernelLinear,
    Key,
    LoraLinear,
    Norm,
    OtherNorm,
    known_decoder,
    signs,
)

import tq
from tq import contract
from tq.contract import consumers, pairing
from tq.contract.consumers import Consumer, Reads

LAYOUTS = ["row_major", "column_major", "tma_aligned"]


@pytest.fixture
def dynamic(adapter, monkeypatch):
    """A decoder whose kernels name no key."""
    adapter.consumers[Kernel] = KERNEL_ENTRY
    return known_decoder(monkeypatch, KernelLinear)


def plain_kernel(linear):
    return type(linear.quant_method.fp8_linear) is Kernel and not hasattr(linear, "_input_quant_key")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_reads_what_it_would_have_made(adapter, monkeypatch, layout):
    adapter.consumers[Kernel] = KERNEL_ENTRY
    layer = known_decoder(monkeypatch, lambda: KernelLinear(Kernel(layout)))
    x, norm = signs(5), Norm()
    expected = Kernel().apply_weights(None, norm(x))
    found = pairing.pair_model(layer)
    assert [(b.scheme, b.layout, b.kernel, b.reason) for b in found] == [("fp8_group128", layout, "Kernel", None)] * 3
    assert torch.equal(layer.self_attn(layer.input_layernorm(x)), expected)
    activation = layer.self_attn.qkv_proj.seen[0]
    strides = {"row_major": (2, 1), "column_major": (1, 5), "tma_aligned": (1, 8)}
    assert isinstance(activation, Activation) and activation.scale.stride() == strides[layout]


def test_every_layer_gets_its_input_quantized_and_a_plain_one_still_works(dynamic):
    pairing.pair_model(dynamic)
    dynamic(signs(), signs(seed=2))
    linears = dynamic.self_attn.qkv_proj, dynamic.mlp.gate_up_proj, dynamic.mlp.down_proj
    assert all(isinstance(linear.seen[0], Activation) for linear in linears)
    y = Norm()(signs())
    assert torch.equal(linears[0](y), Kernel().apply_weights(None, y))


def test_bias_reaches_the_product(dynamic):
    pairing.pair_model(dynamic)
    linear, bias = dynamic.self_attn.qkv_proj, torch.arange(HIDDEN, device=DEVICE).float()
    y = dynamic.input_layernorm(signs())
    kernel = linear.quant_method.fp8_linear
    assert torch.equal(kernel.apply_weights(linear, y, bias), kernel.apply_weights(linear, y) + bias)


def test_accepting_twice_is_harmless_and_withdrawing_undoes_it(dynamic):
    linear = dynamic.self_attn.qkv_proj
    assert contract.expose_input_quant_key(linear) is None and contract.expose_input_quant_key(linear) is None
    kernel = linear.quant_method.fp8_linear
    assert type(kernel).__mro__[1] is Kernel and kernel.input_quant_key() == linear._input_quant_key == Key("own")
    assert contract.get_input_quant_scheme(linear) == "fp8_group128"
    consumers.withdraw(linear)
    consumers.withdraw(linear)
    assert plain_kernel(linear) and not hasattr(kernel, "tq_reads")


def test_nothing_changes_for_a_boundary_that_is_not_fused(dynamic):
    dynamic.input_layernorm = OtherNorm()
    found = pairing.pair_model(dynamic)
    assert found[0].reason is not None and found[1].reason is None
    assert plain_kernel(dynamic.self_attn.qkv_proj) and not plain_kernel(dynamic.mlp.gate_up_proj)


def test_a_boundary_that_no_longer_holds_gives_the_kernel_back(dynamic):
    pairing.pair_model(dynamic)
    pairing.pair_model(dynamic, "all-reduce fusion")
    assert plain_kernel(dynamic.self_attn.qkv_proj) and not plain_kernel(dynamic.mlp.down_proj)


def test_a_kernel_that_is_not_listed_stays(dynamic, adapter):
    class Other(Kernel):
        pass

    adapter.consumers.clear()
    adapter.consumers[Other] = KERNEL_ENTRY  # of a subclass, which says nothing about its parent
    assert pairing.pair_model(dynamic)[0].reason == "the consumer takes no quantized input (Kernel)"
    assert plain_kernel(dynamic.self_attn.qkv_proj)


@pytest.mark.parametrize(
    ("reads", "reason"),
    [
        ("the consumer's input has a zero point", "the consumer's input has a zero point"),
        (Reads(Key("own"), "fp8_group128", "swizzled"), "no scheme fp8_group128 with swizzled scales"),
        (Reads(Key("own"), "fp8_group48", "row_major"), "no scheme fp8_group48 with row_major scales"),
    ],
)
def test_what_the_kernel_reads_must_be_known(dynamic, adapter, reads, reason):
    adapter.consumers[Kernel] = Consumer(lambda kernel: reads)
    assert pairing.pair_model(dynamic)[0].reason == reason
    assert plain_kernel(dynamic.self_attn.qkv_proj)


def test_a_layer_that_needs_its_unquantized_input_keeps_its_kernel(dynamic):
    base = dynamic.self_attn.qkv_proj
    base.requires_unquantized_input = True
    assert "unquantized" in pairing.pair_model(dynamic)[0].reason
    assert plain_kernel(base)


def test_lora_added_after_pairing_gets_the_plain_activation(dynamic):
    pairing.pair_model(dynamic)
    base, x = dynamic.self_attn.qkv_proj, signs()
    dynamic.self_attn.qkv_proj = LoraLinear(base)
    y = Norm()(x)
    out = dynamic.self_attn(dynamic.input_layernorm(x))
    wrapper = dynamic.self_attn.qkv_proj
    assert torch.equal(out, Kernel().apply_weights(None, y) + y.float() @ wrapper.a @ wrapper.b)


def activation_for(linear, layout="column_major", scheme="fp8_group128", said=True):
    made = tq.quantize(signs(5), scheme=scheme, layout=layout)
    reads = Reads(Key("own"), scheme, layout) if said else None
    return Activation(made.data, made.scale, made.orig_dtype, made.orig_shape, Key("own"), reads)


@pytest.mark.parametrize("said", [True, False], ids=["of tq", "of another producer"])
@pytest.mark.parametrize("wanted", LAYOUTS)
@pytest.mark.parametrize("made", LAYOUTS)
def test_another_layout_is_an_error_that_names_both(adapter, monkeypatch, wanted, made, said):
    adapter.consumers[Kernel] = KERNEL_ENTRY
    linear = KernelLinear(Kernel(wanted))
    assert contract.expose_input_quant_key(linear) is None
    activation = activation_for(linear, made, said=said)
    if made == wanted:
        assert torch.equal(linear(activation), Kernel().apply_weights(None, signs(5)))
        return
    message = f"^Kernel: input must be fp8_group128 with {wanted} scales, got fp8_group128 with {made} scales; "
    with pytest.raises(ValueError, match=message):
        linear(activation)


def test_one_token_lies_the_same_in_both_orders(dynamic):
    linear = dynamic.self_attn.qkv_proj
    contract.expose_input_quant_key(linear)
    activation = activation_for(linear, "row_major", said=False)
    first = dataclasses.replace(activation, data=activation.data[:1], scale=activation.scale[:1])
    assert torch.equal(linear(first), Kernel().apply_weights(None, signs(5)[:1]))


def test_another_scheme_or_key_is_an_error(dynamic):
    linear = dynamic.self_attn.qkv_proj
    contract.expose_input_quant_key(linear)
    with pytest.raises(ValueError, match="fp8_group128 with column_major scales, got fp8_group128_pow2"):
        linear(activation_for(linear, scheme="fp8_group128_pow2"))
    other = dataclasses.replace(activation_for(linear), quant_key=Key("token"))
    with pytest.raises(TypeError, match=r"activation of Key\(name='own'\), got Key\(name='token'\)"):
        linear(other)
    with pytest.raises(TypeError, match=r"got .*QuantizedActivation"):
        linear(tq.quantize(signs(), scheme="fp8_group128"))


def test_compiled_without_a_break(dynamic):
    pairing.pair_model(dynamic)
    norm, attention, graphs = dynamic.input_layernorm, dynamic.self_attn, []

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph

    attention.qkv_proj.forward = lambda x: attention.qkv_proj.quant_method.fp8_linear.apply_weights(None, x)
    compiled = torch.compile(lambda x: attention(norm(x)), fullgraph=True, dynamic=True, backend=keep_graph)
    for m in (3, 6):
        assert torch.equal(compiled(signs(m)), Kernel().apply_weights(None, Norm()(signs(m))))
    (node,) = [node for node in graphs[0].graph.nodes if "tq.rms_norm" in str(node.target)]
    assert len(graphs) == 1 and node.kwargs["layout"] == "column_major"
