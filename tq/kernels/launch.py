"""From a producer, a scheme and arguments to outputs: check, plan, allocate, launch. The only file that launches.

A plan holds what a call needs besides its tensors. It depends on their description alone (dtype, shape, strides, device,
alignment), so a call like an earlier one skips the checks and Triton's own search for the compiled kernel.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tq.activation import QuantizedActivation
from tq.kernels import tuning
from tq.kernels.layouts import Layout
from tq.kernels.producer import Bound, Producer, Replaced, bind_checked, constant
from tq.kernels.rows import Tiling, quantize_rows_kernel
from tq.kernels.schemes import SMALLEST_MIN_SCALE, DeviceScheme, ScaleInputs, Scheme, find_scheme
from tq.kernels.target import INTERPRETED, target_of

MAX_PLANS = 8192  # one for each shape seen; a few hundred bytes each

_plans: dict[tuple, Plan] = {}
_reference = os.environ.get("TQ_REFERENCE", "0") == "1"


@contextmanager
def use_reference() -> Iterator[None]:
    """Inside, producers run their torch reference and scheme reference instead of a kernel. TQ_REFERENCE=1 in the
    environment does the same for a whole process."""
    global _reference
    before, _reference = _reference, True
    try:
        yield
    finally:
        _reference = before


class Launch(NamedTuple):
    """What a launch needs besides tensors; kernel is the compiled kernel, or the jit function where it is interpreted."""

    kernel: Any
    options: dict[str, Any]
    grid: tuple[int, int, int]
    padded_rows: int
    scheme: DeviceScheme
    tiling: Tiling


@dataclass(eq=False)
class Plan:
    """One kind of call, checked. launch: found by the first launch."""

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
    launch: Launch | None = None


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
    bound = bind(producer, arguments, {**stands_for.options, **given})
    hidden_size = bound.shape[-1]
    if found.group and hidden_size % found.group:
        raise ValueError(
            f"{op}: hidden size must be a multiple of {found.group} for {found.name}, got {hidden_size}; "
            f"pad the activation or take a scheme without groups"
        )
    least = check_scales(op, found, stands_for, scale, scale_ub, min_scale, bound.device)
    constants = {**stands_for.options, **{k: v for k, v in given.items() if not isinstance(v, torch.Tensor)}}
    rows = math.prod(bound.shape[:-1])  # Size.numel() would make a symbolic size a constant
    return Plan(producer, found, layout, constants, least, bound.dtype, bound.device, bound.shape, rows, hidden_size)


def fill(plan: Plan, arguments: tuple, options: dict[str, Any]) -> Prepared:
    """The call that `plan` describes, with these tensors and new outputs."""
    scale, scale_ub = options.get("scale"), options.get("scale_ub")
    given = {k: v for k, v in options.items() if isinstance(v, torch.Tensor) and k not in ("scale", "scale_ub")}
    given = {**plan.options, **given}
    bound = bind_checked(plan.producer, arguments, given)
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
    key = (
        producer,
        scheme,
        tuning.forced(),
        *map(describe, arguments),
        *options,
        *map(describe, options.values()),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = make_plan(producer, arguments, scheme, options)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return fill(plan, arguments, options)


def bind(producer: Producer, arguments: tuple, options: dict[str, Any]) -> Bound:
    """The producer's checked arguments; a wrong name or number of arguments is a TypeError naming the op."""
    try:
        return producer.bind(*arguments, **options)  # type: ignore[misc]
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


def needs_whole_row(producer: Producer, scheme: Scheme) -> bool:
    """Whether one program must see a row entirely: something is reduced over it."""
    return bool(producer.moments) or scheme.granularity == "token"


def cut(plan: Plan, whole_row: bool) -> tuple[Tiling, int]:
    """The tiling of a call, and its warps."""
    config = tuning.choose(plan.rows, plan.hidden_size, plan.scheme.group, whole_row, plan.dtype.itemsize)
    return tiling_of(plan.hidden_size, config), config.num_warps


@lru_cache
def tiling_of(hidden_size: int, config: tuning.RowConfig) -> Tiling:
    programs = -(-hidden_size // (config.tiles * config.block_n))
    return Tiling(*map(constant, (hidden_size, config.block_m, config.block_n, config.tiles, programs)))


def check_device(op: str, device: torch.device) -> None:
    """Raises NotImplementedError where no kernel can run."""
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED.value):
        return
    raise NotImplementedError(
        f"{op}: tensors must be on a GPU, got {device}; on a CPU set TRITON_INTERPRET=1 before importing triton, "
        f"or call inside tq.use_reference()"
    )


