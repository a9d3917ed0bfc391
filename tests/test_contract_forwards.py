"""Forwards of vLLM's own that read the shape and dtype of what they are given, or hand it to two readers, on layers
that are stood in for."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from tq.contract import pairing, vllm

pytestmark = pytest.mark.vllm
if vllm.unsupported_version() is not None:
    pytest.skip(vllm.unsupported_version(), allow_module_level=True)

from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation  # noqa: E402
from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2  # noqa: E402
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper  # noqa: E402
from vllm.model_executor.layers.quantization.utils import quant_utils  # noqa: E402
from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer, DeepseekV2MLAAttention  # noqa: E402
from vllm.model_executor.models.nemotron_h import NemotronHMambaDecoderLayer  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, ROWS = 256, 5


@pytest.fixture(autouse=True)
def engine():
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        vllm.load_adapter()
        yield


class Linear(torch.nn.Module):
    """Columns of x W with x in FP8, quantized here unless it comes so."""

    def __init__(self, columns, quantized=True):
        super().__init__()
        generator = torch.Generator().manual_seed(columns)
        weight = torch.randn(HIDDEN, columns, generator=generator).to(DEVICE) / HIDDEN**0.5
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        if quantized:
            self._input_quant_key = quant_utils.kFp8StaticTensorSym
            self.input_scale = torch.nn.Parameter(torch.tensor(0.02, device=DEVICE), requires_grad=False)
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        if isinstance(x, QuantizedActivation):
            x = x.data.float() * x.scale
        elif hasattr(self, "input_scale"):
            codes = (x.float() * self.input_scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
            x = codes.float() * self.input_scale
        return (x.float() @ self.weight).bfloat16(), None


def stand_in(forward, **members):
    """A module with a forward of vLLM's, which has what that reads."""
    made = type("StandIn", (torch.nn.Module,), {"forward": forward})()
    for name, member in members.items():
        setattr(made, name, member)
    return made


def norm():
    return RMSNorm(HIDDEN, eps=1e-5, dtype=torch.bfloat16).to(DEVICE)


def rows():
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16().to(DEVICE)


def deepseek(indexer):
    """A decoder layer with multi-head latent attention, whose core passes its query on, and no experts."""
    seen = SimpleNamespace(indexed=[], shapes=[])

    class Indexer(torch.nn.Module):
        def forward(self, hidden_states, q_c, positions, rope):
            seen.indexed += [hidden_states, q_c]

    class Core(torch.nn.Module):
        impl = SimpleNamespace(record_logical_topk_ready=lambda: None)

        def forward(self, q, kv_c, k_pe, output_shape, q_dcp_replicated):
            seen.shapes.append(output_shape)
            return q.flatten(1)

    wrapper = stand_in(
        MultiHeadLatentAttentionWrapper.forward,
        q_lora_rank=HIDDEN,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        qk_head_dim=64,
        v_head_dim=64,
        num_heads=4,
        fused_qkv_a_proj=Linear(HIDDEN + 80),
        q_a_layernorm=norm(),
        kv_a_layernorm=torch.nn.Identity(),
        q_b_proj=Linear(HIDDEN),
        q_proj=None,
        kv_a_proj_with_mqa=None,
        o_proj=Linear(HIDDEN),
        g_proj=None,
        indexer=Indexer() if indexer else None,
        is_sparse=indexer,
        skip_topk=False,
        indexer_rope_emb=None,
        rotary_emb=None,
        fuse_qkv_rmsnorm=False,
        dcp_q_replicate=False,
        mla_attn=Core(),
    )
    layer = stand_in(
        DeepseekV2DecoderLayer.forward,
        input_layernorm=norm(),
        post_attention_layernorm=norm(),
        self_attn=stand_in(DeepseekV2MLAAttention.forward, mla_attn=wrapper),
        mlp=torch.nn.Identity(),
        use_mha=False,
        use_sequence_parallel_moe=False,
    )
    return layer, wrapper, seen


@pytest.mark.parametrize("indexer", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("residual", [False, True])
def test_latent_attention_takes_codes_and_its_indexer_the_norm(indexer, residual):
    layer, wrapper, seen = deepseek(indexer)

    def run():
        return layer(torch.arange(ROWS, device=DEVICE), rows(), rows() if residual else None)

    expected, plain = run(), [*seen.indexed]
    seen.indexed.clear()
    found = {boundary.name: boundary for boundary in pairing.pair_model(layer)}
    into, query = found["input_layernorm"], found["self_attn.mla_attn.q_a_layernorm"]
    assert (into.reason, into.consumer) == (None, "self_attn.mla_attn.fused_qkv_a_proj")
    assert (query.reason, query.consumer) == (None, "self_attn.mla_attn.q_b_proj")
    assert into.shares == query.shares == (("self_attn.mla_attn.indexer",) if indexer else ())
    assert found["post_attention_layernorm"].reason == "the forward of Identity is not a known one"
    for got, wanted in zip(run(), expected, strict=True):
        assert torch.equal(got, wanted)
    for linear in (wrapper.fused_qkv_a_proj, wrapper.q_b_proj):
        assert [isinstance(x, QuantizedActivation) for x in linear.seen] == [False, True]
    assert seen.shapes == [(ROWS, 256)] * 2 and len(seen.indexed) == 2 * indexer
    for got, wanted in zip(seen.indexed, plain, strict=True):
        assert type(got) is torch.Tensor and torch.equal(got, wanted)


def test_queries_with_a_projection_of_their_own_stay_unfused():
    layer, wrapper, _ = deepseek(False)
    wrapper.q_proj = Linear(HIDDEN)
    reasons = {boundary.name: boundary.reason for boundary in pairing.pair_model(layer)}
    assert reasons["input_layernorm"] == "queries and keys have a projection each"


@pytest.mark.parametrize("residual", [False, True])
def test_mamba_sizes_its_output_by_the_tensor_that_the_codes_stand_for(residual, monkeypatch):
    made = []

    def core(projected, output, name):
        made.append(output)
        output.copy_(projected[:, 128:])

    monkeypatch.setattr(torch.ops.vllm, "mamba_mixer2", core, raising=False)
    mixer = stand_in(
        MambaMixer2.forward,
        in_proj=Linear(128 + HIDDEN),
        out_proj=Linear(HIDDEN),
        norm=lambda x, gate: x,
        num_heads=4,
        head_dim=64,
        tp_size=1,
        tped_intermediate_size=128,
        prefix="model.layers.0.mixer",
    )
    layer = stand_in(NemotronHMambaDecoderLayer.forward, norm=norm(), mixer=mixer)

    def run():
        return layer(rows(), rows() if residual else None)

    expected = run()
    (boundary,) = [each for each in pairing.pair_model(layer) if each.name == "norm"]
    assert (boundary.reason, boundary.consumer, boundary.shares) == (None, "mixer.in_proj", ())
    for got, wanted in zip(run(), expected, strict=True):
        assert torch.equal(got, wanted)
    assert [isinstance(x, QuantizedActivation) for x in mixer.in_proj.seen] == [False, True]
    plain, quantized = made
    assert quantized.shape == plain.shape == (ROWS, HIDDEN) and quantized.dtype == plain.dtype == torch.bfloat16
