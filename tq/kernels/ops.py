"""torch.library ops: `tq::<producer>` for every registered producer, so that torch.compile sees one opaque call.

    tq::<name>(<parameters of bind>, *, str scheme, <common options>) -> Tensor[]
    tq::<name>_out(..., Tensor(a!) <mutated>) -> (Tensor codes, Tensor scales, Tensor zero points, Tensor y)

The list holds the codes, the scales and zero points that the scheme computes, the side outputs, and y if it is wanted.
The second form exists for a producer that can write into a given tensor; an op that mutates cannot return a list, so
what there is none of is empty."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from tq.kernels.launch import execute
from tq.kernels.plan import Plan, outputs_of, prepare
from tq.kernels.producer import Producer
from tq.kernels.schemes import find_scheme

COMMON = {
    "scale": "Tensor",
    "scale_ub": "Tensor",
    "zero_point": "Tensor",
    "smooth_scale": "Tensor",
    "global_scale_inv": "Tensor",
    "tokens_per_expert": "Tensor",
    "expert_offsets": "Tensor",
    "scale_offsets": "Tensor",
    "layout": "str",
    "min_scale": "float",
    "data_width": "int",
    "return_unquantized": "bool",
}
TYPES = {"Tensor": "Tensor", "float": "float", "int": "int", "bool": "bool", "str": "str"}

_library = torch.library.Library("tq", "FRAGMENT")


def schema_of(producer: Producer, mutated: tuple[str, ...]) -> str:
    """The schema of the op, from the signature of `bind`: positional parameters are required, though one annotated
    `| None` may be None, as options may."""
    positional, keyword = [], []
    for name, parameter in inspect.signature(producer.bind).parameters.items():
        annotation, *optional = str(parameter.annotation).replace("torch.", "").split(" | ")
        if annotation not in TYPES:
            known = ", ".join(TYPES)
            raise TypeError(f"{producer.name}: parameter {name} of bind must be one of {known}, got {annotation}")
        if name in mutated:
            keyword.append(f"Tensor({chr(ord('a') + mutated.index(name))}!) {name}")
        elif name in producer.mutates:
            continue
        elif parameter.kind is parameter.KEYWORD_ONLY:
            keyword.append(f"{TYPES[annotation]}? {name}=None")
        elif parameter.default is parameter.empty:
            positional.append(f"{TYPES[annotation]}{'?' if optional else ''} {name}")
        else:
            positional.append(f"{TYPES[annotation]} {name}={parameter.default}")
    common = [f"{kind}? {name}=None" for name, kind in COMMON.items()]
    return f"({', '.join(positional)}, *, {', '.join([*keyword, 'str scheme', *common])})"


def all_of(plan: Plan, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs as an op returns them."""
    return outputs


def all_but_mutated(plan: Plan, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Codes, scales, zero points and y; the side outputs are the caller's."""
    codes, *rest = outputs
    nothing = partial(torch.empty, 0, dtype=torch.float32, device=plan.device)
    wanted = plan.scheme.dynamic, plan.scheme.dynamic and plan.scheme.rule.zero_point
    computed = [rest.pop(0) if there else nothing() for there in wanted]
    return codes, *computed, rest[-1] if plan.return_unquantized else nothing()


def register_op(producer: Producer) -> None:
    """Defines and implements the ops of a producer. The fake is the implementation without its launch."""
    forms: list[tuple[str, tuple[str, ...], str, Any]] = [(producer.name, (), "Tensor[]", all_of)]
    if producer.mutates:
        forms.append((f"{producer.name}_out", producer.mutates, "(Tensor, Tensor, Tensor, Tensor)", all_but_mutated))
    for name, mutated, returns, collect in forms:
        _library.define(f"{name}{schema_of(producer, mutated)} -> {returns}")

        def implementation(*arguments: Any, scheme: str, _collect: Any = collect, **options: Any) -> Any:
            return _collect(*execute(producer, arguments, scheme, options))

        def fake(*arguments: Any, scheme: str, _collect: Any = collect, **options: Any) -> Any:
            prepared = prepare(producer, arguments, scheme, options)
            return _collect(prepared.plan, outputs_of(prepared))

        _library.impl(name, implementation, "CUDA")
        _library.impl(name, implementation, "CPU")
        torch.library.register_fake(f"tq::{name}", fake, lib=_library)


def call_op(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """The op's outputs in the order of `outputs_of`, from inside a traced function."""
    mutated = [options[name] for name in producer.mutates if options.get(name) is not None]
    given = {name: value for name, value in options.items() if value is not None}
    if not mutated:
        return list(getattr(torch.ops.tq, producer.name)(*arguments, scheme=scheme, **given))
    codes, scales, zero_points, y = getattr(torch.ops.tq, f"{producer.name}_out")(*arguments, scheme=scheme, **given)
    found = find_scheme(producer.name, scheme)
    wanted = found.dynamic, found.dynamic and found.rule.zero_point
    computed = [output for output, there in zip((scales, zero_points), wanted, strict=True) if there]
    return [codes, *computed, *mutated, *([y] if options.get("return_unquantized") else [])]
