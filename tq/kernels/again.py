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
from tq.kernels.experts import Experts
from tq.kernels.plan import Plan, Prepared, fill, outputs_of, scales_of

META = torch.device("meta")


class Again(NamedTuple):
    """How a compiled kernel is launched for another call of its plan.

    call: (arguments, options) -> what the producer returns, or `None` where the call is of another description or its
    device not the current one. run: makes the outputs, launches, and returns them in the order of `outputs_of`; it
    takes the arguments, then the options of `names`, those that are tensors. run_final: the same, codes and scales in
    the dtypes that `tq.QuantizedActivation` has."""

    call: Callable[[tuple, dict[str, Any]], Any]
    run: Callable[..., tuple]
    run_final: Callable[..., tuple]
    names: tuple[str, ...]


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


def different(variable: str, pointer: str, tensor: torch.Tensor, text: Text) -> Iterator[str]:
    """What is true of a tensor that needs another plan than this one; the stride of a single element may be any. Its
    address is kept."""
    yield f"{variable}.shape != {text.name(tensor.shape)}"
    yield f"{variable}.dtype is not {text.name(tensor.dtype)}"
    yield f"{variable}.get_device() != {tensor.get_device()}"
    yield f"({pointer} := {variable}.data_ptr()) & 15 != {tensor.data_ptr() & 15}"
    if tensor.is_contiguous():
        yield f"{variable}.is_contiguous() is False"
    else:
        yield f"{variable}.stride() != {text.name(tensor.stride())}"


def write_tests(text: Text, values: dict[str, Any]) -> dict[str, str]:
    """Returns `None` unless the variables are like `values`: of the same types, the tensors of the same dtype, shape,
    strides, device and alignment, all else equal. The variables of the addresses, by that of the tensor."""
    tests, pointers, first = list[str](), dict[str, str](), dict[int, str]()
    for variable, value in values.items():  # the quickest first
        if value is None:
            tests.append(f"{variable} is not None")
        elif not isinstance(value, torch.Tensor):
            tests.append(f"type({variable}) is not {text.name(type(value))} or {variable} != {text.name(value)}")
        elif id(value) in first:  # a residual that is written in place
            tests.append(f"{variable} is not {first[id(value)]}")
            pointers[variable] = pointers[first[id(value)]]
        else:
            tests.append(f"not isinstance({variable}, {text.name(torch.Tensor)})")
            first[id(value)], pointers[variable] = variable, f"p{variable}"
    for variable in first.values():
        tests += different(variable, pointers[variable], values[variable], text)
    text.add(f"if {' or '.join(tests)}:")
    text.add("    return None")
    return pointers


def write_activation(text: Text, plan: Plan, outputs: list[str], given: dict[str, str]) -> None:
    """Returns what `tq.kernels.launch.call` does. given: variables of the options."""
    data, *rest = outputs
    tensors: dict[str, str] = {
        name: given[name] for name in ("scale", "zero_point", "global_scale_inv") if name in given
    }
    tensors["data"] = data
    if plan.scheme.dynamic:
        tensors["scale"] = rest.pop(0)
        if plan.scheme.rule.zero_point:
            tensors["zero_point"] = rest.pop(0)
    if plan.experts:
        tensors["experts"] = (
            f"{text.name(Experts)}({', '.join(f'{n}={given[n]}' for n in Experts._fields if n in given)})"
        )
    constants = plan.dtype, plan.shape, plan.scheme.name, plan.layout.name
    fields = vars(QuantizedActivation(None, None, *constants))  # type: ignore[arg-type]
    # As `QuantizedActivation(...)` would, which sets the fields of a frozen class one by one: as long as two launches.
    text.add(f"activation = {text.name(object.__new__)}({text.name(QuantizedActivation)})")
    text.add("fields = activation.__dict__")
    text.add(f"fields.update({text.name(fields)})")
    for name, variable in tensors.items():
        text.add(f"fields[{name!r}] = {variable}")
    text.add(f"return {', '.join(['activation', *rest])}")


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
    taken = [f"t{i}" for i in range(len(arguments))]
    given = {name: f"o{i}" for i, name in enumerate(options)}
    variables = [*taken, *map(given.__getitem__, names)]
    stand_ins = zip(variables, [*positional, *map(named.__getitem__, names)], strict=True)
    known = {memory_of(value): variable for variable, value in stand_ins if isinstance(value, torch.Tensor)}
    final = {memory_of(prepared.codes): plan.scheme.code.torch_dtype}
    if prepared.scales is not None and prepared.scales.element_size() == 1:
        final[memory_of(prepared.scales)] = plan.scheme.rule.stored

    def write(text: Text, dtypes: dict[int, torch.dtype], pointers: dict[str, str]) -> list[str]:
        """Makes the outputs, by their variables, and launches. pointers: addresses that are known."""
        places = dict(known)
        outputs = outputs_of(prepared)
        for output in outputs:
            memory = memory_of(output)
            if memory not in places:
                places[memory] = f"m{len(places)}"
                write_output(text, places[memory], plan, output, dtypes.get(memory, output.dtype))

        def expression(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                variable = places[memory_of(value)]
                offset = int(value.storage_offset()) * value.element_size()
                return pointers.get(variable, f"{variable}.data_ptr()") + (f" + {offset}" if offset else "")
            if isinstance(value, tuple) and has_tensors(value):
                return f"({''.join(expression(each) + ', ' for each in value)})"
            return text.name(plain(value))

        write_launch(text, compiled, grid, plan.device, ", ".join(map(expression, arguments_of(prepared))))
        return [places[memory_of(output)] for output in outputs]

    def write_run(dtypes: dict[int, torch.dtype]) -> Callable[..., tuple]:
        text = Text(f"def run({', '.join(variables)}):")
        text.add(f"return {''.join(f'{output}, ' for output in write(text, dtypes, {}))}")
        return text.function()

    text = Text("def call(arguments, options):")
    text.add(f"if len(arguments) != {len(arguments)} or len(options) != {len(options)}:")
    text.add("    return None")
    text.add("".join(f"{variable}, " for variable in taken) + "= arguments")
    text.add("try:")
    for name, variable in given.items():
        text.add(f"    {variable} = options[{name!r}]")
    text.add("    pass")
    text.add("except KeyError:")
    text.add("    return None")
    pointers = write_tests(
        text, {**dict(zip(taken, arguments, strict=True)), **{given[k]: v for k, v in options.items()}}
    )
    text.add(f"if {text.keep(torch.cuda)}.current_device() != {plan.device.index}:")
    text.add("    return None")
    write_activation(text, plan, write(text, final, pointers), given)
    return Again(text.function(), write_run({}), write_run(final), names)


def launch_again(again: Again, given: Sequence[Any], final: bool = False) -> Sequence[torch.Tensor]:
    """The outputs of a call, launched. given: see `Again`. final: as `run_final` makes them."""
    return (again.run_final if final else again.run)(*given)
