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
from tq.contract.consumers import NOT_LISTED, Reads, attach
from tq.contract.repeat import Repeats
from tq.contract.scales import Seen, attribute, input_quant_scale, kernel_of
from tq.kernels.schemes import SCHEMES, Scheme

DTYPES = (torch.bfloat16, torch.float16)
# Both are read once, when Triton and tq are imported.
_RUNS_ON_CPU = any(
    os.environ.get(name, "0").lower() in ("1", "true", "on", "yes") for name in ("TRITON_INTERPRET", "TQ_REFERENCE")
)


_NO_GROUPS = "the row is not a multiple of the scale group"
# Options of tq's producers, by what a scheme's rule needs or takes of the consumer: the field of `InputQuantScales`,
# and why there is none.
_NO_SCALE = "the consumer has no single fp32 input scale"
SCALES = {
    "scale": ("static_scale", _NO_SCALE),
    "zero_point": ("zero_point", "the consumer has no single int32 zero point"),
    "global_scale_inv": ("global_scale_inv", _NO_SCALE),  # NVFP4 multiplies by the inverse of the second-level scale
    "scale_ub": ("scale_ub", ""),
}


class NormRounding(NamedTuple):
    """Rounding policy of `tq.rms_norm`, see there. in_place: the plain norm writes the sum over the residual."""

    rounding: str
    round_residual: bool
    in_place: bool = False

    def options(self, has_residual: bool) -> dict[str, Any]:
        """Options of a norm, in a dictionary of the caller's own; `in_place` is left for `_norm_call` to take out."""
        if not has_residual:
            return {"rounding": self.rounding}
        return {"rounding": self.rounding, "round_residual": self.round_residual, "in_place": self.in_place}


class Adapter(Protocol):
    """What the contract needs to know about the serving engine."""

    refuses_all: str | None  # why nothing may be fused in this process

    def get_input_quant_key(self, linear: Any) -> Any: ...
    def reads(self, kernel: Any, key: Any) -> Reads | None: ...
    def accept(self, linear: Any) -> str | None: ...
    def withdraw(self, linear: Any) -> None: ...
    def producer_of(self, module: Any) -> str | None: ...
    def implementation(self, producer: str, has_residual: bool) -> Any: ...  # on which the rounding of eager code rests
    def rounding(self, producer: str, reads: Reads, has_residual: bool) -> dict[str, Any] | None: ...  # a new one
    def wrap(self, reads: Reads, data: Any, scale: Any, dtype: Any, shape: Any, zero_point: Any = None) -> Any: ...


class _State:
    adapter: Adapter | None = None


state = _State()


class Plan(NamedTuple):
    """options: keyword arguments of the public function, from scheme and scales to the rounding."""

    adapter: Adapter
    reads: Reads
    options: dict[str, Any]


@dataclass(frozen=True)
class Fusion:
    """How one producer of tq is planned and called in place of the engine's module that computes the same.

    refusal(module, x): why this module cannot be fused, or `None`; x is `None` before the first call.
    call(module, x, residual, options): (args, kwargs) of the producer. reads: attributes of the module that both read.
    """

    producer: str
    refusal: Callable[[Any, torch.Tensor | None], str | None]
    call: Callable[[Any, torch.Tensor, torch.Tensor | None, dict[str, Any]], tuple[tuple, dict]]
    reads: tuple[str, ...] = ()
    inputs_per_output: int = 1


