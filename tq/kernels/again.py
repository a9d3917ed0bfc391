"""Calls like an earlier one: what differs is where the tensors lie, so only addresses are looked up and passed on.

Binding, views and strides follow from the description that a plan is kept by. They are worked out once, with stand-ins
on the meta device for the tensors of a call; every tensor that the kernel takes is then found to lie at some offset in
an argument, an option or an output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tq.kernels.plan import Plan, Prepared, allocate, fill

META = torch.device("meta")


class Again(NamedTuple):
    """How a compiled kernel is launched for another call of its plan.

    launch: the compiled kernel on its grid. names: options that are tensors. made: shapes and dtypes of the side
    outputs to be made. sides: places of the side outputs among the tensors. pointers: (place of a tensor, bytes from
    its start) of every address. build: addresses -> arguments of the kernel."""

    launch: Callable[..., Any]
    names: tuple[str, ...]
    made: tuple[tuple[torch.Size, torch.dtype], ...]
    sides: tuple[int, ...]
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


def learn(
    plan: Plan, launch: Callable[..., Any], arguments_of: Callable[[Prepared], tuple], arguments: tuple, options: dict
) -> Again:
    """The `Again` of a plan; arguments_of(prepared): what the kernel takes."""
    named = {name: stand_in(value) for name, value in options.items()}
    positional = tuple(map(stand_in, arguments))
    prepared = fill(replace(plan, device=META, launch=None), positional, named)
    names = tuple(name for name, value in named.items() if isinstance(value, torch.Tensor))
    outputs = [prepared.codes, prepared.scales, prepared.zero_points, prepared.unquantized]
    tensors = [*positional, *(named[name] for name in names), *outputs]
    places = {memory_of(tensor): i for i, tensor in enumerate(tensors) if isinstance(tensor, torch.Tensor)}
    made, sides = [], []
    for side in prepared.bound.side_outputs:
        if memory_of(side) not in places:
            places[memory_of(side)] = len(tensors)
            tensors.append(side)
            made.append((side.shape, side.dtype))
        sides.append(places[memory_of(side)])
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
    return Again(launch, names, tuple(made), tuple(sides), tuple(pointers), build)


def launch_again(plan: Plan, again: Again, arguments: tuple, options: dict[str, Any]) -> list[torch.Tensor]:
    """Makes the outputs, launches, and returns them in the order of `outputs_of`."""
    codes, scales, zero_points, unquantized = allocate(plan)
    made = [torch.empty(shape, dtype=dtype, device=plan.device) for shape, dtype in again.made]
    tensors = (*arguments, *[options[name] for name in again.names], codes, scales, zero_points, unquantized, *made)
    again.launch(*again.build([tensors[place].data_ptr() + offset for place, offset in again.pointers]))
    outputs = [codes, scales, zero_points, *[tensors[place] for place in again.sides], unquantized]
    return [output for output in outputs if output is not None]
