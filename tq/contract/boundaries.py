"""What was fused, what was not and why, and a way to watch fused calls."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

Observer = Callable[[str, str, tuple[Any, ...], dict[str, Any], Any], None]


@dataclass
class Boundary:
    """One place where a producer feeds a linear layer.

    name: module name of the producer, such as "model.layers.0.input_layernorm".
    producer: name in `tq.PRODUCERS`, or of the module's class where there is none. consumer: module name of the linear
    layer, "" where it is not known. shares: other modules that read the output, and so get it unquantized.
    kernel: class that runs it. scheme: name in `tq.SCHEMES`, and layout, of its scales, `None` when not fused.
    reason: why not fused, `None` when fused.
    calls: fused calls run by Python; compiled code and graph replays do not pass through Python.
    """

    name: str
    producer: str
    consumer: str
    shares: tuple[str, ...] = ()
    kernel: str | None = None
    scheme: str | None = None
    layout: str | None = None
    reason: str | None = None
    calls: int = 0


@dataclass
class State:
    """A layer whose recurrent states are rounded, or kept packed.

    name: of its quantizer, such as "model.layers.0.linear_attn.gdn_state_quantizer". reason: why batches of decodes
    alone are rounded by a pass of their own; `None` where the decode step does it, and for packed states.
    """

    name: str
    code: str
    granularity: str
    packed: bool = False
    reason: str | None = None

    @property
    def outcome(self) -> str:
        if self.packed:
            return "kept packed"
        return "rounded inside the decode step" if self.reason is None else f"rounded before: {self.reason}"


@dataclass(frozen=True)
class Report:
    """Snapshot of all boundaries and rounded states of the live models. disabled: why nothing is fused in this process,
    or `None`."""

    boundaries: tuple[Boundary, ...]
    disabled: str | None = None
    states: tuple[State, ...] = ()

    @property
    def total(self) -> int:
        return len(self.boundaries)

    @property
    def fused(self) -> int:
        return sum(boundary.reason is None for boundary in self.boundaries)

    @property
    def calls(self) -> int:
        return sum(boundary.calls for boundary in self.boundaries)

    def __str__(self) -> str:
        lines = [f"{self.fused} of {self.total} boundaries fused" + (f" ({self.disabled})" if self.disabled else "")]
        for boundary in self.boundaries:
            outcome = f"not fused: {boundary.reason}"
            if boundary.reason is None:
                outcome = f"{boundary.scheme}, {boundary.layout} scales, {boundary.kernel}"
                outcome += f"; unquantized too, for {', '.join(boundary.shares)}" if boundary.shares else ""
            lines.append(f"{boundary.name} -> {boundary.consumer or '?'} [{boundary.producer}] {outcome}")
        lines += [f"{state.name} [{state.code} {state.granularity}] {state.outcome}" for state in self.states]
        return "\n".join(lines)


observers: list[Observer] = []
_models: weakref.WeakKeyDictionary[torch.nn.Module, list[Boundary]] = weakref.WeakKeyDictionary()
_states: weakref.WeakKeyDictionary[torch.nn.Module, list[State]] = weakref.WeakKeyDictionary()
_disabled: str | None = None


def report(model: torch.nn.Module | None = None) -> Report:
    """Boundaries and rounded states of `model`, or of all models loaded in this process, with the reason for each that
    is not fused.

    vLLM's models live in its workers: ask there, with `llm.apply_model(tq.contract.report)`.
    """
    every = list(dict.fromkeys([*_models, *_states]))
    models = [model] if model in every else every
    states = tuple(replace(state) for known in models for state in _states.get(known, ()))
    return Report(tuple(replace(each) for known in models for each in _models.get(known, ())), _disabled, states)


@contextmanager
def observe(callback: Observer) -> Iterator[None]:
    """Within the context, call `callback(name, producer, args, kwargs, result)` after each fused eager call.

    args and kwargs are those given to `tq.<producer>`; a residual is the one before the addition. Compiled code and
    graph capture are not observed. The callback must not change the tensors.
    """
    observers.append(callback)
    try:
        yield
    finally:
        observers.remove(callback)


def record(model: torch.nn.Module, boundaries: list[Boundary]) -> None:
    _models[model] = boundaries


def record_states(model: torch.nn.Module, states: list[State]) -> None:
    _states[model] = states


def switched_off(*names: str) -> bool:
    """Whether a pattern of `TQ_DISABLE_BOUNDARIES` (comma-separated, as in fnmatch) fits one of the names."""
    patterns = os.environ.get("TQ_DISABLE_BOUNDARIES", "").split(",")
    return any(fnmatchcase(name, pattern.strip()) for name in names for pattern in patterns if pattern.strip())


def disable(reason: str | None) -> None:
    global _disabled
    _disabled = reason


def called(boundary: Boundary | None, producer: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Count one fused eager call and tell the observers."""
    if boundary is not None:
        boundary.calls += 1
    if not observers or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return
    for callback in tuple(observers):
        callback(boundary.name if boundary is not None else "", producer, args, kwargs, out)


def summary(boundaries: list[Boundary]) -> str:
    """'2 of 3 boundaries fused (rms_norm 2); not fused: 1 (<reason>)'"""
    if not boundaries:
        return "no boundaries fused: no layer of the model is a known one"
    counts = Counter(boundary.producer for boundary in boundaries if boundary.reason is None)
    reasons = Counter(boundary.reason for boundary in boundaries if boundary.reason is not None)
    detail = ", ".join(f"{producer} {count}" for producer, count in sorted(counts.items()))
    text = f"{sum(counts.values())} of {len(boundaries)} boundaries fused" + (f" ({detail})" if detail else "")
    return text + "".join(f"; not fused: {count} ({reason})" for reason, count in reasons.most_common())


def states_summary(model: str, states: tuple[State, ...]) -> str:
    """'states in 3 layers of <model>: 2 rounded inside the decode step, 1 rounded before: <reason>'"""
    counts = Counter(state.outcome for state in states)
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    return f"states in {len(states)} layers of {model}" + (f": {outcomes}" if outcomes else "")
