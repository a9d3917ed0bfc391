"""Stand-ins for vLLM's GDN and KDA layers and their kernels, for the tests of packed states."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import DEVICE
from state_helpers import numbers, step

from tq.contract import packed_layers

HEADS, SIZE, SLOTS = 2, 16, 7
CFG = "num_bits: 8, type: dynamic, axis: [0, 1, 3], packed: true"
RECIPE = """
quantize:
  quant_cfg:
    - quantizer_name: '*_state_quantizer'
      cfg: {{{cfg}}}
    - quantizer_name: 'plain*'
      enable: false
"""
GARBAGE = 0x7F  # large numbers as fp32 and bf16, as what another request has left


class Base(torch.nn.Module):
    """What a layer of vLLM has that matters here: one key head for two of GDN, dims, gates, pages."""

    def __init__(self, config, vllm_config, prefix="", **rest):
        super().__init__()
        self.prefix, self.num_spec, self.tp_size, self.seen = prefix, vllm_config.num_spec, 1, []
        self.num_v_heads = self.local_num_heads = HEADS
        self.num_k_heads = HEADS if self.kda else 1
        self.head_k_dim = self.head_v_dim = self.head_dim = SIZE
        self.local_projection_size, self.activation, self.gate_lower_bound = HEADS * SIZE, "silu", None
        channels = (2 * self.num_k_heads + HEADS) * SIZE
        self.conv1d = SimpleNamespace(weight=torch.zeros(channels, 1, 4, device=DEVICE), bias=None)
        gates = HEADS * SIZE if self.kda else HEADS
        self.A_log = torch.linspace(-1, 1, HEADS, device=DEVICE)
        self.dt_bias = torch.linspace(-1, 0, gates, device=DEVICE)
        self.cache_config = vllm_config.cache_config

    def get_state_shape(self):
        return (3, self.conv1d.weight.shape[0]), (HEADS, SIZE, SIZE)

    def get_state_dtype(self):
        return torch.bfloat16, torch.float32

    def bind_kv_cache(self, kv_cache):
        offset, views = 0, []
        for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype(), strict=True):
            size = prod(shape) * dtype.itemsize
            views.append(kv_cache[:, offset : offset + size].view(dtype).view(-1, *shape))
            offset += size
        self.kv_cache = tuple(views)

    def run(self, q, k, v, log_decay, beta, initial_state, cu_seqlens):
        """Chunks, token by token in float64: [1, tokens, heads, ...] -> (outputs, final states)."""
        self.seen.append(initial_state.clone())
        bounds = cu_seqlens.tolist()
        q, k, v, log_decay, beta, states = numbers(q[0], k[0], v[0], log_decay[0], beta[0], initial_state)
        out, group = np.zeros(v.shape), v.shape[1] // q.shape[1]
        for i, (begin, end) in enumerate(pairwise(bounds)):
            for token in range(begin, end):
                for h in range(HEADS):
                    given = q[token, h // group], k[token, h // group], v[token, h], log_decay[token, h], beta[token, h]
                    states[i, h], out[token, h] = step(states[i, h], *given, SIZE**-0.5, normalize=self.kda)
        self.final = torch.from_numpy(states).float().to(DEVICE)
        return torch.from_numpy(out[None]).float().to(DEVICE), self.final

    def o_norm(self, out, gate):
        return out * gate


class QwenGatedDeltaNetAttention(Base):
    kda = False

    def chunk_gated_delta_rule(self, q, k, v, g, beta, initial_state, cu_seqlens, **rest):
        return self.run(q, k, v, g, beta, initial_state, cu_seqlens)

    def _warmup_prefill_kernels(self, *arguments):
        _, state_dtype = self.get_state_dtype()  # as vLLM takes them
        self.seen.append(f"warm-up {state_dtype}")

    def _forward_core(self, *arguments):
        self.seen.append("plain")


class KimiGatedDeltaNetAttention(Base):
    kda = True

    def _forward(self, **arguments):
        self.seen.append("plain")


def prepared(conv_output, a, b, A_log, dt_bias, num_k_heads, **rest):
    """q, k (normalized) and v of each head, log decays, betas."""
    keys = num_k_heads * SIZE
    q, k, v = (each.unflatten(1, (-1, SIZE)).float() for each in conv_output.split([keys, keys, HEADS * SIZE], 1))
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    return q, k, v, -A_log.exp() * torch.nn.functional.softplus(a + dt_bias), b.sigmoid()


def chunk_kda(q, k, v, raw_g, raw_beta, A_log, g_bias, initial_state, cu_seqlens, **rest):
    """Bound to a layer by `kernels`."""
    raw = raw_g.float() + g_bias.unflatten(0, (HEADS, SIZE))
    log_decay = -A_log.exp()[:, None] * torch.nn.functional.softplus(raw)
    return chunk_kda.layer.run(q, k, v, log_decay, raw_beta.sigmoid(), initial_state, cu_seqlens)


NATIVE = SimpleNamespace(
    QwenGatedDeltaNetAttention=QwenGatedDeltaNetAttention,
    KimiGatedDeltaNetAttention=KimiGatedDeltaNetAttention,
    is_conv_state_dim_first=lambda: False,
    causal_conv1d_fn=lambda x, *rest, **named: x,
    causal_conv1d_update=lambda x, *rest, **named: x,
    fused_post_conv_prep=prepared,
    chunk_kda_with_fused_gate=chunk_kda,
)
CACHE = {
    "mamba_cache_mode": "none", "use_kda_recoverssm": False, "use_replayssm": False, "mamba_ssm_cache_dtype": "auto",
}  # fmt: skip


def config():
    return SimpleNamespace(cache_config=SimpleNamespace(**CACHE), kv_transfer_config=None, num_spec=0)


def layer_maker(monkeypatch, tmp_path):
    """Makes layers with pages full of garbage."""
    monkeypatch.setattr(packed_layers, "platform_refusal", lambda: None)

    def build(kind, replay=0, prefix="layers.0.mixer", more=""):
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPE.format(cfg=f"{CFG}, replay: {replay}{more}"))
        monkeypatch.setenv("TQ_STATE_RECIPE", str(path))
        if kind == "gdn":
            made = packed_layers.gdn_layer(NATIVE)
        else:
            pytest.importorskip("vllm.compilation.breakable_cudagraph")
            monkeypatch.setattr(packed_layers, "import_module", lambda name: NATIVE)
            made = packed_layers.kda_layer(NATIVE)
        layer = made(None, config(), prefix)
        chunk_kda.layer = layer
        shapes, dtypes = layer.get_state_shape(), layer.get_state_dtype()
        size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        layer.pages = torch.full((SLOTS, size + 64), GARBAGE, dtype=torch.int8, device=DEVICE)
        layer.bind_kv_cache(layer.pages)
        return layer

    return build
