"""Plans: what a call needs besides its tensors, checked once for all calls of one description.

A plan depends on the dtype, shape, strides, device and alignment of the arguments, and on the options; a call like an
earlier one skips the checks and Triton's own search for the compiled kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch

from tq.kernels import tuning
from tq.kernels.layouts import Layout
from tq.kernels.producer import Bound, Producer, Replaced
from tq.kernels.schemes import SCHEMES, SMALLEST_MIN_SCALE, ScaleInputs, Scheme, find_scheme

MAX_PLANS = 8192  # one for each shape seen; a few hundred bytes each

_plans: dict[tuple, Plan] = {}


@dataclass(eq=False)
class Plan:
    """One kind of call, checked. launch: what its first launch found, kept by `tq.kernels.launch`."""

    producer: Producer
    scheme: Scheme
    layout: Layout
    options: dict[str, Any]
    min_scale: float
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    rows: int
    hidden_size: int
    mean_group: int
    launch: Any = None


class Prepared(NamedTuple):
    """One call, checked and allocated, before its launch."""

    plan: Plan
    bound: Bound
    inputs: ScaleInputs
    arguments: tuple
    options: dict[str, Any]
    codes: torch.Tensor
    scales: torch.Tensor | None


@lru_cache
def replaced(producer: Producer, scheme: Scheme) -> Replaced:
    """The vLLM op this pair stands in for."""
    return producer.replaces(scheme)


def describe(value: Any) -> Any:
    """What a plan depends on in an argument."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.device, value.data_ptr() % 16
    return value


def make_plan(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Plan:
    """Checks everything; allocates and launches nothing that lasts."""
    op = producer.name
    found = find_scheme(op, scheme)
    stands_for = replaced(producer, found)
    given = {name: value for name, value in options.items() if value is not None}
    scale, scale_ub, min_scale = given.pop("scale", None), given.pop("scale_ub", None), given.pop("min_scale", None)
    layout = find_layout(op, found, given.pop("layout", None))
    bound = check_and_bind(producer, arguments, {**stands_for.options, **given})
    hidden_size = bound.shape[-1]
    if found.group and hidden_size % found.group:
        raise ValueError(
            f"{op}: hidden size must be a multiple of {found.group} for {found.name}, got {hidden_size}; "
            f"pad the activation or take a scheme without groups"
        )
    least = check_scales(op, found, stands_for, scale, scale_ub, min_scale, bound.device)
    constants = {**stands_for.options, **{k: v for k, v in given.items() if not isinstance(v, torch.Tensor)}}
    rows = math.prod(bound.shape[:-1])  # Size.numel() would make a symbolic size a constant
    described = bound.dtype, bound.device, bound.shape, rows, hidden_size, bound.mean_group
    return Plan(producer, found, layout, constants, least, *described)


def fill(plan: Plan, arguments: tuple, options: dict[str, Any]) -> Prepared:
    """The call that `plan` describes, with these tensors and new outputs."""
    scale, scale_ub = options.get("scale"), options.get("scale_ub")
    given = {k: v for k, v in options.items() if isinstance(v, torch.Tensor) and k not in ("scale", "scale_ub")}
    given = {**plan.options, **given}
    bound = plan.producer.bind(*arguments, **given)
    codes = torch.empty(plan.shape, dtype=torch.uint8, device=plan.device)
    scales = None
    if plan.scheme.dynamic:
        scales = plan.layout.allocate(plan.rows, plan.scheme.groups(plan.hidden_size), plan.device)
    return Prepared(plan, bound, ScaleInputs(scale, scale_ub, plan.min_scale), arguments, given, codes, scales)


def prepare(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Prepared:
    """A call, checked and allocated. Launches nothing: it is also what the op's fake runs."""
    return fill(make_plan(producer, arguments, scheme, options), arguments, options)


def prepare_again(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Prepared:
    """As `prepare`, with the plan of an earlier call of the same description if there was one."""
    described = map(describe, arguments), options, map(describe, options.values())
    try:
        # The scheme and not its name: a name may be given to another one.
        key = (producer, SCHEMES.get(scheme), tuning.forced(), *chain.from_iterable(described))
        plan = _plans.get(key)
    except TypeError:  # something that no call takes; the checks say what
        return prepare(producer, arguments, scheme, options)
    if plan is None:
        plan = make_plan(producer, arguments, scheme, options)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return fill(plan, arguments, options)


def check_and_bind(producer: Producer, arguments: tuple, options: dict[str, Any]) -> Bound:
    """The producer's arguments, checked; a wrong name or number of arguments is a TypeError naming the op."""
    try:
        producer.check(*arguments, **options)  # type: ignore[misc]
        return producer.bind(*arguments, **options)
    except TypeError as error:
        if str(error).startswith(f"{producer.name}: "):
            raise
        raise TypeError(f"{producer.name}: arguments do not fit its signature: {error}") from None


def find_layout(op: str, scheme: Scheme, name: str | None) -> Layout:
    """The layout of a name among the scheme's; its first for None."""
    if name is None:
        return scheme.layouts[0]
    for layout in scheme.layouts:
        if layout.name == name:
            return layout
    known = ", ".join(layout.name for layout in scheme.layouts)
    raise ValueError(f"{op}: layout of {scheme.name} must be one of {known}; got {name!r}")


def check_scales(
    op: str,
    scheme: Scheme,
    stands_for: Replaced,
    scale: torch.Tensor | None,
    scale_ub: torch.Tensor | None,
    min_scale: float | None,
    device: torch.device,
) -> float:
    """The least scale. Raises unless a static scheme has `scale`, and a dynamic one only what bounds its scales."""
    if not scheme.dynamic:
        if scale is None:
            raise ValueError(f"{op}: scale must be given for {scheme.name}, got None; pass a one-element fp32 tensor")
        if scale_ub is not None or min_scale is not None:
            raise ValueError(f"{op}: scale_ub and min_scale must be None for {scheme.name}, whose scale is given")
        check_scalar(op, "scale", scale, device)
        return 0.0
    if scale is not None:
        raise ValueError(f"{op}: scale must be None for {scheme.name}, got a tensor; its scales are computed")
    if scale_ub is not None:
        check_scalar(op, "scale_ub", scale_ub, device)
    if min_scale is None:
        return scheme.min_scale if stands_for.min_scale is None else stands_for.min_scale
    if not min_scale >= SMALLEST_MIN_SCALE:
        raise ValueError(f"{op}: min_scale must be at least {SMALLEST_MIN_SCALE}, got {min_scale}")
    return min_scale


def check_scalar(op: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises unless `tensor` is one fp32 number on `device`."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
        came = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{op}: {name} must be a float32 tensor, got {came}; pass torch.tensor([value])")
    if tensor.numel() != 1:
        raise ValueError(f"{op}: {name} must have one element, got shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} as x is, got {tensor.device}; move it there")
