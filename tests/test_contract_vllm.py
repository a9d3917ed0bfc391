"""The contract against an installed vLLM; skipped without one."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import tq
from tq import contract
from tq.contract import pairing, vllm
from tq.contract.consumers import Reads
from tq.contract.route import NormRounding, state
from tq.contract.sites import Forward

pytestmark = pytest.mark.vllm
if vllm.unsupported_version() is not None:
    pytest.skip(vllm.unsupported_version(), allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN = 256


@pytest.fixture
def adapter():
    vllm.load_adapter()
    return state.adapter


@pytest.fixture
def config():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def norm(config):
    from vllm.model_executor.layers.layernorm import RMSNorm

    norm = RMSNorm(HIDDEN, eps=1e-5, dtype=torch.bfloat16).to(DEVICE)
    norm.weight.data.copy_(torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0)))
    return norm


def consumer(key="kFp8StaticTensorSym", scale=0.25):
    from vllm.model_executor.layers.quantization.utils import quant_utils

    linear = torch.nn.Module()
    linear._input_quant_key = getattr(quant_utils, key)
    linear.input_scale = torch.nn.Parameter(torch.tensor(scale, device=DEVICE), requires_grad=False)
    return linear


def signs(m=3, n=HIDDEN):
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(0, 2, (m, n), generator=generator) * 4.0 - 2.0).to(torch.bfloat16).to(DEVICE)


def test_schemes_of_vllms_keys(adapter):
    from vllm.model_executor.layers.quantization.utils import quant_utils as q

    found = {
        name: contract.get_input_quant_scheme(consumer(name))
        for name in (
            "kFp8StaticTensorSym",
            "kFp8DynamicTokenSym",
            "kFp8Dynamic128Sym",
            "kNvfp4Dynamic",
            "kFp8DynamicTensorSym",
        )
    }
    assert list(found.values()) == ["fp8_tensor", "fp8_token", "fp8_group128", "nvfp4", None]
    equal = q.QuantKey(q.FP8_DTYPE, q.kStaticTensorScale, symmetric=True)
    assert equal is not q.kFp8StaticTensorSym and adapter.native[equal].scheme == "fp8_tensor"


def test_norm_gives_vllm_an_activation_it_accepts(norm, adapter):
    from vllm.model_executor.layers.fusion.quant_activation import as_quantized_activation

    linear, x = consumer(), signs()
    out = contract.rms_norm_input_quant(norm, x, None, linear)
    assert as_quantized_activation(out, linear._input_quant_key) is out
    # The mean square is 4; 1e-5 changes the rounded quotient of +-2 by nothing.
    y = torch.sign(x) * norm.weight
    assert torch.equal(out.data.view(torch.uint8), (y.float() / 0.25).to(torch.float8_e4m3fn).view(torch.uint8))
    assert out.scale is linear.input_scale and out.orig_shape == x.shape


def test_norm_without_a_key_is_vllms_own(norm, adapter):
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(DEVICE)
    linear = consumer("kNvfp4Dynamic")
    assert torch.equal(contract.rms_norm_input_quant(norm, x, None, linear), norm(x))
    got, expected = contract.rms_norm_input_quant(norm, x, x.clone(), linear), norm(x.clone(), x.clone())
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_gemma_norm_is_not_taken_for_a_plain_one(config, adapter):
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    norm = GemmaRMSNorm(HIDDEN).to(torch.bfloat16).to(DEVICE)
    assert isinstance(contract.rms_norm_input_quant(norm, signs(), None, consumer()), torch.Tensor)


@pytest.mark.parametrize(
    ("order", "policy"),
    [
        ([], NormRounding("before_and_after_weight", False)),
        (["native"], NormRounding("before_and_after_weight", False)),
        (["vllm_c", "native"], NormRounding("after_weight", True, in_place=True)),
        (["oink", "native"], None),
    ],
)
@pytest.mark.parametrize("residual", [False, True])
def test_rounding_follows_vllms_order_of_implementations(adapter, monkeypatch, order, policy, residual):
    from vllm import ir

    op = ir.ops.fused_add_rms_norm if residual else ir.ops.rms_norm
    monkeypatch.setattr(op, "get_priority", lambda: order)
    assert adapter.norm_rounding(residual) == policy


def test_act_through_vllms_table(config, adapter):
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant

    act, linear, x = SiluAndMul(compile_native=False), consumer(), signs(n=2 * HIDDEN)
    x[:, :HIDDEN] = 64  # silu(64) = 64
    out = maybe_fused_act_quant(act, x, linear)
    expected = (64 * x[:, HIDDEN:].float() / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(out.data.view(torch.uint8), expected.view(torch.uint8))
    linear.requires_unquantized_input = True
    assert torch.equal(maybe_fused_act_quant(act, x, linear), act(x))
    del linear.requires_unquantized_input, linear.input_scale
    assert torch.equal(maybe_fused_act_quant(act, x, linear), act(x))


def roundings_in_graph(run, *args):
    """rounding of each op of tq in the graph of `run`, by the name of the op."""
    graphs = []

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compile(run, fullgraph=True, backend=keep_graph)(*args)
    nodes = [node for graph in graphs for node in graph.graph.nodes if "rounding" in node.kwargs]
    return {str(node.target).split(".")[1]: node.kwargs["rounding"] for node in nodes}


COMPILED = {"rms_norm": "none", "silu_mul": "product"}
WRITTEN = {"rms_norm": "after_weight", "silu_mul": "product"}
KERNELS = {"rms_norm": "after_weight", "silu_mul": "activation_and_product"}
TRACED = {"rms_norm": "before_and_after_weight", "silu_mul": "activation_and_product"}


@pytest.mark.parametrize(
    ("backend", "implementation", "custom_ops", "expected"),
    [
        ("inductor", "native", ["none"], COMPILED),
        ("inductor", "native", ["none", "+quant_fp8"], WRITTEN),
        ("inductor", "vllm_c", ["all"], KERNELS),
        ("eager", "native", ["none"], TRACED),
    ],
)
def test_rounding_of_compiled_code(config, norm, adapter, monkeypatch, backend, implementation, custom_ops, expected):
    from vllm import ir
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.platforms import current_platform

    act = SiluAndMul(compile_native=False)
    compilation = get_current_vllm_config().compilation_config
    monkeypatch.setattr(compilation, "backend", backend)
    monkeypatch.setattr(compilation, "custom_ops", custom_ops)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)  # where an enabled act is the torch formula too
    monkeypatch.setattr(ir.ops.rms_norm, "get_priority", lambda: [implementation])
    rounding = vllm.Rounding(NormRounding("none", False), "product")
    monkeypatch.setattr(vllm, "INDUCTOR_ROUNDING", {"cuda": rounding, "cpu": rounding})
    vllm.load_adapter()

    def run(x, y, linear):
        a = contract.rms_norm_input_quant(norm, x, None, linear).data.view(torch.uint8)
        return a, contract.silu_mul_input_quant(act, y, linear).data.view(torch.uint8)

    arguments = signs(), signs(n=2 * HIDDEN), consumer()
    torch.compiler.reset()
    assert roundings_in_graph(run, *arguments) == expected
    monkeypatch.undo()
    vllm.load_adapter()


def test_lora_wrappers_hide_the_key(adapter):
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

    wrapper = BaseLinearLayerWithLoRA.__new__(BaseLinearLayerWithLoRA)
    torch.nn.Module.__init__(wrapper)
    wrapper._input_quant_key = consumer()._input_quant_key
    assert contract.get_input_quant_key(wrapper) is None


def test_paired_norm_compiles_without_a_break(norm, adapter, monkeypatch):
    graphs = []
    layer = torch.nn.Module()
    layer.norm, layer.linear = norm, consumer()
    monkeypatch.setattr(pairing, "BY_SHA", {pairing.forward_hash(layer): Forward("", "", feeds={"norm": "linear"})})
    monkeypatch.setattr(adapter, "_inductor", None)  # where compiled code rounds is another test's
    assert pairing.pair_model(layer)[0].reason is None

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph

    def run(x, residual):
        y, residual = layer.norm(x, residual)
        return y.data.view(torch.uint8), y.scale, residual

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=keep_graph)
    for m in (3, 5):
        x, residual = signs(m), torch.ones_like(signs(m))
        for got, expected in zip(compiled(x, residual.clone()), run(x, residual.clone()), strict=True):
            assert torch.equal(got, expected)
    assert len(graphs) == 1 and any("tq.rms_norm" in str(n.target) for n in graphs[0].graph.nodes)


@pytest.mark.parametrize("scheme", ["int8_token", "nvfp4", "mxfp8"])
def test_quantizers_that_are_no_torch_formula_are_given_written_values(adapter, monkeypatch, scheme):
    monkeypatch.setattr(adapter, "_inductor", vllm.INDUCTOR_ROUNDING["cuda"])
    monkeypatch.setattr(adapter, "_native_acts", {"silu_mul": True})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(vllm, "_norm_implementation", lambda has_residual: "native")
    found = {
        producer: adapter.rounding(producer, Reads(None, name, "row_major"), False)["rounding"]
        for producer, name in (("rms_norm", scheme), ("silu_mul", scheme), ("gemma_rms_norm", scheme))
    }
    assert found == {"rms_norm": "after_weight", "silu_mul": "product", "gemma_rms_norm": "after_weight"}
    assert adapter.rounding("rms_norm", Reads(None, "fp8_token", "row_major"), False) == {"rounding": "none"}


@pytest.mark.parametrize("residual", [False, True])
def test_written_rounding_is_that_of_the_formula_compiled_alone(residual):
    """What Inductor makes of the norm and the act when it must write them: no code differs from tq's."""
    generator = torch.Generator().manual_seed(5)
    x, r = torch.randn(2, 16, 2048, generator=generator).to(torch.bfloat16)
    weight = torch.randn(2048, generator=generator).to(torch.bfloat16)

    @torch.compile
    def norm(x, r):
        z = x.float() + r.float() if residual else x.float()
        return (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5)).to(weight.dtype) * weight

    @torch.compile
    def act(x):
        return torch.nn.functional.silu(x[..., :1024]) * x[..., 1024:]

    options = {"scheme": "fp8_group128", "min_scale": tq.SCHEMES["fp8_group128"].min_scale}
    added = {"residual": r, "round_residual": False} if residual else {}
    with tq.use_reference():
        made = tq.rms_norm(x, weight, 1e-5, rounding=vllm.WRITTEN_ROUNDING.norm.rounding, **options, **added)
        pairs = [(made[0] if residual else made, norm(x, r))]
        pairs.append((tq.silu_mul(x, rounding=vllm.WRITTEN_ROUNDING.act, **options), act(x)))
        for ours, y in pairs:
            theirs = tq.quantize(y, scheme="fp8_group128")
            assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))
            assert torch.equal(ours.scale, theirs.scale)


