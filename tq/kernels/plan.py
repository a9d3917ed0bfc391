"""Plans: what a call needs besides its tensors, checked once for all calls of one description.

A plan depends on the dtype, shape, strides, device and alignment of the arguments, and on the options; a call like an
earlier one skips the checks and Triton's own search for the compiled kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tq.kernels import tuning
from tq.kernels.experts import Experts
from tq.kernels.inputs import EXPERT_NAMES, INPUT_NAMES, SHARED_TENSORS, check_experts, check_inputs, check_width
from tq.kernels.layouts import Layout
from tq.kernels.producer import Bound, Producer, Replaced, constant
from tq.kernels.rules import ScaleInputs
from tq.kernels.schemes import SCHEMES, Scheme, find_scheme

MAX_PLANS = 8192  # one for each shape seen; a few hundred bytes each
MAX_RECENT = 8  # of a producer, which are compared with one after the other


class Plans(dict[tuple, "Plan"]):
    """Plans by description. recent: by producer, those of its last calls that can be launched again, the last first."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: dict[Producer, list[Plan]] = {}

    def clear(self) -> None:
        super().clear()
        self.recent.clear()

    def remember(self, plan: Plan) -> None:
        """Makes it the most recent one of its producer."""
        others = [each for each in self.recent.get(plan.producer, ()) if each is not plan]
        self.recent[plan.producer] = [plan, *others[: MAX_RECENT - 1]]


_plans = Plans()


@dataclass(eq=False)
class Plan:
    """One kind of call, checked. launch, again: what its first launch found, kept by `tq.kernels.launch`."""

    producer: Producer
    scheme: Scheme
    layout: Layout
    options: dict[str, Any]
    min_scale: float
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    rows: int
    hidden_size: int
    data_width: int
    experts: int
    with_offsets: bool
    per_expert: tl.constexpr
    return_unquantized: bool
    mean_group: int
    launch: Any = None
    again: Any = None

    @property
    def parts(self) -> int:
        """Scale tensors: one for each expert whose tokens have places of their own, else 0."""
        return 0 if self.with_offsets else self.experts

    @property
    def tokens(self) -> int:
        """Rows of one part, or all."""
        return self.shape[-2] if self.parts else self.rows

    @property
    def scale_rows(self) -> int:
        """Rows of one scale tensor: with offsets, as many as the experts can need, however the tokens fall."""
        if not self.with_offsets or not self.scheme.dynamic:
            return self.tokens
        return self.rows + self.experts * (self.layout.tile_rows - 1)

    @property
    def written_rows(self) -> int:
        """Rows of one part that the kernel goes through."""
        return self.layout.padded_rows(self.scale_rows) if self.scheme.dynamic else self.tokens

    @property
    def codes_shape(self) -> tuple[int, ...]:
        return *self.shape[:-1], self.data_width // self.scheme.code.per_byte


class Prepared(NamedTuple):
    """One call, checked and allocated, before its launch."""

    plan: Plan
    bound: Bound
    inputs: ScaleInputs
    arguments: tuple
    options: dict[str, Any]
    codes: torch.Tensor
    scales: torch.Tensor | None
    zero_points: torch.Tensor | None
    unquantized: torch.Tensor | None
    experts: Experts


@lru_cache
def replaced(producer: Producer, scheme: Scheme) -> Replaced:
    """The vLLM op this pair stands in for."""
    return producer.replaces(scheme)


