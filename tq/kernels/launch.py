"""From a producer, a scheme and arguments to outputs: check, allocate, choose, launch. The only file that launches."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.activation import QuantizedActivation
from tq.kernels import tuning
from tq.kernels.layouts import Layout
from tq.kernels.producer import Bound, Producer, Replaced
from tq.kernels.rows import Tiling, quantize_rows_kernel
from tq.kernels.schemes import SMALLEST_MIN_SCALE, ScaleInputs, Scheme, find_scheme
from tq.kernels.target import INTERPRETED, target_of

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


class Prepared(NamedTuple):
    """One call, checked and allocated, before its launch."""

    producer: Producer
    scheme: Scheme
    layout: Layout
    bound: Bound
    inputs: ScaleInputs
    arguments: tuple
    options: dict[str, Any]
    rows: int
    hidden_size: int
    codes: torch.Tensor
    scales: torch.Tensor | None


@lru_cache
def replaced(producer: Producer, scheme: Scheme) -> Replaced:
    """The vLLM op this pair stands in for."""
    return producer.replaces(scheme)


def prepare(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Prepared:
    """Checks everything and allocates the outputs; launches nothing. Also what the op's fake runs."""
    op = producer.name
    found = find_scheme(op, scheme)
    stands_for = replaced(producer, found)
    given = {name: value for name, value in options.items() if value is not None}
    scale, scale_ub = given.pop("scale", None), given.pop("scale_ub", None)
    layout = find_layout(op, found, given.pop("layout", None))
    min_scale = given.pop("min_scale", None)
    given = {**stands_for.options, **given}
    bound = bind(producer, arguments, given)
    hidden_size = bound.shape[-1]
    rows = math.prod(bound.shape[:-1])  # Size.numel() would make a symbolic size a constant
    if found.group and hidden_size % found.group:
        raise ValueError(
            f"{op}: hidden size must be a multiple of {found.group} for {found.name}, got {hidden_size}; "
            f"pad the activation or take a scheme without groups"
        )
    inputs = bind_scales(op, found, stands_for, scale, scale_ub, min_scale, bound.device)
    codes = torch.empty(bound.shape, dtype=torch.uint8, device=bound.device)
    scales = layout.allocate(rows, found.groups(hidden_size), bound.device) if found.dynamic else None
    return Prepared(
        producer, found, layout, bound, inputs, arguments, given, rows, hidden_size, codes, scales
    )


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


def bind_scales(
    op: str,
    scheme: Scheme,
    stands_for: Replaced,
    scale: torch.Tensor | None,
    scale_ub: torch.Tensor | None,
    min_scale: float | None,
    device: torch.device,
) -> ScaleInputs:
    """What the scale rule reads, checked: a static scheme needs `scale`, a dynamic one takes the other two."""
    if not scheme.dynamic:
        if scale is None:
            raise ValueError(f"{op}: scale must be given for {scheme.name}, got None; pass a one-element fp32 tensor")
        if scale_ub is not None or min_scale is not None:
            raise ValueError(f"{op}: scale_ub and min_scale must be None for {scheme.name}, whose scale is given")
        check_scalar(op, "scale", scale, device)
        return ScaleInputs(scale, None, 0.0)
    if scale is not None:
        raise ValueError(f"{op}: scale must be None for {scheme.name}, got a tensor; its scales are computed")
    if scale_ub is not None:
        check_scalar(op, "scale_ub", scale_ub, device)
    if min_scale is None:
        min_scale = scheme.min_scale if stands_for.min_scale is None else stands_for.min_scale
    elif not min_scale >= SMALLEST_MIN_SCALE:
        raise ValueError(f"{op}: min_scale must be at least {SMALLEST_MIN_SCALE}, got {min_scale}")
    return ScaleInputs(None, scale_ub, min_scale)


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


def cut(prepared: Prepared, whole_row: bool) -> tuple[Tiling, int]:
    """The tiling of a call, and its warps."""
    config = tuning.choose(
        prepared.rows, prepared.hidden_size, prepared.scheme.group, whole_row, prepared.bound.dtype.itemsize
    )
    return tiling_of(prepared.hidden_size, config), config.num_warps


@lru_cache
def tiling_of(hidden_size: int, config: tuning.RowConfig) -> Tiling:
    programs = triton.cdiv(hidden_size, config.tiles * config.block_n)
    values = hidden_size, config.block_m, config.block_n, config.tiles, programs
    return Tiling(*map(tl.constexpr, values))


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
    if prepared.rows == 0:
        return
    if _reference:
        return run_reference(prepared)
    device = prepared.bound.device
    check_device(prepared.producer.name, device)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(prepared)
    return launch(prepared)


def launch(prepared: Prepared) -> None:
    scheme, scales = prepared.scheme, prepared.scales
    tiling, num_warps = cut(prepared, needs_whole_row(prepared.producer, scheme))
    padded_rows = prepared.layout.padded_rows(prepared.rows)
    row_stride, group_stride = scales.stride() if scales is not None else (0, 0)
    grid = (triton.cdiv(padded_rows, tiling.BLOCK_M.value) * tiling.PROGRAMS.value,)
    quantize_rows_kernel[grid](
        prepared.codes,
        scales,
        row_stride,
        group_stride,
        prepared.rows,
        padded_rows,
        prepared.producer.device,
        prepared.bound.args,
        scheme.device(target_of(prepared.bound.device)),
        prepared.inputs,
        tiling,
        num_warps=num_warps,
        enable_fp_fusion=False,
    )


def run_reference(prepared: Prepared) -> None:
    """The outputs by torch alone."""
    options = {k: v for k, v in prepared.options.items() if k not in prepared.producer.mutates}
    made = prepared.producer.reference(*prepared.arguments, **options)
    codes, scales = prepared.scheme.reference(made.y, prepared.inputs)
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
    else:
        prepared = prepare(producer, arguments, scheme, options)
        run(prepared)
        outputs = [prepared.codes, *prepared.bound.side_outputs]
        if prepared.scales is not None:
            outputs.insert(1, prepared.scales)
    return assemble(arguments[0].dtype, find_scheme(producer.name, scheme), outputs, options)


def assemble(dtype: torch.dtype, scheme: Scheme, outputs: list[torch.Tensor], options: dict[str, Any]) -> Any:
    """The outputs of an op as what `call` returns."""
    codes, *rest = outputs
    scale = rest.pop(0) if scheme.dynamic else options["scale"]
    layout = options.get("layout") or scheme.layouts[0].name
    data = codes.view(scheme.code.torch_dtype)
    activation = QuantizedActivation(data, scale, dtype, codes.shape, scheme.name, layout)
    return (activation, *rest) if rest else activation
