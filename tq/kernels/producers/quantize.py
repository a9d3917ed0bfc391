"""y = x."""

from __future__ import annotations

from typing import Any

import torch

from tq.activation import QuantizedActivation
from tq.kernels.device import load_x
from tq.kernels.launch import call
from tq.kernels.producer import Producer, Reference, Replaced, register_producer
from tq.kernels.schemes import Scheme


def reference(x: torch.Tensor, *, precision: torch.dtype = torch.float32) -> Reference:
    return Reference(x.reshape(-1, x.shape[-1]).to(precision))


def replaces(scheme: Scheme) -> Replaced:
    return Replaced(scheme.quantizer, {})


def followed_by_quantizer(op: str, options: dict[str, Any], scheme: Scheme) -> Replaced:
    """The op that no fused op includes, and vLLM's quantizer after it; the scheme's own least scale."""
    return Replaced(f"{op} + {replaces(scheme).op}", options)


QUANTIZE = register_producer(Producer("quantize", load=load_x, reference=reference, replaces=replaces))


def quantize(x: torch.Tensor, *, scheme: str, **options: Any) -> QuantizedActivation:
    """data = encode(x / scale).

    Shapes: x [..., N] bf16, fp16 or fp32, last stride 1; N at most 32768. Options and errors common to all producers
    are those of `tq.kernels.launch.call`. Source: equal to vLLM 0.33 `_C.static_scaled_fp8_quant` (fp8_tensor),
    `_C.dynamic_per_token_scaled_fp8_quant` (fp8_token) and `_C.per_token_group_fp8_quant` (fp8_group128), except that
    NaN keeps a NaN code and an infinite amax counts as FLT_MAX.
    """
    return call(QUANTIZE, (x,), scheme, options)
