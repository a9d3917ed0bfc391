"""Calls like an earlier one: what differs is where the tensors lie, so only addresses are looked up and passed on.

Binding, views and strides follow from the description that a plan is kept by. They are worked out once, with stand-ins
on the meta device for the tensors of a call; every tensor that the kernel takes is then found to lie at some offset in
an argument, an option or an output. What is left to do is written down as Python, each plan a function of its own:
walking descriptions and the kernel's nested arguments would cost more than the launch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.compiler import CompiledKernel

from tq.activation import QuantizedActivation
from tq.kernels.plan import Plan, Prepared, fill, scales_of

META = torch.device("meta")


class Again(NamedTuple):
    """How a compiled kernel is launched for another call of its plan.

    match: (arguments, options) -> what `run` takes, or `None` where the call is of another description. run: makes the
    outputs, launches, and returns them in the order of `outputs_of`; it takes the arguments, then the options of
    `names`, those that are tensors. run_final: the same, codes and scales in the dtypes that `tq.QuantizedActivation`
    has. fields: of the activation, in its order; those that are tensors are `None`."""

    match: Callable[[tuple, dict[str, Any]], tuple | None]
    run: Callable[..., tuple]
    run_final: Callable[..., tuple]
    names: tuple[str, ...]
    fields: dict[str, Any]


class Text:
    """Python that is written line by line, and the values in it by name."""

    def __init__(self, head: str) -> None:
        self.lines, self.values = [head], dict[str, Any]()

    def keep(self, value: Any) -> str:
        """A name for `value`."""
        self.values[f"v{len(self.values)}"] = value
        return f"v{len(self.values) - 1}"

    def name(self, value: Any) -> str:
        """The same; `None` and integers as they are."""
        return repr(value) if value is None or type(value) in (bool, int) else self.keep(value)

    def add(self, line: str) -> None:
        """The next line of the function."""
        self.lines.append("    " + line)

    def function(self) -> Any:
        """The function that was written."""
        exec("\n".join(self.lines), self.values)
        return self.values[self.lines[0].split("(")[0].removeprefix("def ")]


def stand_in(value: Any) -> Any:
    """A tensor's shape, strides and dtype in a memory of its own; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def has_tensors(value: Any) -> bool:
    """Whether a tensor is in a tuple of tuples."""
    return any(map(has_tensors, value)) if isinstance(value, tuple) else isinstance(value, torch.Tensor)


def plain(value: Any) -> Any:
    """Named tuples as tuples, which Triton's launcher takes apart in a third of the time."""
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def memory_of(tensor: torch.Tensor) -> int:
    """What tells one memory from another, also where there is none."""
    return tensor.untyped_storage()._cdata


def write_launch(text: Text, compiled: Any, grid: tuple[int, int, int], device: torch.device, arguments: str) -> None:
    """compiled[grid](*arguments) on `device`, the current one, without what Triton prepares for hooks where none is
    set, and without its launcher in Python where that only passes on what it is given."""
    usual = f"{text.keep(compiled[grid])}({arguments})"
    if not isinstance(compiled, CompiledKernel) or device.type != "cuda":
        text.add(usual)
        return
    run, given = compiled.run, [*grid, STREAM, compiled.function, compiled.packed_metadata, None, None, None]
    launch, before, packed = passed_on(run, given)
    stream = f"{text.name(torch._C._cuda_getCurrentRawStream)}({device.index})"
    values = ", ".join(stream if value is STREAM else text.name(value) for value in before)
    hooks = text.name(knobs.runtime)
    text.add(f"enter, leave = {hooks}.launch_enter_hook, {hooks}.launch_exit_hook")
    text.add("if getattr(enter, 'calls', enter) or getattr(leave, 'calls', leave):")
    text.add(f"    {usual}")
    text.add("else:")
    text.add(f"    {text.name(launch)}({values}, {f'({arguments},)' if packed else arguments})")


STREAM, ARGUMENT = object(), object()  # stand for those of a call


def passed_on(run: Any, given: list[Any]) -> tuple[Callable[..., Any], list[Any], bool]:
    """What Triton's launcher `run` calls, what it passes on before the kernel's arguments, and whether those are in a
    tuple: `run` itself with what it is given, unless it has nothing to add that differs from call to call."""
    seen: list[tuple] = []
    if getattr(run, "global_scratch_size", 1) == getattr(run, "profile_scratch_size", 1) == 0 and hasattr(
        run, "launch"
    ):
        probe = copy.copy(run)
        probe.launch = lambda *passed: seen.append(passed)
        probe(*given, ARGUMENT)
    for *before, last in seen:
        if before.count(STREAM) == 1 and (last is ARGUMENT or last == (ARGUMENT,)):
            return run.launch, before, last is not ARGUMENT
    return run, given, False


def write_output(text: Text, variable: str, plan: Plan, output: torch.Tensor, dtype: torch.dtype) -> None:
    """A tensor like an output of `plan`, by one call into torch where nothing follows the last element."""
    shape, stride = output.shape, output.stride()
    end = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if end * output.element_size() == output.untyped_storage().nbytes():  # which torch.empty takes longer for
        make, *values = map(text.name, (torch.empty_strided, tuple(shape), stride, dtype, plan.device))
        text.add(f"{variable} = {make}({values[0]}, {values[1]}, dtype={values[2]}, device={values[3]})")
    else:
        text.add(f"{variable} = {text.name(lambda: scales_of(plan).view(dtype))}()")


