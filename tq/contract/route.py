"""One routing decision for every producer: fused when the consumer can take it, else exactly the plain module."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

import tq
from tq.contract import boundaries
from tq.contract.boundaries import Boundary
from tq.contract.scales import InputQuantScales, get_input_quant_scales

DTYPES = (torch.bfloat16, torch.float16)
STATIC_SCHEMES = ("fp8_tensor",)
GROUP_SIZES = {"fp8_group128": 128}
NO_KEY = "the consumer takes no quantized input"


class NormRounding(NamedTuple):
    """Rounding policy of `tq.rms_norm`, see there."""

    rounding: str
    round_residual: bool


class Adapter(Protocol):
    """What the contract needs to know about the serving engine."""

    schemes: dict[Any, str]  # input quantization key -> scheme name; looked up by equality
    refuses_all: str | None  # why nothing may be fused in this process

    def get_input_quant_key(self, linear: Any) -> Any: ...
    def is_rms_norm(self, module: Any) -> bool: ...
    def is_silu_mul(self, module: Any) -> bool: ...
    def norm_rounding(self, has_residual: bool) -> NormRounding | None: ...
    def wrap(self, activation: Any, key: Any) -> Any: ...


class _State:
    adapter: Adapter | None = None


state = _State()


class Plan(NamedTuple):
    """options: keyword arguments of the public function, from scheme and scales to the rounding."""

    adapter: Adapter
    key: Any
    options: dict[str, Any]


@dataclass(frozen=True)
class Fusion:
    """How one producer is planned and called.

    refusal(adapter, module, x): why this module cannot be fused, or `None`; x is `None` before the first call.
    rounding(adapter, has_residual): the rounding options, or `None` when they are not known.
    call(module, x, residual, options): (function, args, kwargs) of tq's public API.
    """

    producer: str
    refusal: Callable[[Adapter, Any, torch.Tensor | None], str | None]
    rounding: Callable[[Adapter, bool], dict[str, Any] | None]
    call: Callable[[Any, torch.Tensor, torch.Tensor | None, dict[str, Any]], tuple[Callable[..., Any], tuple, dict]]
    inputs_per_output: int = 1


def plan(
    fusion: Fusion, module: Any, linear: Any, x: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> Plan | str:
    """How to fuse `module` into the input quantization of `linear` now, or the reason not to.

    Reasons are constants: this runs under torch.compile, which cannot trace the text form of every key.
    """
    adapter = state.adapter
    if adapter is None:
        return "no supported serving engine is loaded"
    if adapter.refuses_all is not None:
        return adapter.refuses_all
    if linear is None:
        return "no consumer"
    if getattr(linear, "input_is_parallel", True) is False:
        return "the consumer splits its input, which must be a plain tensor"
    key = adapter.get_input_quant_key(linear)
    if key is None:
        return NO_KEY
    scheme = adapter.schemes.get(key)
    if scheme is None:
        return "no scheme for the consumer's input quantization key"
    scales = get_input_quant_scales(linear)
    if scheme in STATIC_SCHEMES and (scales.static_scale is None or scales.static_scale.dtype != torch.float32):
        return "the consumer has no single fp32 input scale"
    refusal = fusion.refusal(adapter, module, x)
    if refusal is None:
        refusal = _device_refusal(linear) if x is None else _input_refusal(fusion, scheme, x)
    if refusal is not None:
        return refusal
    rounding = fusion.rounding(adapter, residual is not None)
    if rounding is None:
        return "the plain module runs an implementation of unknown rounding"
    return Plan(adapter, key, {**_scale_options(scheme, scales), **rounding})


def route(
    fusion: Fusion,
    module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    linear: Any,
    plain: Callable[..., Any],
    boundary: Boundary | None = None,
) -> Any:
    """fused(x) for `linear`, or `plain(x)` (`plain(x, residual)` when a residual is given)."""
    planned = plan(fusion, module, linear, x, residual)
    if isinstance(planned, str):
        return plain(x) if residual is None else plain(x, residual)
    function, args, kwargs = fusion.call(module, x, residual, planned.options)
    result = function(*args, **kwargs)
    if not torch.compiler.is_compiling():
        boundaries.called(boundary, fusion.producer, args, kwargs, result)
    activation = result if residual is None else result[0]
    wrapped = planned.adapter.wrap(activation, planned.key)
    return wrapped if residual is None else (wrapped, result[1])


def _input_refusal(fusion: Fusion, scheme: str, x: Any) -> str | None:
    if not isinstance(x, torch.Tensor):
        return "the input is not a tensor"
    if x.dtype not in DTYPES:
        return "the input is neither bf16 nor fp16"
    if x.stride(-1) != 1:
        return "the input's last dimension is strided"
    if x.shape[-1] // fusion.inputs_per_output % GROUP_SIZES.get(scheme, 1) != 0:
        return "the row is not a multiple of the scale group"
    return _device_refusal(x)


def _device_refusal(owner: Any) -> str | None:
    """Why no kernel runs on the device of a tensor, or of a layer's weight."""
    tensor = owner if isinstance(owner, torch.Tensor) else getattr(owner, "weight", None)
    return _device_type_refusal(tensor.device.type) if isinstance(tensor, torch.Tensor) else None


