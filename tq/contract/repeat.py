"""A routed call like an earlier one: what decided the earlier one is compared, not decided again.

A call is decided by what was looked up (attributes of modules, of the kernel, of the adapter, and where they were
found) and by the description of its tensors. While all of it is as it was, the same compiled kernel runs on the tensors
of this call. Anything else, and any call that cannot be repeated (interpreted, observed, in `tq.use_reference`), takes
the whole way, so that a scale, a kernel or a layer replaced at any time is seen by the next call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tq.contract import boundaries
from tq.contract.boundaries import Boundary
from tq.contract.consumers import Reads, attach
from tq.contract.scales import ABSENT, Lookup, Seen
from tq.kernels import launch
from tq.kernels.again import Again, launch_again
from tq.kernels.plan import Plan, find_plan
from tq.kernels.producer import Producer

MAX_CALLS = 1024  # of one module: one for each number of tokens seen


def description(tensor: torch.Tensor) -> tuple:
    """What a plan knows of a tensor."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), tensor.data_ptr() % 16


class Call(NamedTuple):
    """One description of the input, and what ran for it.

    implementation: what the plain module would have run. tensors: of the call, by place (see `Again`), after x, which
    is the first. residuals: places of the residual. fixed: the others, with address, dtype and shape. scale,
    zero_point: static ones, `None` where the kernel computes them. computed: how many of the two it computes. linear:
    the consumer, to whom the activation is attached where y has other readers.
    """

    plan: Plan
    again: Again
    reads: Reads
    implementation: Any
    tensors: tuple[Any, ...]
    residuals: tuple[int, ...]
    fixed: tuple[tuple[torch.Tensor, int, torch.dtype, torch.Size], ...]
    scale: torch.Tensor | None
    zero_point: torch.Tensor | None
    computed: int
    linear: Any


class Repeats:
    """Calls of one routed module, by the description of their input."""

    def __init__(self, adapter: Any, producer: Producer, boundary: Boundary) -> None:
        self.adapter, self.producer, self.boundary = adapter, producer, boundary
        self.lookups: tuple[Lookup, ...] = ()
        self.calls: dict[tuple, Call] = {}

    def run(self, x: Any, residual: torch.Tensor | None) -> Any:
        """The result of the module, or `None` where the call must be decided anew."""
        if type(x) is not torch.Tensor or boundaries.observers:
            return None
        call = self.calls.get((description(x), None if residual is None else description(residual)))
        if call is None or not launch.repeats(call.plan):
            return None
        if not self._holds(call, residual is not None):
            self.calls.clear()
            return None
        tensors = [x, *call.tensors]
        for place in call.residuals:
            tensors[place] = residual
        made = launch_again(call.again, tensors, final=True)
        scale, zero_point = call.scale, call.zero_point
        if call.computed:
            scale = made[1]
            zero_point = made[2] if call.computed > 1 else None
        self.boundary.calls += 1
        activation = self.adapter.wrap(call.reads, made[0], scale, x.dtype, call.plan.shape, zero_point)
        if call.plan.return_unquantized:
            activation = attach(made[-1], call.linear, activation)
        return activation if residual is None else (activation, made[1 + call.computed])

    def _holds(self, call: Call, has_residual: bool) -> bool:
        """Whether everything that was looked up is where it was, and lies in the same memory."""
        for table, name, found in self.lookups:
            if table.get(name, ABSENT) is not found:
                return False
        for tensor, address, dtype, shape in call.fixed:  # a parameter can be given other data and stay the same object
            if tensor.data_ptr() != address or tensor.dtype is not dtype or tensor.shape != shape:
                return False
        return self.adapter.implementation(self.producer.name, has_residual) == call.implementation

    def learn(
        self,
        seen: Seen,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        linear: Any,
        reads: Reads,
        args: tuple,
        options: dict[str, Any],
    ) -> None:
        """Keep a call that was just made, producer(*args, **options), where args[0] is x."""
        options = dict(options)
        plan = find_plan(self.producer, args, options.pop("scheme"), options)
        if seen.incomplete or type(x) is not torch.Tensor or not launch.repeats(plan):
            return
        lookups = tuple(seen.lookups.values())
        known = zip(lookups, self.lookups, strict=False)
        same = len(lookups) == len(self.lookups)
        same = same and all(a[0] is b[0] and a[1] == b[1] and a[2] is b[2] for a, b in known)
        if not same or len(self.calls) >= MAX_CALLS:
            self.calls.clear()
            self.lookups = lookups
        tensors = (*args[1:], *[options[name] for name in plan.again.names])
        theirs = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor is not residual]
        dynamic = plan.scheme.dynamic
        self.calls[description(x), None if residual is None else description(residual)] = Call(
            plan,
            plan.again,
            reads,
            self.adapter.implementation(self.producer.name, residual is not None),
            tensors,
            tuple(i for i, tensor in enumerate(tensors, 1) if residual is not None and tensor is residual),
            tuple((tensor, tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in theirs),
            None if dynamic else options["scale"],
            options.get("zero_point"),
            dynamic + (dynamic and plan.scheme.rule.zero_point),
            linear,
        )