def different(tensor: torch.Tensor, name: Callable[[Any], str]) -> Iterator[str]:
    """What is true of tensors that need another plan than this one; a stride of one element may be any."""
    yield f"shape != {name(tensor.shape)}"
    yield f"dtype is not {name(tensor.dtype)}"
    yield f"get_device() != {tensor.get_device()}"
    yield f"data_ptr() & 15 != {tensor.data_ptr() & 15}"
    if tensor.is_contiguous():
        yield "is_contiguous() is False"
    else:
        yield f"stride() != {name(tensor.stride())}"


def write_match(arguments: tuple, options: dict[str, Any], names: Sequence[str]) -> Callable[..., Any]:
    """The `match` of calls like this one: the same types, values, and dtype, shape, strides, device and alignment of
    tensors."""
    text = Text("def match(arguments, options):")
    values = {f"t{i}": value for i, value in enumerate(arguments)}
    given = {name: f"o{i}" for i, name in enumerate(options)}
    values |= {given[name]: value for name, value in options.items()}
    text.add(f"if len(arguments) != {len(arguments)} or len(options) != {len(options)}:")
    text.add("    return None")
    text.add("".join(f"t{i}, " for i in range(len(arguments))) + "= arguments")
    if options:
        text.add("try:")
        for name, variable in given.items():
            text.add(f"    {variable} = options[{name!r}]")
        text.add("except KeyError:")
        text.add("    return None")
    tests: list[str] = []
    first: dict[int, str] = {}
    for variable, value in values.items():  # the quickest first
        if value is None:
            tests.append(f"{variable} is not None")
        elif isinstance(value, torch.Tensor) and id(value) in first:  # a residual that is written in place
            tests.append(f"{variable} is not {first[id(value)]}")
        elif isinstance(value, torch.Tensor):
            tests.append(f"not isinstance({variable}, {text.name(torch.Tensor)})")
            first[id(value)] = variable
        else:
            tests.append(f"type({variable}) is not {text.name(type(value))}")
    for variable, value in values.items():
        if variable in first.values():
            tests += [f"{variable}.{what}" for what in different(value, text.name)]
        elif value is not None and not isinstance(value, torch.Tensor):
            tests.append(f"{variable} != {text.name(value)}")
    text.add(f"if {' or '.join(tests)}:")
    text.add("    return None")
    text.add(
        "return " + "".join(f"{variable}, " for variable in [*list(values)[: len(arguments)], *map(given.get, names)])
    )
    return text.function()


def learn(
    plan: Plan,
    compiled: Any,
    grid: tuple[int, int, int],
    arguments_of: Callable[[Prepared], tuple],
    arguments: tuple,
    options: dict[str, Any],
) -> Again:
    """The `Again` of a plan; arguments_of(prepared): what the kernel takes."""
    named = {name: stand_in(value) for name, value in options.items()}
    positional = tuple(map(stand_in, arguments))
    prepared = fill(replace(plan, device=META, launch=None), positional, named)
    names = tuple(name for name, value in named.items() if isinstance(value, torch.Tensor))
    given = [*positional, *(named[name] for name in names)]
    variables = [f"t{i}" for i in range(len(given))]
    known = {memory_of(tensor): variables[i] for i, tensor in enumerate(given) if isinstance(tensor, torch.Tensor)}
    outputs = [
        output
        for output in (
            prepared.codes,
            prepared.scales,
            prepared.zero_points,
            *prepared.bound.side_outputs,
            prepared.unquantized,
        )
        if output is not None
    ]
    final = {memory_of(prepared.codes): plan.scheme.code.torch_dtype}
    if prepared.scales is not None and prepared.scales.element_size() == 1:
        final[memory_of(prepared.scales)] = plan.scheme.rule.stored

    def write(dtypes: dict[int, torch.dtype]) -> Callable[..., tuple]:
        text, places = Text(f"def run({', '.join(variables)}):"), dict(known)
        for output in outputs:
            memory = memory_of(output)
            if memory not in places:
                places[memory] = f"t{len(variables) + len(places)}"
                write_output(text, places[memory], plan, output, dtypes.get(memory, output.dtype))

        def expression(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                offset = int(value.storage_offset()) * value.element_size()
                return f"{places[memory_of(value)]}.data_ptr()" + (f" + {offset}" if offset else "")
            if isinstance(value, tuple) and has_tensors(value):
                return f"({''.join(expression(each) + ', ' for each in value)})"
            return text.name(plain(value))

        write_launch(text, compiled, grid, plan.device, ", ".join(map(expression, arguments_of(prepared))))
        text.add("return " + "".join(f"{places[memory_of(output)]}, " for output in outputs))
        return text.function()

    constants = plan.dtype, plan.shape, plan.scheme.name, plan.layout.name
    fields = vars(QuantizedActivation(None, None, *constants))  # type: ignore[arg-type]
    return Again(write_match(arguments, options, names), write({}), write(final), names, fields)


def launch_again(again: Again, given: Sequence[Any], final: bool = False) -> Sequence[torch.Tensor]:
    """The outputs of a call, launched. given: see `Again`. final: as `run_final` makes them."""
    return (again.run_final if final else again.run)(*given)
