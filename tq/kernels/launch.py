"""From a producer, a scheme and arguments to outputs. The only file that launches a producer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tq.activation import QuantizedActivation
from tq.kernels import plan as plans
from tq.kernels import tuning
from tq.kernels.again import launch_again, learn
from tq.kernels.by_reference import run_reference
from tq.kernels.cut import cut, needs_whole_row
from tq.kernels.experts import Experts
from tq.kernels.layouts import DeviceLayout
from tq.kernels.plan import Plan, Prepared, fill, find_plan, outputs_of
from tq.kernels.producer import Producer, as_rows
from tq.kernels.rows import Tiling, quantize_rows_kernel
from tq.kernels.schemes import SCHEMES, DeviceScheme, Scheme, find_scheme
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
    """What a launch needs besides tensors."""

    kernel: Any
    options: dict[str, Any]
    grid: tuple[int, int, int]
    padded_rows: int
    scheme: DeviceScheme
    layout: DeviceLayout
    tiling: Tiling
    overlaps: bool


def check_device(op: str, device: torch.device) -> None:
    """Raises NotImplementedError where no kernel can run."""
    if device.type == "cuda" or (device.type == "cpu" and INTERPRETED.value):
        return
    raise NotImplementedError(
        f"{op}: tensors must be on a GPU, got {device}; on a CPU set TRITON_INTERPRET=1 before importing triton, "
        f"or call inside tq.use_reference()"
    )


def run(prepared: Prepared) -> Any:
    """Fills the outputs: one kernel, which is returned if it was compiled, or the torch reference inside
    `use_reference`."""
    plan = prepared.plan
    if plan.rows == 0:
        return None
    if _reference:
        return run_reference(prepared)
    check_device(plan.producer.name, plan.device)
    if plan.device.type == "cuda" and plan.device.index != torch.cuda.current_device():
        with torch.cuda.device(plan.device):
            return launch(prepared)
    return launch(prepared)


def launch(prepared: Prepared) -> Any:
    """The compiled kernel, or None where it is interpreted."""
    plan = prepared.plan
    found = plan.launch = plan.launch or find_launch(prepared)
    return found.kernel[found.grid](*kernel_arguments(prepared, found), **found.options)


def kernel_arguments(prepared: Prepared, found: Launch) -> tuple:
    """What `quantize_rows_kernel` takes, in its order."""
    plan = prepared.plan
    return (
        prepared.codes,
        prepared.scales,
        *scale_strides(plan, prepared.scales),
        prepared.zero_points,
        None if prepared.unquantized is None else as_rows(prepared.unquantized),
        plan.tokens,
        found.padded_rows,
        *prepared.experts,
        plan.producer.device,
        prepared.bound.args,
        found.scheme,
        found.layout,
        prepared.inputs,
        found.tiling,
        found.overlaps,
    )


def execute(
    producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]
) -> tuple[Plan, list[torch.Tensor]]:
    """Runs a call and returns its plan and its outputs, in the order of `outputs_of`."""
    plan = find_plan(producer, arguments, scheme, options)
    if goes_again(plan):
        plans._plans.remember(plan)
        tensors = (*arguments, *[options[name] for name in plan.again.names])
        return plan, list(launch_again(plan.again, tensors))
    prepared = fill(plan, arguments, options)
    compiled = run(prepared)
    if compiled is not None and plan.again is None:
        found = plan.launch
        plan.again = learn(plan, compiled, found.grid, lambda again: kernel_arguments(again, found), arguments, options)
        plans._plans.remember(plan)
    return plan, outputs_of(prepared)


def goes_again(plan: Plan) -> bool:
    """Whether a call of `plan` can be launched with what the first one learned, here and now."""
    return plan.again is not None and not _reference and plan.device.index == torch.cuda.current_device()


def repeats(plan: Plan) -> bool:
    """Whether a call of `plan` would find the same plan, and go again."""
    return goes_again(plan) and tuning.forced() is None


def scale_strides(plan: Plan, scales: torch.Tensor | None) -> tuple[int, int, int]:
    """Distance of two tokens, groups and experts, the last in the unit that the layout's offsets count."""
    if scales is None or not plan.scheme.dynamic:
        return 0, 0, 0
    if not plan.parts:
        return *scales.stride(), 0  # type: ignore[return-value]
    expert, row, group = scales.stride()
    return row, group, expert * (scales.element_size() if plan.layout.in_bytes else 1)


