"""A norm whose output a quantized layer reads and others read too: those get it as the norm alone would make it."""

from __future__ import annotations

import pytest
import torch
from contract_fakes import (
    KERNEL_ENTRY,
    Activation,
    Kernel,
    KernelLinear,
    Key,
    Linear,
    LoraLinear,
    Norm,
    bits,
    e4m3,
    signs,
)

from tq import contract
from tq.contract import consumers, pairing, sites

ROWS = 3


class Mixer(torch.nn.Module):
    """Two layers of one input, whose shape it reads as well."""

    def __init__(self, linear):
        super().__init__()
        self.in_proj, self.other = linear, Linear()

    def forward(self, x):
        return self.project(x)

    def project(self, x):
        return self.in_proj(x) + self.other(x), x.size(0), x.dtype


class Wrapper(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.mixer = Mixer(linear)

    def forward(self, x):
        return self.mixer(x)


class Layer(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.norm, self.wrapper = Norm(), Wrapper(linear)

    def forward(self, x, residual=None):
        if residual is None:
            return self.wrapper(self.norm(x))
        y, residual = self.norm(x, residual)
        return *self.wrapper(y), residual


@pytest.fixture
def shared(adapter, monkeypatch):
    """Makes a paired layer of a linear layer, and its boundary."""
    adapter.consumers = {Kernel: KERNEL_ENTRY}
    adapter.producer_of = lambda module: "rms_norm" if isinstance(module, Norm) else None

    def made(linear, through=None, **options):
        layer = Layer(linear)
        mixer = layer.wrapper.mixer
        through = pairing.forward_hash(mixer, "project") if through is None else through
        forwards = (
            sites.Forward(pairing.forward_hash(layer), "", hands={"norm": "absent wrapper"}),
            sites.Forward(pairing.forward_hash(layer.wrapper), "", passes="mixer"),
            sites.Forward(
                pairing.forward_hash(mixer),
                "",
                enters="in_proj",
                shared={"in_proj": ("other", "gone")},
                through={"project": (through,)},
                **options,
            ),
        )
        monkeypatch.setattr(pairing, "BY_SHA", {forward.sha: forward for forward in forwards})
        (boundary,) = pairing.pair_model(layer)
        return layer, boundary

    return made


@pytest.mark.parametrize("residual", [False, True])
def test_the_consumer_gets_codes_and_all_others_the_norm(shared, residual):
    layer, boundary = shared(Linear(Key("static"), 0.25))
    mixer = layer.wrapper.mixer
    assert boundary.reason is None and boundary.consumer == "wrapper.mixer.in_proj"
    assert boundary.shares == ("wrapper.mixer.other",)
    for seed in (1, 2, 3):  # later ones may be repeated
        x = signs(ROWS, seed)
        given = (x, torch.ones_like(x)) if residual else (x,)
        y = Norm()(*[each.clone() for each in given])
        y, *rest = y if residual else (y,)
        out, size, dtype, *others = layer(*given)
        assert torch.equal(out, e4m3(y, 0.25).float() * 0.25 + y.float())
        assert (size, dtype) == (ROWS, torch.bfloat16) and all(map(torch.equal, others, rest))
        taken, plain = mixer.in_proj.seen[-1], mixer.other.seen[-1]
        assert isinstance(taken, Activation) and torch.equal(bits(taken.data), bits(e4m3(y, 0.25)))
        assert type(plain) is torch.Tensor and torch.equal(plain, y)
    (found,) = contract.report(layer).boundaries
    assert found.calls == 3 and str(contract.report(layer)).endswith("; unquantized too, for wrapper.mixer.other")


def test_a_kernel_that_names_no_key_gets_codes_too(shared):
    layer, boundary = shared(KernelLinear())
    assert boundary.reason is None and boundary.scheme == "fp8_group128"
    y = Norm()(signs(ROWS))
    assert torch.equal(layer(signs(ROWS))[0], Kernel().apply_weights(None, y) + y.float())
    assert isinstance(layer.wrapper.mixer.in_proj.seen[-1], Activation)


def test_what_is_made_of_the_tensor_has_no_codes(shared):
    layer, _ = shared(Linear(Key("static"), 0.25))
    linear, y = layer.wrapper.mixer.in_proj, layer.norm(signs(ROWS))
    for other in (y.view(ROWS, -1), y * 2, y[:1]):
        assert linear(other).dtype == torch.float32 and linear.seen[-1] is other
    another = Linear(Key("static"), 0.5)
    consumers.find_attached(another)
    assert torch.equal(another(y), y.float()) and another.seen == [y]


def test_a_wrapper_for_lora_gets_the_plain_tensor_and_finds_the_class_it_looks_for(shared):
    layer, _ = shared(Linear(Key("static"), 0.25))
    mixer = layer.wrapper.mixer
    assert type(mixer.in_proj) is Linear
    base, mixer.in_proj = mixer.in_proj, LoraLinear(mixer.in_proj)
    layer(signs(ROWS))
    assert torch.equal(base.seen[-1], Norm()(signs(ROWS))) and contract.report(layer).calls == 0


def test_pairing_again_and_undone(shared, monkeypatch):
    layer, boundary = shared(Linear(Key("static"), 0.25))
    linear = layer.wrapper.mixer.in_proj
    forward = linear.forward
    (boundary,) = pairing.pair_model(layer)
    assert boundary.reason is None and linear.forward is forward
    monkeypatch.setenv("TQ_DISABLE_BOUNDARIES", "norm")
    (boundary,) = pairing.pair_model(layer)
    assert boundary.reason == "switched off by TQ_DISABLE_BOUNDARIES" and "forward" not in linear.__dict__
    layer(signs(ROWS))
    assert torch.equal(linear.seen[-1], Norm()(signs(ROWS)))


def test_a_forward_of_the_layers_own_is_put_back(shared, monkeypatch):
    linear = Linear(Key("static"), 0.25)
    linear.forward = own = lambda x: Linear.forward(linear, x) * 1
    layer, _ = shared(linear)
    layer(signs(ROWS))
    assert isinstance(linear.seen[-1], Activation)
    consumers.forget_attached(linear)
    assert linear.forward is own


def test_a_method_that_was_not_read_is_not_known(shared):
    layer, boundary = shared(Linear(Key("static"), 0.25), through="0123456789abcdef")
    assert boundary.reason == "the forward of Mixer is not a known one" and boundary.shares == ()
    layer(signs(ROWS))
    assert torch.equal(layer.wrapper.mixer.in_proj.seen[-1], Norm()(signs(ROWS)))


def test_compiled_without_a_break(shared):
    layer, _ = shared(KernelLinear())
    mixer, graphs = layer.wrapper.mixer, []
    kernel = mixer.in_proj.quant_method.fp8_linear
    consumers.forget_attached(mixer.in_proj)
    mixer.in_proj.forward = lambda x: kernel.apply_weights(None, x)
    mixer.other.forward = lambda x: x.float()
    consumers.find_attached(mixer.in_proj)

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, dynamic=True, backend=keep_graph)
    for m in (3, 6):
        y = Norm()(signs(m))
        assert torch.equal(compiled(signs(m)), Kernel().apply_weights(None, y) + y.float())
    (node,) = [node for node in graphs[0].graph.nodes if "tq.rms_norm" in str(node.target)]
    assert len(graphs) == 1 and node.kwargs["return_unquantized"] is True
    # The kernel's own quantizer takes the greatest of each group; nothing in the graph does.
    assert not any("amax" in str(node.target) for node in graphs[0].graph.nodes)
