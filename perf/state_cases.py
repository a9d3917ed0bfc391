"""What is measured of recurrent states: caches, activations, and calls of tq's kernels and of what they stand beside.

States as of Qwen3-Next: 32 value heads (16 key heads for GDN) of 128 x 128 in fp32, 2 MiB a request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import tq.state
from tq.bench.timing import copies_of, device_time_us, measured_bandwidth

HEADS, KEY_HEADS, SIZE = 32, 16, 128
STATE_BYTES = HEADS * SIZE * SIZE * 4
FORMS = [
    ("int8_narrow", "head"),
    ("fp8_e4m3", "head"),
    ("int8_narrow", "value_channel"),
    ("int8_narrow", "key_channel"),
    ("int8_narrow", "tile"),
    ("int8_narrow", "group32"),
]
QUANTIZED = {
    "plain": {},
    "int8 incoming": {"code": "int8_narrow"},
    "int8 outgoing": {"code": "int8_narrow", "quantize": "outgoing"},
    "fp8 incoming": {"code": "fp8_e4m3"},
}
# Packed states: code, granularity, steps in a ring (0: rounded by each), residuals, mixed value channels.
PACKED = {
    "int8": ("int8", "value_channel", 0),
    "fp8": ("fp8_e4m3", "value_channel", 0),
    "int8 group32": ("int8", "group32", 0),
    "int8 replay 8": ("int8", "value_channel", 8),
    "int8 replay 16": ("int8", "value_channel", 16),
    "int8 residual": ("int8", "value_channel", 0, True),
    "int8 hadamard 32": ("int8", "value_channel", 0, False, 32),
}


def by_torch(state: torch.Tensor, slots: torch.Tensor, code: str) -> None:
    """A scale a head as ModelOpt computes it: gather, quantize, dequantize, scatter. No host synchronization."""
    gathered = state.index_select(0, slots)
    largest, smallest = torch.amax(gathered, (2, 3), keepdim=True), torch.amin(gathered, (2, 3), keepdim=True)
    amax = torch.maximum(largest.abs(), smallest.abs())
    flushed = amax <= 2.0**-24
    if code == "fp8_e4m3":
        scale = 448.0 / torch.where(flushed, 1.0, amax)
        rounded = (gathered * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * (1 / scale)
    else:
        scale = torch.full_like(amax, 127.0) / amax
        rounded = (gathered * torch.where(flushed, 0.0, scale)).round_().clamp(-127.0, 127.0)
        rounded = rounded / torch.where(flushed, 1.0, scale)
    state.index_copy_(0, slots, rounded)


def caches(batch: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A cache, and disjoint slots of it for as many calls as are rotated."""
    calls = copies_of(2 * batch * STATE_BYTES)
    state = torch.randn(1 + calls * batch, HEADS, SIZE, SIZE, device="cuda")
    order = torch.randperm(calls * batch, device="cuda").int() + 1
    return state, list(order.view(calls, batch))


def activations(kind: str, batch: int) -> tuple[torch.Tensor, ...]:
    """mixed_qkv, gate, beta, A_log, dt_bias in the dtypes of vLLM's layers."""
    key_heads, channels = (KEY_HEADS, ()) if kind == "gdn" else (HEADS, (SIZE,))
    qkv = torch.randn(batch, (2 * key_heads + HEADS) * SIZE, device="cuda").bfloat16()
    gate, beta = (torch.randn(batch, HEADS, *shape, device="cuda").bfloat16() for shape in (channels, ()))
    if kind == "kda":
        gate, beta = gate[None], beta[None]
    return qkv, gate, beta, torch.randn(HEADS, device="cuda"), torch.randn(HEADS, *channels, device="cuda").flatten()


def native_decode(kind: str) -> Callable | None:
    """vLLM's packed decode, where vLLM is installed."""
    try:
        if kind == "gdn":
            from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
                fused_recurrent_gated_delta_rule_packed_decode as found,
            )
        else:
            from vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent import (
                fused_recurrent_kda_packed_decode as found,
            )
    except ImportError:
        return None
    return found


def packed_caches(
    kind: str, batch: int, code: str, granularity: str, length: int, residual: bool = False, hadamard: int = 0
) -> tuple[tq.state.PackedState, list[torch.Tensor]]:
    """As `caches`; rings are filled to different heights, so that each call rounds an equal share of its requests."""
    calls = copies_of(batch * STATE_BYTES // 2)
    sizes, ring = (1 + calls * batch, HEADS, SIZE, SIZE), None
    if length:
        gate, key_heads = ("head", KEY_HEADS) if kind == "gdn" else ("key_channel", HEADS)
        ring = tq.state.Ring.zeros(*sizes, length=length, gate=gate, key_heads=key_heads, device="cuda")
        ring.counts.copy_((torch.arange(sizes[0], device="cuda") % length).view(-1, 1, 1))
    options = {"code": code, "granularity": granularity, "ring": ring, "residual": residual, "hadamard": hadamard}
    state = tq.state.PackedState.zeros(*sizes, **options, device="cuda")
    state.codes.view(torch.uint8).random_(0, 100)
    state.scales.fill_(0.01)
    return state, list((torch.randperm(calls * batch, device="cuda").int() + 1).view(calls, batch))


def decode_call(
    kind: str, decode: Callable, given: tuple, state: Any, slots: torch.Tensor, out: torch.Tensor, **options
) -> Callable:
    """One step of `decode`, vLLM's or ours; both have the same signature."""
    if kind == "gdn":
        return partial(decode, *given, SIZE**-0.5, state, out, slots, True, **options)
    return partial(decode, *given, None, state, slots, None, out, **options)


def output(kind: str, batch: int) -> torch.Tensor:
    shape = (batch, 1, HEADS, SIZE) if kind == "gdn" else (1, batch, HEADS, SIZE)
    return torch.zeros(shape, device="cuda", dtype=torch.bfloat16)


def share(batch: int, time_us: float) -> float:
    """Of the bandwidth of an element-wise pass, what reading and writing the states takes."""
    return round(2 * batch * STATE_BYTES / time_us * 1e6 / measured_bandwidth(), 4)


def timed(calls: list[Callable]) -> float:
    return round(device_time_us(calls)[0], 3)
