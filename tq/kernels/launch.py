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
from tq.kernels.producer import Producer, as_rows, constant
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


def needs_whole_row(producer: Producer, scheme: Scheme) -> bool:
    """Whether one program must see a row entirely: something is reduced over it."""
    return bool(producer.moments) or scheme.granularity == "token"


def cut(plan: Plan, whole_row: bool) -> tuple[Tiling, int]:
    """The tiling of a call, and its warps."""
    sums = bool(plan.producer.moments)
    # An interpreted program costs the same for one row and for many: those of the scales alone belong to the same one.
    padded = plan.layout.padded_rows(plan.tokens) if INTERPRETED.value and plan.scheme.dynamic else 0
    config = tuning.choose(max(plan.rows, padded), plan.data_width, plan.scheme.group, whole_row, sums)
    return tiling_of(plan.hidden_size, plan.data_width, config), config.num_warps


@lru_cache
def tiling_of(hidden_size: int, data_width: int, config: tuning.RowConfig) -> Tiling:
    programs = -(-data_width // (config.tiles * config.block_n))
    sizes = hidden_size, data_width, config.block_m, config.block_n, config.tiles, programs
    return Tiling(*map(constant, sizes))


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
    compiled = found.kernel[found.grid](
        prepared.codes,
        scales,
        *scale_strides(plan, scales),
        prepared.zero_points,
        None if prepared.unquantized is None else as_rows(prepared.unquantized),
        plan.tokens,
        found.padded_rows,
        prepared.tokens_per_expert,
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


def scale_strides(plan: Plan, scales: torch.Tensor | None) -> tuple[int, int, int]:
    """Distance of two tokens, groups and experts, the last in the unit that the layout's offsets count."""
    if scales is None or not plan.scheme.dynamic:
        return 0, 0, 0
    if not plan.experts:
        return *scales.stride(), 0  # type: ignore[return-value]
    expert, row, group = scales.stride()
    return row, group, expert * (scales.element_size() if plan.layout.in_bytes else 1)


def find_launch(plan: Plan) -> Launch:
    """The launch of a plan, by way of Triton's search for the compiled kernel."""
    tiling, num_warps = cut(plan, needs_whole_row(plan.producer, plan.scheme))
    padded_rows = plan.layout.padded_rows(plan.tokens) if plan.scheme.dynamic else plan.tokens
    blocks = -(-padded_rows // tiling.BLOCK_M.value) * max(plan.experts, 1)
    grid = (blocks * tiling.PROGRAMS.value, 1, 1)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    scheme = plan.scheme.device(target_of(plan.device))
    layout = plan.layout.device(plan.scheme.groups(plan.hidden_size))
    return Launch(quantize_rows_kernel, options, grid, padded_rows, scheme, layout, tiling)


def run_reference(prepared: Prepared) -> None:
    """The outputs by torch alone."""
    plan = prepared.plan
    options = {k: v for k, v in prepared.options.items() if k not in plan.producer.mutates}
    made = plan.producer.reference(*prepared.arguments, **options, precision=torch.float32)
    exists = rows_that_exist(prepared)
    codes, fitted = plan.scheme.reference(made.y, prepared.inputs)
    codes = torch.nn.functional.pad(codes, (0, plan.codes_shape[-1] - codes.shape[-1]))
    put(prepared.codes, codes, exists)
    if prepared.scales is not None:
        stored = plan.scheme.rule.reference_store(fitted[0])
        if not plan.experts:
            plan.layout.pack(stored, prepared.scales)
        else:
            groups = plan.layout.padded_groups(stored.shape[-1])
            padded = torch.nn.functional.pad(stored, (0, groups - stored.shape[-1]))
            used = exists.unsqueeze(-1).expand_as(padded).to(padded.dtype)
            each = (tensor.unflatten(0, (plan.experts, plan.tokens)) for tensor in (padded, used))
            for scales, *of_expert in zip(prepared.scales, *each, strict=True):
                size = plan.tokens, stored.shape[-1], scales.dtype, scales.device
                packed, written = (plan.layout.allocate(*size) for _ in of_expert)
                for tensor, out in zip(of_expert, (packed, written), strict=True):
                    plan.layout.pack(tensor, out)
                scales.copy_(torch.where(written != 0, packed, scales))
    if prepared.zero_points is not None:
        put(prepared.zero_points, fitted[1].int(), exists)
    outs, values = list(prepared.bound.side_outputs), list(made.side_outputs)
    if prepared.unquantized is not None:
        outs, values = [*outs, prepared.unquantized], [*values, made.y]
    for out, value in zip(outs, values, strict=True):
        put(out, value, exists)


def rows_that_exist(prepared: Prepared) -> torch.Tensor:
    """Which rows of the flattened activation there are, bool [rows]."""
    plan = prepared.plan
    if prepared.tokens_per_expert is None:
        return torch.ones(plan.rows, dtype=torch.bool, device=plan.device)
    tokens = torch.arange(plan.tokens, device=plan.device)
    return (tokens < prepared.tokens_per_expert.unsqueeze(-1)).flatten()


def put(out: torch.Tensor, value: torch.Tensor, exists: torch.Tensor) -> None:
    """out = value in the rows that exist."""
    rows = exists.view(*out.shape[:-1], 1)
    out.copy_(torch.where(rows, value.to(out.dtype).view(out.shape), out))


def call(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Any:
    """producer(*arguments) quantized by `scheme`: a QuantizedActivation; a tuple of it and the side outputs, if there
    are any, and y.

    Options of every producer, where the scheme has them: scale, the static scale, zero_point, the static zero point
    (int32), global_scale_inv, the multiplier of NVFP4 (448 * 6 / amax of the tensor), scale_ub, an upper bound of amax:
    tensors of one element, float32 but for the zero point; smooth_scale [N], by which y is multiplied before it is
    quantized; layout, of the scales, a name among `SCHEMES[scheme].layouts`; min_scale, the least dynamic scale,
    default that of the vLLM op replaced; data_width, columns of the codes, those past the hidden size 0;
    return_unquantized, to have y too, in x's dtype; tokens_per_expert (int32 or int64 [experts]), for activations
    [experts, tokens, ...] of which each expert uses its first few: the other rows are neither read nor written. The
    other options are the producer's. `None` is the default everywhere. Calls inside torch.compile go through the
    registered op.

    Raises ValueError for a value, TypeError for a type and NotImplementedError for a place it cannot run at, naming the
    argument, what came and what to do, before anything is launched or changed.
    """
    if torch.compiler.is_compiling():
        from tq.kernels.ops import call_op

        outputs = call_op(producer, arguments, scheme, options)
        return assemble(producer, arguments, find_scheme(producer.name, scheme), outputs, options)
    prepared = prepare_again(producer, arguments, scheme, options)
    run(prepared)
    return assemble(producer, arguments, prepared.plan.scheme, outputs_of(prepared), options)


def outputs_of(prepared: Prepared) -> list[torch.Tensor]:
    """Codes, scales and zero points if the scheme computes them, side outputs, y if it is wanted."""
    outputs = [
        prepared.codes,
        prepared.scales,
        prepared.zero_points,
        *prepared.bound.side_outputs,
        prepared.unquantized,
    ]
    return [output for output in outputs if output is not None]


def assemble(
    producer: Producer, arguments: tuple, scheme: Scheme, outputs: list[torch.Tensor], options: dict[str, Any]
) -> Any:
    """The outputs of an op as what `call` returns."""
    x, (codes, *rest) = arguments[0], outputs
    scale, zero_point = options.get("scale"), options.get("zero_point")
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
    )
    return (activation, *rest) if rest else activation
