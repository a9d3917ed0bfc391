"""Fused when the consumer can take it, else exactly the plain module; without vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from contract_fakes import (
    DEVICE,
    HIDDEN,
    Act,
    Key,
    Linear,
    LoraLinear,
    Norm,
    OtherNorm,
    bits,
    e4m3,
    signs,
)

import tq
from tq import contract
from tq.contract import pairing, route


def test_import_leaves_vllm_out():
    code = "import sys, tq, tq.contract; sys.exit(any(n.split('.')[0] == 'vllm' for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_norm_with_static_scale(adapter):
    norm, linear, x = Norm(), Linear(Key("static"), 0.25), signs()
    out = contract.rms_norm_input_quant(norm, x, None, linear)
    expected = e4m3((x.float() / 2).to(x.dtype) * norm.weight, 0.25)
    assert torch.equal(bits(out.data), bits(expected))
    assert out.scale is linear.input_scale and out.quant_key == Key("static")
    assert out.orig_dtype == torch.bfloat16 and out.orig_shape == x.shape


@pytest.mark.parametrize(("key", "groups"), [("token", 1), ("group", HIDDEN // 128)])
def test_norm_with_dynamic_scales(adapter, key, groups):
    norm, x = Norm(), signs()
    out = contract.rms_norm_input_quant(norm, x, None, Linear(Key(key)))
    y = ((x.float() / 2).to(x.dtype) * norm.weight).float().unflatten(-1, (groups, -1))
    scale = y.abs().amax(-1) / 448
    assert torch.equal(out.scale, scale)
    assert torch.equal(bits(out.data), bits(e4m3(y, scale.unsqueeze(-1)).flatten(-2)))


@pytest.mark.parametrize("policy", [("after_weight", True), ("before_and_after_weight", False)])
def test_rounding_is_that_of_the_engine(adapter, policy):
    adapter.norm_rounding = route.NormRounding(*policy)
    seen = []
    with contract.observe(lambda *call: seen.append(call)):
        contract.rms_norm_input_quant(Norm(), signs(), signs(seed=2), Linear(Key("static"), 0.25))
    _, producer, _, kwargs, _ = seen[0]
    assert producer == "rms_norm" and (kwargs["rounding"], kwargs["round_residual"]) == policy


def test_residual_is_not_written_in_place(adapter):
    x, residual = signs(), signs(seed=2)
    before = residual.clone()
    seen = []
    with contract.observe(lambda *call: seen.append(call)):
        _, after = contract.rms_norm_input_quant(Norm(1e-5), x, residual, Linear(Key("static"), 0.25))
    assert torch.equal(seen[0][3]["residual"], before) and torch.equal(after, x + before)
    assert torch.equal(residual, before)
    contract.rms_norm_input_quant(Norm(), x, None, Linear(Key("static"), 0.25))
    assert len(seen) == 1


def test_residual_is_written_where_the_plain_norm_writes_it(adapter):
    adapter.norm_rounding = route.NormRounding("after_weight", True, in_place=True)
    x, linear = signs(), Linear(Key("static"), 0.25)
    residual, watched, traced = signs(seed=2), signs(seed=2), signs(seed=2)
    wanted = x + residual
    _, after = contract.rms_norm_input_quant(Norm(), x, residual, linear)
    assert after is residual and torch.equal(residual, wanted)
    with contract.observe(lambda *call: None):
        _, after = contract.rms_norm_input_quant(Norm(), x, watched, linear)
    assert torch.equal(watched, signs(seed=2)) and torch.equal(after, wanted)
    norm = Norm()
    compiled = torch.compile(lambda x, r: contract.rms_norm_input_quant(norm, x, r, linear)[1], backend="aot_eager")
    assert torch.equal(compiled(x, traced), wanted) and torch.equal(traced, signs(seed=2))


def test_silu_mul(adapter):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 2 * HIDDEN, generator=generator).to(torch.bfloat16).to(DEVICE)
    x[:, :HIDDEN] = 0  # silu(0) = 0 is exact
    x[0, :HIDDEN] = 64  # and so is silu(64) = 64
    out = contract.silu_mul_input_quant(Act(), x, Linear(Key("static"), 0.5))
    gate = torch.where(x[:, :HIDDEN] == 64, 64.0, 0.0).to(x.dtype)
    assert torch.equal(bits(out.data), bits(e4m3(gate * x[:, HIDDEN:], 0.5)))


def lora():
    return LoraLinear(Linear(Key("static"), 0.25))


def splitting():
    linear = Linear(Key("static"), 0.25)
    linear.input_is_parallel = False
    return linear


FALLBACKS = {
    "no consumer": lambda: (Norm(), signs(), None),
    "no key": lambda: (Norm(), signs(), Linear()),
    "unknown key": lambda: (Norm(), signs(), Linear(Key("nvfp4"), 0.25)),
    "no scale": lambda: (Norm(), signs(), Linear(Key("static"))),
    "two scales": lambda: (Norm(), signs(), Linear(Key("static"), [0.25, 0.5])),
    "fp32 input": lambda: (Norm(), signs().float(), Linear(Key("static"), 0.25)),
    "fp16 input, bf16 weight": lambda: (Norm(), signs().half(), Linear(Key("static"), 0.25)),
    "a subclass of the norm": lambda: (OtherNorm(), signs(), Linear(Key("static"), 0.25)),
    "LoRA": lambda: (Norm(), signs(), lora()),
    "input_is_parallel=False": lambda: (Norm(), signs(), splitting()),
}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("case", FALLBACKS)
def test_fallback_is_the_plain_norm(adapter, case, residual, monkeypatch):
    norm, x, linear = FALLBACKS[case]()
    returned, given = [], []
    plain = norm.forward
    norm.forward = lambda *args: returned.append(plain(*args)) or given.append(args) or returned[-1]
    monkeypatch.setitem(tq.PRODUCERS, "rms_norm", lambda *args, **kwargs: pytest.fail("must not be called"))
    r = x.clone() if residual else None
    assert contract.rms_norm_input_quant(norm, x, r, linear) is returned[0]
    assert len(given) == 1 and len(given[0]) == (2 if residual else 1)


def test_nothing_is_fused_when_the_engine_refuses_all(adapter):
    adapter.refuses_all = "batch-invariant"
    assert isinstance(contract.rms_norm_input_quant(Norm(), signs(), None, Linear(Key("static"), 0.25)), torch.Tensor)


def test_unknown_norm_implementation_is_not_guessed(adapter):
    adapter.norm_rounding = None
    assert isinstance(contract.rms_norm_input_quant(Norm(), signs(), None, Linear(Key("static"), 0.25)), torch.Tensor)


def test_row_that_groups_do_not_divide(adapter):
    x = torch.ones(2, 2 * 192, dtype=torch.bfloat16, device=DEVICE)
    assert isinstance(contract.silu_mul_input_quant(Act(), x, Linear(Key("group"))), torch.Tensor)


SCALE_KEY = Key("static")


CHANGES = {
    "no key": (lambda linear, x: setattr(linear, "_input_quant_key", None), None),
    "unknown key": (lambda linear, x: setattr(linear, "_input_quant_key", Key("nvfp4")), None),
    "another key": (lambda linear, x: setattr(linear, "_input_quant_key", Key("token")), Key("token")),
    "an equal key": (lambda linear, x: setattr(linear, "_input_quant_key", Key("static")), Key("static")),
    "flag of LoRA": (lambda linear, x: setattr(linear, "requires_unquantized_input", True), None),
    "split input": (lambda linear, x: setattr(linear, "input_is_parallel", False), None),
    "scale of two elements": (lambda linear, x: setattr(linear.input_scale, "data", x[0, :2].float()), None),
    "bf16 scale": (lambda linear, x: setattr(linear.input_scale, "data", x[0, :1]), None),
    "fp32 input": (lambda linear, x: x.float(), None),
    "strided input": (lambda linear, x: x.repeat_interleave(2, -1)[:, ::2], None),
    "other rows": (lambda linear, x: x[:2], Key("static")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("producer", ["norm", "act"])
def test_a_change_is_seen_by_the_next_call_and_undone_by_the_one_after(layer, change, producer):
    pairing.pair_model(layer)
    module, linear, x = {
        "norm": (layer.input_layernorm, layer.self_attn.qkv_proj, signs()),
        "act": (layer.mlp.act_fn, layer.mlp.down_proj, torch.cat([signs(), signs(seed=2)], -1)),
    }[producer]
    make, key = CHANGES[change]
    assert module(x).quant_key == SCALE_KEY
    scale, members = linear.input_scale.data, dict(linear.__dict__)
    changed = make(linear, x)
    out = module(x if changed is None else changed)
    assert isinstance(out, torch.Tensor) if key is None else out.quant_key == key
    linear.input_scale.data = scale
    linear.__dict__.clear()
    linear.__dict__.update(members)
    assert module(x).quant_key == SCALE_KEY


def test_compiled_layer_equals_eager_for_any_number_of_rows(layer):
    pairing.pair_model(layer)
    norm, linear, graphs = layer.input_layernorm, layer.self_attn.qkv_proj, []

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph

    def run(x, residual):
        y, residual = norm(x, residual)
        return y.data.view(torch.uint8), y.scale, residual

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=keep_graph)
    for m in (3, 5, 8):
        x, residual = signs(m), signs(m, seed=2)
        for got, expected in zip(compiled(x, residual), run(x, residual), strict=True):
            assert torch.equal(got, expected)
    assert len(graphs) == 1 and any("tq.rms_norm" in str(n.target) for n in graphs[0].graph.nodes)
    assert norm.tq_boundary.calls == 3 and linear.seen == []
