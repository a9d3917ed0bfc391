"""From a producer, a scheme and arguments to outputs. The only file that launches a producer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tq.activation import QuantizedActivation
from tq.kernels import tuning
from tq.kernels.layouts import DeviceLayout
from tq.kernels.plan import Plan, Prepared, prepare_again
from tq.kernels.producer import Producer, constant
from tq.kernels.rows import Tiling, quantize_rows_kernel
from tq.kernels.schemes import DeviceScheme, Scheme, find_scheme
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


class Launch(NamedTuple):
    """What a launch needs besides tensors; kernel is the compiled kernel, or the jit function where it is
    interpreted."""

    kernel: Any
    options: dict[str, Any]
    grid: tuple[int, int, int]
    padded_rows: int
    scheme: DeviceScheme
    layout: DeviceLayout
    tiling: Tiling


def needs_whole_row(producer: Producer, scheme: Scheme, mean_group: int = 0) -> bool:
    """Whether one program must see a row entirely: something is reduced over it."""
    return bool(producer.moments and not mean_group) or scheme.granularity == "token"


def cut(plan: Plan, whole_row: bool) -> tuple[Tiling, int]:
    """The tiling of a call, and its warps."""
    least = max(plan.scheme.group, plan.mean_group)
    config = tuning.choose(plan.rows, plan.hidden_size, least, whole_row, plan.dtype.itemsize)
    return tiling_of(plan.hidden_size, config, plan.mean_group), config.num_warps


@lru_cache
def tiling_of(hidden_size: int, config: tuning.RowConfig, mean_group: int = 0) -> Tiling:
    block_n = max(config.block_n, mean_group)
    programs = -(-hidden_size // (config.tiles * block_n))
    return Tiling(*map(constant, (hidden_size, config.block_m, block_n, config.tiles, programs, mean_group)))


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
        found.layout,
        prepared.inputs,
        found.tiling,
        **found.options,
    )
    if plan.launch is None:
        # A compiled kernel takes the same arguments without looking at them again.
        plan.launch = found if compiled is None else found._replace(kernel=compiled, options={})


def find_launch(plan: Plan) -> Launch:
    """The launch of a plan, by way of Triton's search for the compiled kernel."""
    tiling, num_warps = cut(plan, needs_whole_row(plan.producer, plan.scheme, plan.mean_group))
    padded_rows = plan.layout.padded_rows(plan.rows)
    grid = (-(-padded_rows // tiling.BLOCK_M.value) * tiling.PROGRAMS.value, 1, 1)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    scheme = plan.scheme.device(target_of(plan.device))
    layout = plan.layout.device(plan.scheme.groups(plan.hidden_size))
    return Launch(quantize_rows_kernel, options, grid, padded_rows, scheme, layout, tiling)


def run_reference(prepared: Prepared) -> None:
    """The outputs by torch alone."""
    plan = prepared.plan
    options = {k: v for k, v in prepared.options.items() if k not in plan.producer.mutates}
    made = plan.producer.reference(*prepared.arguments, **options, precision=torch.float32)
    codes, scales = plan.scheme.reference(made.y, prepared.inputs)
    prepared.codes.view(codes.shape).copy_(codes)
    if prepared.scales is not None:
        plan.layout.pack(plan.scheme.rule.reference_store(scales), prepared.scales)
    for out, value in zip(prepared.bound.side_outputs, made.side_outputs, strict=True):
        out.copy_(value)


def call(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Any:
    """producer(*arguments) quantized by `scheme`: a QuantizedActivation, followed by the side outputs if there are any.

    Options of every producer: scale, the static scale (a float32 tensor of one element: fp8_tensor needs it); scale_ub,
    an upper bound of amax in a tensor likewise (dynamic schemes); layout, of the scales, a name among
    `SCHEMES[scheme].layouts`; min_scale, the least dynamic scale, default that of the vLLM op replaced. The other
    options are the producer's. `None` is the default everywhere. Calls inside torch.compile go through the registered
    op.

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
