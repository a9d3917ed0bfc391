"""Scales that a consumer linear layer reads its quantized input with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# vLLM's own accessor, once a release has one; set by the adapter.
own_accessor: Callable[[Any], Any] | None = None

_KERNEL_HOLDERS = ("scheme", "quant_method")
_KERNEL_ATTRIBUTES = ("fp8_linear", "kernel", "ocp_mx_linear")


@dataclass(frozen=True)
class InputQuantScales:
    """Tensors a producer needs to quantize for one consumer; `None` where the consumer has none.

    static_scale: fp32, 0-d or one element, dequantization scale: x ~ q * static_scale.
    global_scale_inv: fp32, one element, inverse of the second-level scale (NVFP4).
    scale_ub: fp32, one element, upper bound on the absolute maximum of a dynamically scaled row.
    """

    static_scale: torch.Tensor | None = None
    global_scale_inv: torch.Tensor | None = None
    scale_ub: torch.Tensor | None = None


def get_input_quant_scales(linear: Any) -> InputQuantScales:
    """Scales of `linear` as they are now.

    Nothing is kept between two calls: weight post-processing, a weight reload or a user may replace, overwrite or
    delete a scale at any time. A captured CUDA graph keeps the tensor it was captured with: replays see a scale
    written in place; a replaced one needs a new capture, as for vLLM's own kernels. A tensor that is absent, or that
    has more than one element, is reported as `None`. Attribute names are those of the kernel behind the layer (vLLM
    `ScaledMMLinearKernel.layer_param_names`).
    """
    if own_accessor is not None:
        own = own_accessor(linear)
        return InputQuantScales(
            _one_element(own, "static_scale"), _one_element(own, "global_scale_inv"), _one_element(own, "scale_ub")
        )
    names = _parameter_names(linear)
    return InputQuantScales(
        _one_element(linear, names[0]), _one_element(linear, "input_global_scale_inv"), _one_element(linear, names[1])
    )


def _one_element(owner: Any, name: str) -> torch.Tensor | None:
    value = getattr(owner, name, None)
    return value if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def _kernel(linear: Any) -> Any:
    """The object that runs the layer's matrix product, or `None`."""
    for holder_name in _KERNEL_HOLDERS:
        holder = getattr(linear, holder_name, None)
        for attribute in _KERNEL_ATTRIBUTES:
            kernel = getattr(holder, attribute, None)
            if kernel is not None:
                return kernel
    return None


def _parameter_names(linear: Any) -> tuple[str, str]:
    """(name of the static scale, name of the upper bound) on `linear`."""
    names: Any = getattr(_kernel(linear), "layer_param_names", ())
    # (weight, weight scale, input scale, bound) are those of the FP8 kernels; others have other lists.
    return (names[2], names[3]) if len(names) == 4 else ("input_scale", "input_scale_ub")


def implementation(linear: Any) -> str:
    """Name of the class behind `linear`: its kernel's, else its quantization method's, else its own."""
    return type(_kernel(linear) or getattr(linear, "quant_method", None) or linear).__name__