def run(prepared: Prepared) -> None:
    """Fills the outputs: one kernel, or the torch reference inside `use_reference`."""
    plan = prepared.plan
    if plan.rows == 0:
        return
    if _reference:
        return run_reference(prepared)
    check_device(plan.producer.name, plan.device)
    if plan.device.type == "cuda" and plan.device.index != torch.cuda.current_device():
        with torch.cuda.device(plan.device):
            return launch(prepared)
    return launch(prepared)


def launch(prepared: Prepared) -> None:
    plan, scales = prepared.plan, prepared.scales
    found = plan.launch or find_launch(plan)
    row_stride, group_stride = scales.stride() if scales is not None else (0, 0)
    compiled = found.kernel[found.grid](
        prepared.codes,
        scales,
        row_stride,
        group_stride,
        plan.rows,
        found.padded_rows,
        plan.producer.device,
        prepared.bound.args,
        found.scheme,
        prepared.inputs,
        found.tiling,
        **found.options,
    )
    if plan.launch is None:
        # A compiled kernel takes the same arguments without looking at them again.
        plan.launch = found if compiled is None else found._replace(kernel=compiled, options={})


def find_launch(plan: Plan) -> Launch:
    """The launch of a plan, by way of Triton's search for the compiled kernel."""
    tiling, num_warps = cut(plan, needs_whole_row(plan.producer, plan.scheme))
    padded_rows = plan.layout.padded_rows(plan.rows)
    grid = (-(-padded_rows // tiling.BLOCK_M.value) * tiling.PROGRAMS.value, 1, 1)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    scheme = plan.scheme.device(target_of(plan.device))
    return Launch(quantize_rows_kernel, options, grid, padded_rows, scheme, tiling)


def run_reference(prepared: Prepared) -> None:
    """The outputs by torch alone."""
    plan = prepared.plan
    options = {k: v for k, v in prepared.options.items() if k not in plan.producer.mutates}
    made = plan.producer.reference(*prepared.arguments, **options)
    codes, scales = plan.scheme.reference(made.y, prepared.inputs)
    prepared.codes.view(codes.shape).copy_(codes)
    if prepared.scales is not None:
        prepared.scales.copy_(scales)
    for out, value in zip(prepared.bound.side_outputs, made.side_outputs, strict=True):
        out.copy_(value)


def call(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Any:
    """producer(*arguments) quantized by `scheme`: a QuantizedActivation, followed by the side outputs if there are any.

    Options of every producer: scale, the static scale (a float32 tensor of one element: fp8_tensor needs it); scale_ub,
    an upper bound of amax in a tensor likewise (dynamic schemes); layout, of the scales, a name among
    `SCHEMES[scheme].layouts`; min_scale, the least dynamic scale, default that of the vLLM op replaced. The other
    options are the producer's. `None` is the default everywhere. Calls inside torch.compile go through the registered op.

    Raises ValueError for a value, TypeError for a type and NotImplementedError for a place it cannot run at, naming the
    argument, what came and what to do, before anything is launched or changed.
    """
    if torch.compiler.is_compiling():
        from tq.kernels.ops import call_op

        outputs = call_op(producer, arguments, scheme, options)
        return assemble(arguments[0].dtype, find_scheme(producer.name, scheme), outputs, options)
    prepared = prepare_again(producer, arguments, scheme, options)
    run(prepared)
    return assemble(prepared.plan.dtype, prepared.plan.scheme, outputs_of(prepared), options)


def outputs_of(prepared: Prepared) -> list[torch.Tensor]:
    """Codes, scales if the scheme computes them, side outputs."""
    scales = [] if prepared.scales is None else [prepared.scales]
    return [prepared.codes, *scales, *prepared.bound.side_outputs]


def assemble(dtype: torch.dtype, scheme: Scheme, outputs: list[torch.Tensor], options: dict[str, Any]) -> Any:
    """The outputs of an op as what `call` returns."""
    codes, *rest = outputs
    scale = rest.pop(0) if scheme.dynamic else options["scale"]
    layout = options.get("layout") or scheme.layouts[0].name
    data = codes.view(scheme.code.torch_dtype)
    activation = QuantizedActivation(data, scale, dtype, codes.shape, scheme.name, layout)
    return (activation, *rest) if rest else activation
