"""torch.library ops: `tq::<producer>` for every registered producer, so that torch.compile sees one opaque call.

    tq::<name>(<parameters of bind>, *, str scheme, <common options>) -> Tensor[]
    tq::<name>_out(..., Tensor(a!) <mutated>) -> (Tensor codes, Tensor scales)

The list holds the codes, the scales of a dynamic scheme, and the side outputs. The second form exists for a producer
that can write into a given tensor; an op that mutates cannot return a list, so its scales are empty if there are none.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tq.kernels.launch import outputs_of, run
from tq.kernels.plan import Prepared, prepare, prepare_again
from tq.kernels.producer import Producer
from tq.kernels.schemes import find_scheme

COMMON = "str scheme, Tensor? scale=None, Tensor? scale_ub=None, str? layout=None, float? min_scale=None"
COMMON_NAMES = ("scale", "scale_ub", "layout", "min_scale")
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
    return f"({', '.join(positional)}, *, {', '.join([*keyword, COMMON])})"


def outputs_of_mutating(prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales; the side outputs are the caller's."""
    scales = prepared.scales
    if scales is None:
        scales = torch.empty(0, dtype=torch.float32, device=prepared.plan.device)
    return prepared.codes, scales


def register_op(producer: Producer) -> None:
    """Defines and implements the ops of a producer. The fake is the implementation without its launch."""
    forms: list[tuple[str, tuple[str, ...], str, Any]] = [(producer.name, (), "Tensor[]", outputs_of)]
    if producer.mutates:
        forms.append((f"{producer.name}_out", producer.mutates, "(Tensor, Tensor)", outputs_of_mutating))
    for name, mutated, returns, collect in forms:
        _library.define(f"{name}{schema_of(producer, mutated)} -> {returns}")

        def implementation(*arguments: Any, scheme: str, _collect: Any = collect, **options: Any) -> Any:
            prepared = prepare_again(producer, arguments, scheme, options)
            run(prepared)
            return _collect(prepared)

        def fake(*arguments: Any, scheme: str, _collect: Any = collect, **options: Any) -> Any:
            return _collect(prepare(producer, arguments, scheme, options))

        _library.impl(name, implementation, "CUDA")
        _library.impl(name, implementation, "CPU")
        torch.library.register_fake(f"tq::{name}", fake, lib=_library)


def call_op(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """The op's outputs in the order of `outputs_of`, from inside a traced function."""
    mutated = [options[name] for name in producer.mutates if options.get(name) is not None]
    given = {name: value for name, value in options.items() if value is not None}
    if not mutated:
        return list(getattr(torch.ops.tq, producer.name)(*arguments, scheme=scheme, **given))
    codes, scales = getattr(torch.ops.tq, f"{producer.name}_out")(*arguments, scheme=scheme, **given)
    return [codes, *([scales] if find_scheme(producer.name, scheme).dynamic else []), *mutated]
