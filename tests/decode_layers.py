"""Layers of vLLM's own classes that decode on a CPU: its convolution is stood in for, its kernels are interpreted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICE
from state_helpers import cache
from test_contract_state_batches import metadata

from tq.contract import packed_layers, state, state_decode
from tq.contract.state_decode import NATIVE

HEADS, KEY_HEADS, SIZE, SLOTS = 4, 2, 32, 14
CLASSES = {
    "gdn": (packed_layers.GDN, "QwenGatedDeltaNetAttention"),
    "kda": (packed_layers.KDA, "KimiGatedDeltaNetAttention"),
}


class ReadElsewhereError(Exception):
    """vLLM went on to read states by something else than its packed kernel."""


class Engine:
    """Layers of a class of vLLM, and calls of its kernel."""

    def __init__(self, kind, monkeypatch, kernel) -> None:
        path, name = CLASSES[kind]
        self.kind, self.patch, self.kernel, self.calls, self.metadata = kind, monkeypatch, kernel, 0, {}
        self.layers_of = pytest.importorskip(path)
        self.owner, self.native = getattr(self.layers_of, name), NATIVE[name]
        for method in {*state.SITES[name].methods, self.native.caller} & set(dir(self.owner)):
            monkeypatch.setattr(self.owner, method, getattr(self.owner, method))  # restored afterwards
        self.module = state_decode.module_of(self.owner)
        monkeypatch.setattr(self.module, self.native.kernel, self.count)
        monkeypatch.setattr(self.layers_of, "causal_conv1d_update", self.convolve)
        monkeypatch.setattr(self.layers_of, "causal_conv1d_fn", self.elsewhere)
        context = SimpleNamespace(attn_metadata=self.metadata)
        monkeypatch.setattr(self.layers_of, "get_forward_context", lambda: context)
        monkeypatch.setattr(state, "current_metadata", lambda: self.metadata)
        monkeypatch.setattr(state, "platform_refusal", lambda: None)

    def count(self, *args, **kwargs):
        self.calls += 1
        return self.kernel(*args, **kwargs)

    @staticmethod
    def convolve(x, *args, **kwargs):
        if kwargs.get("num_accepted_tokens") is not None:
            raise ReadElsewhereError
        return x if kwargs.get("out") is None else kwargs["out"].copy_(x)

    @staticmethod
    def elsewhere(*args, **kwargs):
        raise ReadElsewhereError

    def layer(self, number=0):
        layer = object.__new__(self.owner)
        torch.nn.Module.__init__(layer)
        states, memory = cache(SLOTS, HEADS, SIZE, SIZE, pad=16)
        channels = (2 * (KEY_HEADS if self.kind == "gdn" else HEADS) + HEADS) * SIZE
        gates = HEADS if self.kind == "gdn" else HEADS * SIZE
        found = {
            "prefix": f"layers.{number}.mixer",
            "kv_cache": (torch.zeros(SLOTS, 3, channels, device=DEVICE), states),
            "cache_config": SimpleNamespace(mamba_cache_mode="none"),
            "conv1d": SimpleNamespace(weight=torch.zeros(channels, 1, 4, device=DEVICE), bias=None),
            "activation": "silu", "A_log": torch.randn(HEADS, device=DEVICE), "head_k_dim": SIZE,
            "dt_bias": torch.randn(gates, device=DEVICE), "enable_packed_recurrent_decode": True, "memory": memory,
            "local_projection_size": HEADS * SIZE, "gate_lower_bound": None, "o_norm": lambda x, gate: x,
            "get_state_dtype": lambda: (torch.bfloat16, torch.float32), "head_dim": SIZE,
        }  # fmt: skip
        for name, value in found.items():
            object.__setattr__(layer, name, value)
        return layer

    def given(self, tokens):
        generator = torch.Generator().manual_seed(tokens)
        channels = (2 * (KEY_HEADS if self.kind == "gdn" else HEADS) + HEADS) * SIZE
        gates = (HEADS,) if self.kind == "gdn" else (HEADS, SIZE)
        shapes = (channels,), gates, (HEADS,)
        return [torch.randn(tokens, *shape, generator=generator).to(DEVICE) for shape in shapes]

    def run(self, layer, rows, **changes):
        """The outputs [tokens, heads, values] of a call."""
        self.metadata[layer.prefix] = found = metadata(rows, **changes)
        qkv, gate, beta = self.given(found.num_actual_tokens)
        if self.kind == "gdn":
            out = torch.full((len(qkv), HEADS, SIZE), torch.nan, device=DEVICE)
            layer._forward_core(mixed_qkv=qkv, b=beta, a=gate, core_attn_out=out)
            return out
        out = torch.full((1, len(qkv), HEADS, SIZE), torch.nan, device=DEVICE)
        layer._forward(mixed_qkv=qkv, g1=gate[None], g2=out, beta=beta[None], core_attn_out=out)
        return out[0]
