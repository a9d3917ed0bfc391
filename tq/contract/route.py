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
from tq.contract.scales import attribute, input_quant_scale

DTYPES = (torch.bfloat16, torch.float16)
STATIC_SCHEMES = ("fp8_tensor",)
GROUP_SIZES = {"fp8_group128": 128}
# Both are read once, when Triton and tq are imported.
_RUNS_ON_CPU = any(
    os.environ.get(name, "0").lower() in ("1", "true", "on", "yes") for name in ("TRITON_INTERPRET", "TQ_REFERENCE")
)
NO_KEY = "the consumer takes no quantized input"


class NormRounding(NamedTuple):
    """Rounding policy of `tq.rms_norm`, see there. in_place: the plain norm writes the sum over the residual."""

    rounding: str
    round_residual: bool
    in_place: bool = False


class Adapter(Protocol):
    """What the contract needs to know about the serving engine."""

    schemes: dict[Any, str]  # input quantization key -> scheme name; looked up by equality
    refuses_all: str | None  # why nothing may be fused in this process

    def get_input_quant_key(self, linear: Any) -> Any: ...
    def is_rms_norm(self, module: Any) -> bool: ...
    def is_silu_mul(self, module: Any) -> bool: ...
    def norm_rounding(self, has_residual: bool) -> NormRounding | None: ...
    def act_rounding(self) -> str: ...
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
    if attribute(linear, "input_is_parallel") is False:
        return "the consumer splits its input, which must be a plain tensor"
    key = adapter.get_input_quant_key(linear)
    if key is None:
        return NO_KEY
    scheme = adapter.schemes.get(key)
    if scheme is None:
        return "no scheme for the consumer's input quantization key"
    scale = input_quant_scale(linear, "static_scale" if scheme in STATIC_SCHEMES else "scale_ub")
    if scheme in STATIC_SCHEMES and (scale is None or scale.dtype != torch.float32):
        return "the consumer has no single fp32 input scale"
    refusal = fusion.refusal(adapter, module, x)
    if refusal is None:
        refusal = _device_refusal(getattr(linear, "weight", None)) if x is None else _input_refusal(fusion, scheme, x)
    if refusal is not None:
        return refusal
    options = fusion.rounding(adapter, residual is not None)
    if options is None:
        return "the plain module runs an implementation of unknown rounding"
    options["scheme"] = scheme
    if scale is not None:
        options["scale" if scheme in STATIC_SCHEMES else "scale_ub"] = scale
    return Plan(adapter, key, options)


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
    if scheme in GROUP_SIZES and x.shape[-1] // fusion.inputs_per_output % GROUP_SIZES[scheme] != 0:
        return "the row is not a multiple of the scale group"
    return _device_refusal(x)


def _device_refusal(tensor: Any) -> str | None:
    """Why no kernel runs on the device of an input, or of a layer's weight."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_cuda or (tensor.is_cpu and _RUNS_ON_CPU):
        return None
    return "no kernels for this device (on a CPU, set TRITON_INTERPRET=1 or TQ_REFERENCE=1)"


def _rms_norm_refusal(adapter: Adapter, norm: Any, x: torch.Tensor | None) -> str | None:
    if not adapter.is_rms_norm(norm):
        return "not a plain RMSNorm"
    if getattr(norm, "variance_size_override", None) is not None:
        return "the variance is taken over a part of the row"
    weight = attribute(norm, "weight")
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
        options["in_place"] = found.in_place
    return options


def _rms_norm_call(norm: Any, x: torch.Tensor, residual: torch.Tensor | None, options: dict[str, Any]) -> tuple:
    if residual is None:
        return tq.rms_norm, (x, attribute(norm, "weight"), norm.variance_epsilon), options
    kwargs = {**options, "residual": residual}
    # As the plain norm does, which saves an allocation in each call. Not where code is traced, which wants values and
    # no writes, nor for an observer, who is promised the residual from before the addition.
    if kwargs.pop("in_place") and not torch.compiler.is_compiling() and not boundaries.observers:
        kwargs["residual_out"] = residual
    return tq.rms_norm, (x, attribute(norm, "weight"), norm.variance_epsilon), kwargs


def _silu_mul_refusal(adapter: Adapter, act: Any, x: torch.Tensor | None) -> str | None:
    # A row of vLLM's table is called without the module, whose type the table has matched.
    return None if act is None or adapter.is_silu_mul(act) else "not a plain SiLU-and-multiply"


def _silu_mul_rounding(adapter: Adapter, has_residual: bool) -> dict[str, Any]:
    return {"rounding": adapter.act_rounding()}


def _silu_mul_call(act: Any, x: torch.Tensor, residual: torch.Tensor | None, options: dict[str, Any]) -> tuple:
    return tq.silu_mul, (x,), options


RMS_NORM = Fusion("rms_norm", _rms_norm_refusal, _rms_norm_rounding, _rms_norm_call)
SILU_MUL = Fusion("silu_mul", _silu_mul_refusal, _silu_mul_rounding, _silu_mul_call, inputs_per_output=2)