def plan(
    fusion: Fusion,
    module: Any,
    linear: Any,
    x: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    seen: Seen | None = None,
) -> Plan | str:
    """How to fuse `module` into the input quantization of `linear` now, or the reason not to.

    seen: is told everything that this rests on besides the tensors. Reasons are constants: this runs under
    torch.compile, which cannot trace the text form of every key.
    """
    adapter = state.adapter
    if adapter is None:
        return "no supported serving engine is loaded"
    if adapter.refuses_all is not None:
        return adapter.refuses_all
    if linear is None:
        return "no consumer"
    key = adapter.get_input_quant_key(linear)
    if key is None:
        return NOT_LISTED
    if attribute(linear, "tq_off", seen):
        return "switched off"
    if attribute(linear, "input_is_parallel", seen) is False:
        return "the consumer splits its input, which must be a plain tensor"
    kernel = kernel_of(linear, seen)
    if seen is not None:
        _note(seen, fusion, module, linear, kernel)
    reads = adapter.reads(kernel, key)
    if reads is None:
        return "no scheme for the consumer's input quantization key"
    scheme = SCHEMES[reads.scheme]
    weight = _any_parameter(linear) if x is None else None
    weightless = weight is not None and weight.is_meta  # a model that is only explained
    scales = {}
    for option in (*scheme.rule.needs, *scheme.rule.takes):
        field, reason = SCALES[option]
        tensor = input_quant_scale(linear, field, kernel, seen)
        fits = tensor is not None and tensor.dtype == (torch.int32 if option == "zero_point" else torch.float32)
        if reason and not fits and not weightless:
            return reason
        if fits:
            scales[option] = tensor
    # A row of vLLM's table is called without the module, whose type the table has matched.
    if module is not None and adapter.producer_of(module) != fusion.producer:
        return "the module is not what the producer computes"
    refusal = fusion.refusal(module, x)
    if refusal is None:
        refusal = _layer_refusal(scheme, linear, weight) if x is None else _input_refusal(fusion, scheme, x)
    if refusal is not None:
        return refusal
    options = adapter.rounding(fusion.producer, reads, residual is not None)
    if options is None:
        return "the plain module runs an implementation of unknown rounding"
    options["scheme"] = scheme.name
    if scheme.dynamic:
        # What is replaced is a plain module and the quantizer after it, whose least scale is the scheme's.
        options["layout"] = reads.layout
        if "scale_ub" in scheme.rule.takes:
            options["min_scale"] = scheme.min_scale
    options.update(scales)
    return Plan(adapter, reads, options)


def _note(seen: Seen, fusion: Fusion, module: Any, linear: Any, kernel: Any) -> None:
    """What `plan` reads otherwise than by `attribute`."""
    seen.note_attribute(state, "adapter")
    seen.note_attribute(state.adapter, "refuses_all")
    for name in ("requires_unquantized_input", "_input_quant_key"):
        seen.note_attribute(linear, name)
    if kernel is not None:
        seen.note_attribute(kernel, "tq_reads")
    for name in fusion.reads:
        seen.note_attribute(module, name)


def route(
    fusion: Fusion,
    module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    linear: Any,
    plain: Callable[..., Any],
    boundary: Boundary | None = None,
    repeats: Repeats | None = None,
    seen: Seen | None = None,
) -> Any:
    """fused(x) for `linear`, or `plain(x)` (`plain(x, residual)` when a residual is given).

    repeats: learns the call, which rests on what was `seen` before and on what is seen here.
    """
    planned = plan(fusion, module, linear, x, residual, seen)
    if isinstance(planned, str):
        return plain(x) if residual is None else plain(x, residual)
    producer = tq.PRODUCERS[fusion.producer]
    if boundary is not None and boundary.shares:
        planned.options["return_unquantized"] = True
    args, kwargs = fusion.call(module, x, residual, planned.options)
    result = producer(*args, **kwargs)
    if not torch.compiler.is_compiling():
        boundaries.called(boundary, fusion.producer, args, kwargs, result)
        if repeats is not None and seen is not None and not boundaries.observers:
            repeats.learn(seen, x, residual, linear, planned.reads, args, kwargs)
    outputs = result if isinstance(result, tuple) else (result,)
    made, reads, wrap = outputs[0], planned.reads, planned.adapter.wrap
    activation = wrap(reads, made.data, made.scale, made.orig_dtype, made.orig_shape, made.zero_point)
    if "return_unquantized" in kwargs:
        activation = attach(outputs[-1], linear, activation)
    return activation if residual is None else (activation, outputs[1])