def test_relu2_is_what_vllms_module_and_quantizer_make(config, adapter, monkeypatch):
    from vllm.model_executor.layers.activation import ReLUSquaredActivation

    layer = torch.nn.Module()
    layer.act_fn, layer.linear = ReLUSquaredActivation(compile_native=False), consumer()
    monkeypatch.setattr(pairing, "BY_SHA", {pairing.forward_hash(layer): Forward("", "", feeds={"act_fn": "linear"})})
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16).to(DEVICE)
    expected = (layer.act_fn.forward_native(x).float() / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert pairing.pair_model(layer)[0].reason is None
    assert torch.equal(layer.act_fn(x).data.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("own", [True, False])
def test_relu2_rounds_as_what_vllm_runs_in_compiled_code(adapter, monkeypatch, own):
    monkeypatch.setattr(adapter, "_inductor", vllm.INDUCTOR_ROUNDING["cuda"])
    monkeypatch.setattr(adapter, "_native_acts", {"relu2": True})
    monkeypatch.setattr(adapter, "_own_relu2", own)
    assert adapter.rounding("relu2", Reads(None, "fp8_tensor", "row_major"), False) == {"rounding": "output"}
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = [
        adapter.rounding("relu2", Reads(None, scheme, "row_major"), False)["rounding"]
        for scheme in ("fp8_tensor", "fp8_token", "int8_token")
    ]
    assert found == ["output" if own else "none", "none", "output"]


def test_activations_with_zero_points_lose_their_owners_all_at_once(adapter, monkeypatch):
    """A graph keeps no memory alive that it does not own."""
    from vllm.utils import torch_utils

    monkeypatch.setattr(torch_utils, "weak_ref_tensor", lambda tensor: ("weak", tensor))
    codes, scale, zero = torch.zeros(2, 4, dtype=torch.int8), torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int32)
    reads = Reads("key", "int8_token_azp", "row_major")
    monkeypatch.setattr(state, "adapter", None)
    vllm.load_adapter()  # takes the stand-in
    made = state.adapter.wrap(reads, codes, scale, torch.bfloat16, codes.shape, zero)
    weak = made.weak_ref()
    assert weak.zero_point[1] is zero and weak.data[1] is codes and weak.reads is reads


@pytest.mark.parametrize("switched_on", [False, True])
def test_norms_stand_aside_for_a_fused_all_reduce(config, monkeypatch, switched_on):
    from vllm.config import get_current_vllm_config

    monkeypatch.setattr(get_current_vllm_config().compilation_config.pass_config, "fuse_allreduce_rms", switched_on)
    expected = "vLLM fuses the norm with the all-reduce before it" if switched_on else None
    assert vllm.norms_stand_aside() == expected


@pytest.mark.parametrize("invariant", [False, True])
def test_batch_invariant_mode_is_left_to_its_own_kernels(config, norm, monkeypatch, invariant):
    from vllm.model_executor.layers.fusion import fused_act_quant

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    monkeypatch.setattr(state, "adapter", None)
    rows = {}
    monkeypatch.setattr(fused_act_quant, "_FUSED_ACT_QUANT", rows)
    vllm.load_adapter()
    assert bool(rows) != invariant
    made = contract.rms_norm_input_quant(norm, signs(), None, consumer())
    assert isinstance(made, torch.Tensor) == invariant