@torch.compiler.assume_constant_result
def _device_type_refusal(device_type: str) -> str | None:
    if device_type == "cuda":
        return None
    if device_type == "cpu" and (_switched_on("TRITON_INTERPRET") or _switched_on("TQ_REFERENCE")):
        return None
    return "no kernels for this device (on a CPU, set TRITON_INTERPRET=1 or TQ_REFERENCE=1)"


def _switched_on(name: str) -> bool:
    return os.environ.get(name, "0").lower() in ("1", "true", "on", "yes")


def _scale_options(scheme: str, scales: InputQuantScales) -> dict[str, Any]:
    if scheme in STATIC_SCHEMES:
        return {"scheme": scheme, "scale": scales.static_scale}
    if scales.scale_ub is not None:
        return {"scheme": scheme, "scale_ub": scales.scale_ub}
    return {"scheme": scheme}


def _rms_norm_refusal(adapter: Adapter, norm: Any, x: torch.Tensor | None) -> str | None:
    if not adapter.is_rms_norm(norm):
        return "not a plain RMSNorm"
    if getattr(norm, "variance_size_override", None) is not None:
        return "the variance is taken over a part of the row"
    weight = getattr(norm, "weight", None)
    if not getattr(norm, "has_weight", True) or not isinstance(weight, torch.Tensor):
        return "the norm has no weight"
    if weight.dtype not in DTYPES or (x is not None and weight.dtype != x.dtype):
        return "the norm's weight and input differ in dtype, or are neither bf16 nor fp16"
    return None


def _rms_norm_rounding(adapter: Adapter, has_residual: bool) -> dict[str, Any] | None:
    found = adapter.norm_rounding(has_residual)
    if found is None:
        return None
    options: dict[str, Any] = {"rounding": found.rounding}
    if has_residual:
        options["round_residual"] = found.round_residual
    return options


def _rms_norm_call(norm: Any, x: torch.Tensor, residual: torch.Tensor | None, options: dict[str, Any]) -> tuple:
    # Out of place: the caller, and whoever observes, may still need the residual from before the addition.
    kwargs = options if residual is None else {**options, "residual": residual}
    return tq.rms_norm, (x, norm.weight, norm.variance_epsilon), kwargs


def _silu_mul_refusal(adapter: Adapter, act: Any, x: torch.Tensor | None) -> str | None:
    # A row of vLLM's table is called without the module, whose type the table has matched.
    return None if act is None or adapter.is_silu_mul(act) else "not a plain SiLU-and-multiply"


def _silu_mul_rounding(adapter: Adapter, has_residual: bool) -> dict[str, Any]:
    # bf16(bf16(silu(gate)) * up) is what both the native module and `_C.silu_and_mul` compute.
    return {"rounding": "activation_and_product"}


def _silu_mul_call(act: Any, x: torch.Tensor, residual: torch.Tensor | None, options: dict[str, Any]) -> tuple:
    return tq.silu_mul, (x,), options


RMS_NORM = Fusion("rms_norm", _rms_norm_refusal, _rms_norm_rounding, _rms_norm_call)
SILU_MUL = Fusion("silu_mul", _silu_mul_refusal, _silu_mul_rounding, _silu_mul_call, inputs_per_output=2)
