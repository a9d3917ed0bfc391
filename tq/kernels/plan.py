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

from tq.kernels import tuning
from tq.kernels.layouts import Layout
from tq.kernels.producer import INPUT_DTYPES, MAX_HIDDEN_SIZE, Bound, Producer, Replaced, check_like
from tq.kernels.rules import ScaleInputs
from tq.kernels.schemes import SCHEMES, Scheme, find_scheme

# What the caller may give of a scale, in the order of `ScaleInputs`.
INPUT_NAMES = ScaleInputs._fields[:-1]
SHARED_TENSORS = frozenset((*INPUT_NAMES, "tokens_per_expert"))
MAX_PLANS = 8192  # one for each shape seen; a few hundred bytes each

_plans: dict[tuple, Plan] = {}


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
    return_unquantized: bool
    mean_group: int
    launch: Any = None
    again: Any = None

    @property
    def tokens(self) -> int:
        """Rows of one expert, or all."""
        return self.shape[-2] if self.experts else self.rows

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
    tokens_per_expert: torch.Tensor | None


@lru_cache
def replaced(producer: Producer, scheme: Scheme) -> Replaced:
    """The vLLM op this pair stands in for."""
    return producer.replaces(scheme)


def key_of(producer: Producer, arguments: tuple, scheme: str, options: dict[str, Any]) -> tuple:
    """What a plan depends on. The scheme and not its name: a name may be given to another one."""
    key: list[Any] = [producer, SCHEMES.get(scheme), tuning.forced(), *options]
    for value in (*arguments, *options.values()):
        if isinstance(value, torch.Tensor):
            key += value.dtype, value.shape, value.stride(), value.get_device(), value.data_ptr() % 16
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
    tokens_per_expert = given.pop("tokens_per_expert", None)
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
    least = check_inputs(op, found, stands_for, inputs, min_scale, hidden_size, bound.device)
    experts = check_experts(op, tokens_per_expert, bound)
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
        return_unquantized,
        bound.mean_group,
    )


def allocate(plan: Plan) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Codes, scales, zero points and y of a call, as far as it has them."""
    scheme, device = plan.scheme, plan.device
    codes = torch.empty(plan.codes_shape, dtype=torch.uint8, device=device)
    scales = zero_points = unquantized = None
    if scheme.dynamic:
        # A kernel writes bytes; those of E4M3 scales get their dtype when they are handed out.
        dtype = scheme.rule.stored if scheme.rule.stored.itemsize > 1 else torch.uint8
        groups = scheme.groups(plan.hidden_size)
        if plan.experts:
            scales = plan.layout.allocate_for_experts(plan.experts, plan.tokens, groups, dtype, device)
        else:
            scales = plan.layout.allocate(plan.rows, groups, dtype, device)
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
    inputs = ScaleInputs._make((*map(options.get, INPUT_NAMES), plan.min_scale))
    counts = options.get("tokens_per_expert")
    return Prepared(plan, bound, inputs, arguments, given, codes, scales, zero_points, unquantized, counts)


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


def check_inputs(
    op: str,
    scheme: Scheme,
    stands_for: Replaced,
    inputs: dict[str, torch.Tensor | None],
    min_scale: float | None,
    hidden_size: int,
    device: torch.device,
) -> float:
    """The least scale. Raises unless the scheme has what its rule needs and nothing else."""
    rule = scheme.rule
    for name, tensor in inputs.items():
        if tensor is None:
            if name in rule.needs:
                wanted = "one-element int32 tensor" if name == "zero_point" else "one-element fp32 tensor"
                raise ValueError(f"{op}: {name} must be given for {scheme.name}, got None; pass a {wanted}")
        elif name == "smooth_scale":
            check_smooth_scale(op, tensor, hidden_size, device)
        elif name in (*rule.needs, *rule.takes):
            check_scalar(op, name, tensor, device, torch.int32 if name == "zero_point" else torch.float32)
        else:
            reason = "its scales are computed" if scheme.dynamic else "its scale is given"
            raise ValueError(f"{op}: {name} must be None for {scheme.name}, got a tensor; {reason}")
    if min_scale is None:
        return scheme.min_scale if stands_for.min_scale is None else stands_for.min_scale
    if "scale_ub" not in rule.takes:
        raise ValueError(f"{op}: min_scale must be None for {scheme.name}, got {min_scale}; its scales have no bounds")
    if not min_scale >= rule.least_min_scale:
        raise ValueError(f"{op}: min_scale must be at least {rule.least_min_scale}, got {min_scale}")
    return min_scale


def check_width(op: str, data_width: int | None, hidden_size: int, unit: int) -> int:
    """Columns of the codes: the hidden size, or more."""
    if data_width is None:
        return hidden_size
    if not hidden_size <= data_width <= MAX_HIDDEN_SIZE or data_width % unit:
        raise ValueError(
            f"{op}: data_width must be a multiple of {unit} from the hidden size on, in [{hidden_size}, "
            f"{MAX_HIDDEN_SIZE}], got {data_width}"
        )
    return data_width


def check_experts(op: str, tokens_per_expert: torch.Tensor | None, bound: Bound) -> int:
    """Number of experts; 0 where there are none."""
    if tokens_per_expert is None:
        return 0
    if len(bound.shape) != 3:
        raise ValueError(
            f"{op}: tokens_per_expert needs activations [experts, tokens, hidden size], got shape {tuple(bound.shape)}"
        )
    if not isinstance(tokens_per_expert, torch.Tensor) or tokens_per_expert.dtype not in (torch.int32, torch.int64):
        came = getattr(tokens_per_expert, "dtype", type(tokens_per_expert).__name__)
        raise TypeError(f"{op}: tokens_per_expert must be an int32 or int64 tensor, got {came}")
    check_like(op, "tokens_per_expert", tokens_per_expert, torch.Size(bound.shape[:1]), bound.device)
    if tokens_per_expert.stride(0) != 1 and bound.shape[0] > 1:
        raise ValueError(f"{op}: stride of tokens_per_expert must be 1, got {tokens_per_expert.stride(0)}")
    return bound.shape[0]


def check_smooth_scale(op: str, tensor: torch.Tensor, hidden_size: int, device: torch.device) -> None:
    """Raises unless `tensor` has one number for each column."""
    check_like(op, "smooth_scale", tensor, torch.Size((hidden_size,)), device)
    if tensor.dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: smooth_scale must be bfloat16, float16 or float32, got {tensor.dtype}; cast it first")
    if tensor.stride(0) != 1:
        raise ValueError(f"{op}: stride of smooth_scale must be 1, got {tensor.stride(0)}; pass it contiguous")


def check_scalar(
    op: str, name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype = torch.float32
) -> None:
    """Raises unless `tensor` is one number of `dtype` on `device`."""
    wanted = str(dtype).removeprefix("torch.")
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
        came = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{op}: {name} must be a {wanted} tensor, got {came}; pass torch.tensor([value])")
    if tensor.numel() != 1:
        raise ValueError(f"{op}: {name} must have one element, got shape {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} as x is, got {tensor.device}; move it there")
