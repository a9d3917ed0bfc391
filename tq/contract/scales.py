"""Scales that a consumer linear layer reads its quantized input with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

# vLLM's own accessor, once a release has one; set by the adapter.
own_accessor: Callable[[Any], Any] | None = None

_MODULE_GETATTR = torch.nn.Module.__getattr__
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_KERNEL_HOLDERS = ("scheme", "quant_method")
_KERNEL_ATTRIBUTES = ("fp8_linear", "kernel", "ocp_mx_linear")


@dataclass(frozen=True)
class InputQuantScales:
    """Tensors a producer needs to quantize for one consumer; `None` where the consumer has none.

    static_scale: fp32, 0-d or one element, dequantization scale: x ~ q * static_scale.
    global_scale_inv: fp32, one element, inverse of the second-level scale (NVFP4).
    scale_ub: fp32, one element, upper bound on the absolute maximum of a dynamically scaled row.
    zero_point: int32, one element, static zero point: x ~ (q - zero_point) * static_scale.
    """

    static_scale: torch.Tensor | None = None
    global_scale_inv: torch.Tensor | None = None
    scale_ub: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None


ABSENT: Final = object()
Lookup = tuple[dict[str, Any], str, Any]


class Seen:
    """What a decision looked up: lookups, (table, name, value found there or `ABSENT`); incomplete: whether something
    was found where a later change could not be noticed (a property, a `__getattr__` of its own)."""

    def __init__(self) -> None:
        self.lookups: dict[tuple[int, str], Lookup] = {}
        self.incomplete = False

    def note(self, table: dict[str, Any], name: str) -> bool:
        """Keep what `table` has under `name` now; whether there is anything."""
        found = table.get(name, ABSENT)
        self.lookups[id(table), name] = (table, name, found)
        return found is not ABSENT

    def note_attribute(self, owner: Any, name: str) -> None:
        """Keep where getattr(owner, name, None) finds its value. What classes hold does not change."""
        members = getattr(owner, "__dict__", None)
        if members is None:
            self.incomplete = True
            return
        of_module = getattr(type(owner), "__getattr__", None) is _MODULE_GETATTR
        tables = [members, *[members[table] for table in _MODULE_TABLES]] if of_module else [members]
        if any(self.note(table, name) for table in tables):
            for table in tables[1:]:
                if name not in table:  # a module has a name in one table at most
                    self.lookups.pop((id(table), name), None)
            return
        of_class = inspect.getattr_static(type(owner), name, ABSENT)
        delegates = not of_module and hasattr(type(owner), "__getattr__")
        self.incomplete |= delegates if of_class is ABSENT else hasattr(type(of_class), "__get__")


def get_input_quant_scales(linear: Any) -> InputQuantScales:
    """Scales of `linear` as they are now.

    Nothing is kept between two calls: weight post-processing, a weight reload or a user may replace, overwrite or
    delete a scale at any time. A captured CUDA graph keeps the tensor it was captured with: replays see a scale
    written in place; a replaced one needs a new capture, as for vLLM's own kernels. A tensor that is absent, or that
    has more than one element, is reported as `None`. Attribute names are those of the kernel behind the layer (vLLM
    `ScaledMMLinearKernel.layer_param_names`).
    """
    kernel = kernel_of(linear)
    return InputQuantScales(*(input_quant_scale(linear, field, kernel) for field in InputQuantScales.__annotations__))


def input_quant_scale(linear: Any, field: str, kernel: Any, seen: Seen | None = None) -> torch.Tensor | None:
    """One field of `get_input_quant_scales(linear)`; kernel: `kernel_of(linear)`."""
    if own_accessor is None:
        value = attribute(linear, _parameter_name(kernel, field, seen), seen)
    else:
        value = getattr(own_accessor(linear), field, None)
        if seen is not None:
            seen.incomplete = True
    return value if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def attribute(owner: Any, name: str, seen: Seen | None = None) -> Any:
    """getattr(owner, name, None), cheaper on a `torch.nn.Module`: it searches in Python, and raises on a miss."""
    if seen is not None:
        seen.note_attribute(owner, name)
    members = owner.__dict__
    if name in members:
        return members[name]
    if getattr(type(owner), "__getattr__", None) is not _MODULE_GETATTR:
        return getattr(owner, name, None)
    for table in _MODULE_TABLES:
        if name in members[table]:
            return members[table][name]
    return getattr(owner, name) if hasattr(type(owner), name) else None


def kernel_of(linear: Any, seen: Seen | None = None) -> Any:
    """The object that runs the layer's matrix product, or `None`."""
    for holder_name in _KERNEL_HOLDERS:
        holder = attribute(linear, holder_name, seen)
        if holder is not None:
            for name in _KERNEL_ATTRIBUTES:
                if seen is not None:
                    seen.note_attribute(holder, name)
                kernel = getattr(holder, name, None)
                if kernel is not None:
                    return kernel
    return None


def _parameter_name(kernel: Any, field: str, seen: Seen | None = None) -> str:
    """Name that a field of `InputQuantScales` has on the layer of `kernel`."""
    if field == "global_scale_inv":
        return "input_global_scale_inv"
    if seen is not None and kernel is not None:
        seen.note_attribute(kernel, "layer_param_names")
    names: Any = getattr(kernel, "layer_param_names", ())
    # FP8: (weight, weight scale, input scale, bound). INT8: (weight, weight scale, input scale, zero point, its term).
    if field == "static_scale":
        return names[2] if len(names) in (4, 5) else "input_scale"
    if field == "zero_point":
        return names[3] if len(names) == 5 else "input_zero_point"
    return names[3] if len(names) == 4 else "input_scale_ub"


def implementation(linear: Any) -> str:
    """Name of the class behind `linear`: its kernel's, else its quantization method's, else its own."""
    kind = type(kernel_of(linear) or getattr(linear, "quant_method", None) or linear)
    return getattr(kind, "tq_base", kind).__name__