def _any_parameter(linear: Any) -> torch.Tensor | None:
    # Not one of a certain name: a kernel may keep its weight elsewhere.
    return next(iter(linear.parameters()), None)


def _layer_refusal(scheme: Scheme, linear: Any, weight: torch.Tensor | None) -> str | None:
    """What is known before the first input."""
    row = attribute(linear, "input_size_per_partition") or attribute(linear, "input_size")
    return _NO_GROUPS if scheme.group and row and row % scheme.group else _device_refusal(weight)


def _input_refusal(fusion: Fusion, scheme: Scheme, x: Any) -> str | None:
    if not isinstance(x, torch.Tensor):
        return "the input is not a tensor"
    if x.dtype not in DTYPES:
        return "the input is neither bf16 nor fp16"
    if x.stride(-1) != 1:
        return "the input's last dimension is strided"
    if scheme.group and x.shape[-1] // fusion.inputs_per_output % scheme.group != 0:
        return _NO_GROUPS
    return _device_refusal(x)


def _device_refusal(tensor: Any) -> str | None:
    """Why no kernel runs on the device of an input, or of a layer's weight."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_cuda or tensor.is_meta or (tensor.is_cpu and _RUNS_ON_CPU):
        return None
    return "no kernels for this device (on a CPU, set TRITON_INTERPRET=1 or TQ_REFERENCE=1)"


def _norm_refusal(norm: Any, x: torch.Tensor | None) -> str | None:
    if getattr(norm, "variance_size_override", None) is not None:
        return "the variance is taken over a part of the row"
    weight = attribute(norm, "weight")
    if not getattr(norm, "has_weight", True) or not isinstance(weight, torch.Tensor):
        return "the norm has no weight"
    if weight.dtype not in DTYPES or (x is not None and weight.dtype != x.dtype):
        return "the norm's weight and input differ in dtype, or are neither bf16 nor fp16"
    return None


def _norm_call(norm: Any, x: torch.Tensor, residual: torch.Tensor | None, options: dict[str, Any]) -> tuple:
    arguments = (x, attribute(norm, "weight"), norm.variance_epsilon)
    if residual is None:
        return arguments, options
    kwargs = {**options, "residual": residual}
    # As the plain norm does, which saves an allocation in each call. Not where code is traced, which wants values and
    # no writes, nor for an observer, who is promised the residual from before the addition.
    if kwargs.pop("in_place", False) and not torch.compiler.is_compiling() and not boundaries.observers:
        kwargs["residual_out"] = residual
    return arguments, kwargs


def _act_refusal(act: Any, x: torch.Tensor | None) -> None:
    return None


def _act_call(act: Any, x: torch.Tensor, residual: torch.Tensor | None, options: dict[str, Any]) -> tuple:
    return (x,), options


def _gelu_mul_call(act: Any, x: torch.Tensor, residual: torch.Tensor | None, options: dict[str, Any]) -> tuple:
    return (x,), {**options, "approximate": act.approximate}


NORM_READS = ("weight", "variance_epsilon", "has_weight", "variance_size_override")
RMS_NORM = Fusion("rms_norm", _norm_refusal, _norm_call, NORM_READS)
GEMMA_RMS_NORM = Fusion("gemma_rms_norm", _norm_refusal, _norm_call, NORM_READS)
SILU_MUL = Fusion("silu_mul", _act_refusal, _act_call, inputs_per_output=2)
GELU_MUL = Fusion("gelu_mul", _act_refusal, _gelu_mul_call, ("approximate",), inputs_per_output=2)
RELU2 = Fusion("relu2", _act_refusal, _act_call)

FUSIONS = {fusion.producer: fusion for fusion in (RMS_NORM, GEMMA_RMS_NORM, SILU_MUL, GELU_MUL, RELU2)}
