"""Calls like an earlier one: what differs is where the tensors lie, so only addresses are looked up and passed on.

Binding, views and strides follow from the description that a plan is kept by. They are worked out once, with stand-ins
on the meta device for the tensors of a call; every tensor that the kernel takes is then found to lie at some offset in
an argument, an option or an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel

from tq.kernels.plan import Plan, Prepared, fill, scales_of

META = torch.device("meta")


class Again(NamedTuple):
    """How a compiled kernel is launched for another call of its plan.

    launch: the compiled kernel on its grid. names: options that are tensors. make: makes one of the outputs each.
    make_final: the same, codes and scales in the dtypes that `tq.QuantizedActivation` has. results: places of the
    outputs in the order of `outputs_of`, among the tensors of a call: arguments, options, what was made. pointers:
    (place of a tensor, bytes from its start) of every address. build: addresses -> arguments of the kernel."""

    launch: Callable[..., Any]
    names: tuple[str, ...]
    make: tuple[Callable[[], torch.Tensor], ...]
    make_final: tuple[Callable[[], torch.Tensor], ...]
    results: tuple[int, ...]
    pointers: tuple[tuple[int, int], ...]
    build: Callable[[list[int]], tuple]


def stand_in(value: Any) -> Any:
    """A tensor's shape, strides and dtype in a memory of its own; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def memory_of(tensor: torch.Tensor) -> int:
    """What tells one memory from another, also where there is none."""
    return tensor.untyped_storage()._cdata


def launcher(compiled: Any, grid: tuple[int, int, int], device: torch.device) -> Callable[..., Any]:
    """compiled[grid] on `device`, the current one, without what Triton prepares for hooks where none is set."""
    launch = compiled[grid]
    if not isinstance(compiled, CompiledKernel) or device.type != "cuda":
        return launch
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream, index, hooks = torch._C._cuda_getCurrentRawStream, device.index, knobs.runtime

    def launch_directly(*arguments: Any) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            launch(*arguments)
        else:
            run(*grid, stream(index), function, metadata, None, None, None, *arguments)

    return launch_directly


def maker(plan: Plan, output: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Makes tensors like an output of `plan`, by one call into torch where nothing follows the last element."""
    shape, stride = output.shape, output.stride()
    if output.is_contiguous():
        return partial(torch.empty, shape, dtype=dtype, device=plan.device)
    end = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if end * output.element_size() == output.untyped_storage().nbytes():
        return partial(torch.empty_strided, shape, stride, dtype=dtype, device=plan.device)
    return lambda: scales_of(plan).view(dtype)


def learn(
    plan: Plan, launch: Callable[..., Any], arguments_of: Callable[[Prepared], tuple], arguments: tuple, options: dict
) -> Again:
    """The `Again` of a plan; arguments_of(prepared): what the kernel takes."""
    named = {name: stand_in(value) for name, value in options.items()}
    positional = tuple(map(stand_in, arguments))
    prepared = fill(replace(plan, device=META, launch=None), positional, named)
    names = tuple(name for name, value in named.items() if isinstance(value, torch.Tensor))
    tensors = [*positional, *(named[name] for name in names)]
    places = {memory_of(tensor): i for i, tensor in enumerate(tensors) if isinstance(tensor, torch.Tensor)}
    make, make_final, results = [], [], []
    final = {memory_of(prepared.codes): plan.scheme.code.torch_dtype}
    if prepared.scales is not None and prepared.scales.element_size() == 1:
        final[memory_of(prepared.scales)] = plan.scheme.rule.stored
    outputs = (
        prepared.codes,
        prepared.scales,
        prepared.zero_points,
        *prepared.bound.side_outputs,
        prepared.unquantized,
    )
    for output in (output for output in outputs if output is not None):
        memory = memory_of(output)
        if memory not in places:
            places[memory] = len(tensors)
            tensors.append(output)
            make.append(maker(plan, output, output.dtype))
            make_final.append(maker(plan, output, final.get(memory, output.dtype)))
        results.append(places[memory])
    pointers: list[tuple[int, int]] = []
    constants: list[Any] = []

    def expression(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            place = places[memory_of(value)]
            offset = int(value.storage_offset()) * value.element_size()
            pointers.append((place, offset))
            return f"p[{len(pointers) - 1}]"
        if isinstance(value, tuple):
            return f"({''.join(expression(each) + ',' for each in value)})"
        constants.append(value)
        return f"c[{len(constants) - 1}]"

    # The kernel's nested arguments as one expression: walking them for each call costs as much as launching.
    build = eval(f"lambda p, c=tuple(constants): {expression(arguments_of(prepared))}", {"constants": constants})
    return Again(launch, names, tuple(make), tuple(make_final), tuple(results), tuple(pointers), build)


def launch_again(again: Again, given: Sequence[Any], final: bool = False) -> list[torch.Tensor]:
    """Makes the outputs, launches, and returns them in the order of `outputs_of`.

    given: the arguments, then the options of `again.names`. final: makes them as `make_final` does."""
    tensors = [*given, *[make() for make in (again.make_final if final else again.make)]]
    again.launch(*again.build([tensors[place].data_ptr() + offset for place, offset in again.pointers]))
    return [tensors[place] for place in again.results]
