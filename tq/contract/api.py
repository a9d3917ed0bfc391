"""Functions a model may call itself instead of being paired after loading."""

from __future__ import annotations

from typing import Any

import torch

from tq.contract import vllm
from tq.contract.route import RMS_NORM, SILU_MUL, Adapter, route, state
from tq.contract.scales import attribute, kernel_of


def get_input_quant_key(linear: Any) -> Any:
    """Input quantization key `linear` can consume now, or `None` (none, LoRA, or no supported vLLM)."""
    adapter = _adapter()
    return None if adapter is None else adapter.get_input_quant_key(linear)


def get_input_quant_scheme(linear: Any) -> str | None:
    """Scheme name of `get_input_quant_key(linear)`, or `None` when tq has no such scheme."""
    adapter = _adapter()
    key = None if adapter is None else adapter.get_input_quant_key(linear)
    reads = None if adapter is None or key is None else adapter.reads(kernel_of(linear), key)
    return None if reads is None else reads.scheme


def expose_input_quant_key(linear: Any) -> str | None:
    """Let `linear`, whose kernel quantizes its own input, take a quantized one; returns why it cannot, or `None`.

    Call it once the layer's weights are loaded. A paired model needs no such call. `tq.contract.kernels.CONSUMERS`
    lists the kernels.
    """
    adapter = _adapter()
    return "no supported serving engine is loaded" if adapter is None else adapter.accept(linear)


def rms_norm_input_quant(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None, linear: Any = None) -> Any:
    """norm(x) (and the new residual) as the quantized input of `linear`.

    x: [..., N] bf16 or fp16; residual: as x. Returns vLLM's `QuantizedActivation`, or (activation, residual), rounded
    as the unfused pair of vLLM rounds in this process. Falls back to `norm(x)` or `norm(x, residual)` when `linear`
    is `None`, advertises no key or one without a scheme, lacks a scale, or the norm or its input is not supported.
    """
    _adapter()
    return route(RMS_NORM, norm, x, residual, linear, _plain(norm))


def silu_mul_input_quant(act: Any, x: torch.Tensor, linear: Any = None) -> Any:
    """silu(x[..., :N]) * x[..., N:] as the quantized input of `linear`; `act(x)` where that cannot be.

    x: [..., 2N] bf16 or fp16. Same fallback rules as `rms_norm_input_quant`.
    """
    _adapter()
    return route(SILU_MUL, act, x, None, linear, _plain(act))


def _adapter() -> Adapter | None:
    # Imports cannot be traced; under torch.compile the plugin has loaded the adapter before.
    if state.adapter is None and not torch.compiler.is_compiling():
        vllm.load_adapter()
    return state.adapter


def _plain(module: Any) -> Any:
    """The module's own forward, not the routed one of a paired module."""
    return attribute(module, "tq_plain_forward") or module