def key_of(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> tuple:
    """What a plan depends on. The scheme and not its name: a name may be given to another one."""
    key: list[Any] = [producer, SCHEMES.get(scheme), tuning.forced(), *options]
    for value in (*arguments, *options.values()):
        if isinstance(value, torch.Tensor):
            key += value.dtype, value.shape, value.stride(), value.device, value.data_ptr() % 16
        else:
            key.append(value)
    return tuple(key)


def make_plan(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Plan:
    """Checks everything; allocates and launches nothing that lasts."""
    op = producer.name
    found = find_scheme(op, scheme)
    stands_for = replaced(producer, found)
    given = {name: value for name, value in options.items() if value is not None}
    inputs = {name: given.pop(name, None) for name in INPUT_NAMES}
    min_scale, data_width = given.pop("min_scale", None), given.pop("data_width", None)
    parted = Experts(*(given.pop(name, None) for name in EXPERT_NAMES))
    return_unquantized = given.pop("return_unquantized", False)
    layout = find_layout(op, found, given.pop("layout", None))
    bound = check_and_bind(producer, arguments, {**stands_for.options, **given})
    hidden_size = bound.shape[-1]
    unit = max(found.group, found.code.per_byte)
    if hidden_size % unit:
        raise ValueError(
            f"{op}: hidden size must be a multiple of {unit} for {found.name}, got {hidden_size}; "
            f"pad the activation or take a scheme without groups"
        )
    experts = check_experts(op, parted, bound, found.dynamic and layout.tile_rows > 1)
    least = check_inputs(op, found, stands_for, inputs, min_scale, hidden_size, bound.device, experts)
    sizes = {tensor.numel() for name, tensor in inputs.items() if name in found.rule.needs and tensor is not None}
    constants = {**stands_for.options, **{k: v for k, v in given.items() if not isinstance(v, torch.Tensor)}}
    rows = math.prod(bound.shape[:-1])  # Size.numel() would make a symbolic size a constant
    width = check_width(op, data_width, hidden_size, unit)
    return Plan(
        producer,
        found,
        layout,
        constants,
        least,
        bound.dtype,
        bound.device,
        bound.shape,
        rows,
        hidden_size,
        width,
        experts,
        parted.expert_offsets is not None,
        constant(any(size > 1 for size in sizes)),
        return_unquantized,
        bound.mean_group,
    )


def scales_of(plan: Plan) -> torch.Tensor:
    """Scales of a call, of a dynamic scheme."""
    # A kernel writes bytes; those of E4M3 scales get their dtype when they are handed out.
    dtype = plan.scheme.rule.stored if plan.scheme.rule.stored.itemsize > 1 else torch.uint8
    groups = plan.scheme.groups(plan.hidden_size)
    if plan.parts:
        return plan.layout.allocate_for_experts(plan.parts, plan.tokens, groups, dtype, plan.device)
    return plan.layout.allocate(plan.scale_rows, groups, dtype, plan.device)


def allocate(plan: Plan) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Codes, scales, zero points and y of a call, as far as it has them."""
    scheme, device = plan.scheme, plan.device
    codes = torch.empty(plan.codes_shape, dtype=torch.uint8, device=device)
    scales = zero_points = unquantized = None
    if scheme.dynamic:
        scales = scales_of(plan)
        if scheme.rule.zero_point:
            zero_points = torch.empty((plan.rows, 1), dtype=torch.int32, device=device)
    if plan.return_unquantized:
        unquantized = torch.empty(plan.shape, dtype=plan.dtype, device=device)
    return codes, scales, zero_points, unquantized


def fill(plan: Plan, arguments: tuple, options: dict[str, Any]) -> Prepared:
    """The call that `plan` describes, with these tensors and new outputs."""
    given = {k: v for k, v in options.items() if isinstance(v, torch.Tensor) and k not in SHARED_TENSORS}
    given = {**plan.options, **given}
    bound = plan.producer.bind(*arguments, **given)
    codes, scales, zero_points, unquantized = allocate(plan)
    inputs = ScaleInputs._make((*map(options.get, INPUT_NAMES), plan.min_scale, plan.per_expert))
    experts = Experts._make(map(options.get, EXPERT_NAMES))
    if experts.expert_offsets is not None and experts.scale_offsets is None:
        experts = experts._replace(scale_offsets=experts.expert_offsets)
    return Prepared(plan, bound, inputs, arguments, given, codes, scales, zero_points, unquantized, experts)


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


def prepare(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Prepared:
    """A call, checked and allocated. Launches nothing: it is also what the op's fake runs."""
    return fill(make_plan(producer, arguments, scheme, options), arguments, options)


def find_plan(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> Plan:
    """The plan of an earlier call of the same description, or a new one."""
    try:
        key = key_of(producer, arguments, scheme, options)
        plan = _plans.get(key)
    except TypeError:  # something that no call takes; the checks say what
        return make_plan(producer, arguments, scheme, options)
    if plan is None:
        plan = make_plan(producer, arguments, scheme, options)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def check_and_bind(producer: Producer, arguments: tuple, options: dict[str, Any]) -> Bound:
    """The producer's arguments, checked; a wrong name or number of arguments is a TypeError naming the op."""
    try:
        producer.check(*arguments, **options)  # type: ignore[misc]
        return producer.bind(*arguments, **options)
    except TypeError as error:
        if str(error).startswith(f"{producer.name}: "):
            raise
        raise TypeError(f"{producer.name}: arguments do not fit its signature: {error}") from None


def find_layout(op: str, scheme: Scheme, name: str | None) -> Layout:
    """The layout of a name among the scheme's; its first for None."""
    if name is None:
        return scheme.layouts[0]
    for layout in scheme.layouts:
        if layout.name == name:
            return layout
    known = ", ".join(layout.name for layout in scheme.layouts)
    raise ValueError(f"{op}: layout of {scheme.name} must be one of {known}; got {name!r}")