def compile_options(device: torch.device, config: tuning.RowConfig) -> dict[str, Any]:
    """What a call and its check have in common, so that both add in one order."""
    return {"num_warps": target_of(device).warps(config.num_warps), "enable_fp_fusion": False}


def find_launch(prepared: Prepared) -> Launch:
    """The launch of a plan, by way of Triton's search for the compiled kernel."""
    plan = prepared.plan
    tiling, config = cut(prepared, needs_whole_row(plan.producer, plan.scheme))
    blocks = -(-plan.written_rows // tiling.BLOCK_M.value) * max(plan.parts, 1)
    grid = (blocks * tiling.PROGRAMS.value, 1, 1)
    target = target_of(plan.device)
    options = compile_options(plan.device, config)
    if target.overlaps:
        options["launch_pdl"] = True
    if config.max_registers and target.name.startswith("sm_"):
        options["maxnreg"] = config.max_registers
    layout = plan.layout.device(plan.scheme.groups(plan.hidden_size))
    scheme = plan.scheme.device(target)
    return Launch(quantize_rows_kernel, options, grid, plan.written_rows, scheme, layout, tiling, target.overlaps)


def call(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Any:
    """producer(*arguments) quantized by `scheme`: a QuantizedActivation; a tuple of it and the side outputs, if there
    are any, and y.

    Options of every producer, where the scheme has them: scale, the static scale, zero_point, the static zero point
    (int32), global_scale_inv, the multiplier of NVFP4 (448 * 6 / amax of the tensor), scale_ub, an upper bound of amax:
    tensors of one element, float32 but for the zero point; smooth_scale [N], by which y is multiplied before it is
    quantized; layout, of the scales, a name among `SCHEMES[scheme].layouts`; min_scale, the least dynamic scale,
    default that of the vLLM op replaced; data_width, columns of the codes, those past the hidden size 0;
    return_unquantized, to have y too, in x's dtype; tokens_per_expert (int32 or int64 [experts]), for activations
    [experts, tokens, ...] of which each expert uses its first few: the other rows are neither read nor written;
    expert_offsets ([experts + 1]), for rows of one expert after the other, and scale_offsets, the first rows of their
    scales, multiples of the tile of a layout that has tiles (swizzled), each expert's rows rounded up to whole tiles.
    With experts, scale, zero_point and global_scale_inv may have an element for each. The other options are the
    producer's. `None` is the default everywhere. Calls inside torch.compile go through the registered op.

    Raises ValueError for a value, TypeError for a type and NotImplementedError for a place it cannot run at, naming the
    argument, what came and what to do, before anything is launched or changed.
    """
    if torch.compiler.is_compiling():
        from tq.kernels.ops import call_op

        outputs = call_op(producer, arguments, scheme, options)
        return assemble(producer, arguments, find_scheme(producer.name, scheme), outputs, options)
    if not _reference and tuning.forced() is None:
        for plan in plans._plans.recent.get(producer, ()):
            if plan.scheme.name == scheme and SCHEMES.get(scheme) is plan.scheme:
                made = plan.again.call(arguments, options)
                if made is not None:
                    return made
    plan, outputs = execute(producer, arguments, scheme, options)
    return assemble(producer, arguments, plan.scheme, outputs, options)


def assemble(
    producer: Producer, arguments: tuple, scheme: Scheme, outputs: list[torch.Tensor], options: dict[str, Any]
) -> Any:
    """The outputs of an op as what `call` returns."""
    x, codes = arguments[0], outputs[0]
    rest = list(outputs[1:])  # a starred target is a tuple to the Dynamo of torch 2.11
    scale: Any = options.get("scale")
    zero_point = options.get("zero_point")
    if scheme.dynamic:
        scale = rest.pop(0)
        if scale.dtype == torch.uint8 != scheme.rule.stored:
            scale = scale.view(scheme.rule.stored)
        zero_point = rest.pop(0) if scheme.rule.zero_point else None
    layout = options.get("layout") or scheme.layouts[0].name
    activation = QuantizedActivation(
        codes.view(scheme.code.torch_dtype),
        scale,
        x.dtype,
        torch.Size((*codes.shape[:-1], x.shape[-1] // producer.parts)),
        scheme.name,
        layout,
        zero_point,
        options.get("global_scale_inv"),
        Experts._make(map(options.get, Experts._fields)),
    )
    return (activation, *rest) if rest else activation
