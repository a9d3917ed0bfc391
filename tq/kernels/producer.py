"""Producers: what computes the activation. A producer says how a tile is loaded, which row means it needs and how they
are applied; everything else (schemes, checks, ops, tests, benchmarks) follows from that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tq import kernels
from tq.kernels.device import Rows, apply_nothing
from tq.kernels.schemes import Scheme

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HIDDEN_SIZE = 32768


class Bound(NamedTuple):
    """Checked arguments of one call. args: the NamedTuple the device functions take. shape: of the activation, its last
    size the hidden size. side_outputs: tensors the kernel writes besides (a residual). mean_group: how many consecutive
    elements a mean is over, a power of two that divides the hidden size; 0 for the row."""

    args: Any
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    side_outputs: tuple[torch.Tensor, ...] = ()
    mean_group: int = 0


class Reference(NamedTuple):
    """What a producer's torch reference returns: y [M, N] in the precision asked for, and the side outputs."""

    y: torch.Tensor
    side_outputs: tuple[torch.Tensor, ...] = ()


class Replaced(NamedTuple):
    """The vLLM op that a producer with a scheme stands in for, and the choices that make it equal: options of the
    producer (where it rounds) and the least scale (None: the scheme's own)."""

    op: str
    options: dict[str, Any]
    min_scale: float | None = None


class DeviceProducer(NamedTuple):
    """The jit functions of a producer, as a kernel takes them."""

    load: Any
    moments: tuple
    apply: Any
    shared: Any


def replaces_nothing(scheme: Scheme) -> Replaced:
    """No vLLM op has this pair: the scheme's own least scale, the producer's own defaults."""
    return Replaced("none", {})


class RowsArgs(NamedTuple):
    """Device arguments of a producer of one tensor."""

    x: Rows


def bind_rows(x: torch.Tensor) -> Bound:
    """The `bind` of a producer whose only input is x [..., N] and whose output has x's shape."""
    return Bound(RowsArgs(as_rows(x)), x.shape, x.dtype, x.device)


@dataclass(frozen=True, eq=False)
class Producer:
    """load, moments and apply are the device functions, in fp32 tiles [BLOCK_M, BLOCK_N]:

    load(args, row, col, mask) -> loaded, a tile or a tuple of tiles. Everything is read here, so that all reads of a
    row are under way before anything is written.
    moments[i](args, loaded, means, total) -> total + m, the sum so far and what this tile adds to it; the mean of m
    over the row, or over each of its groups (see `Bound`), is appended to `means`.
    apply(args, loaded, means, row, col, mask) -> y. Side outputs are stored here.
    shared(args, col, mask) -> a tile or a tuple of tiles that all rows read, a weight, in its own dtype. `apply` gets
    (loaded, shared). Where few rows leave most of the GPU idle it is read with them, which saves a latency; elsewhere
    when `apply` needs it, which saves registers.

    bind: the host signature, whose parameters are those of the torch op; returns `Bound`. The default takes one tensor
    x. check: the same parameters; raises where they do not fit, before any launch, and is run once for all calls of one
    description. The default looks at x. reference: (same arguments, precision=) -> `Reference`, the torch form,
    rounding where the kernel does. replaces: the vLLM op a scheme makes it equal to. mutates: parameters of `bind` that
    are written where given. example: (rows, hidden size, dtype, device) -> (arguments, options) for tests and
    benchmarks; optional: options in it that may be left out, so that both forms are measured. parts: the first argument
    has parts * N columns. width: which size of a model its activation has, for benchmarks: "hidden" or "intermediate".
    """

    name: str
    load: Any
    reference: Callable[..., Reference]
    moments: tuple = ()
    apply: Any = apply_nothing
    shared: Any = None
    bind: Callable[..., Bound] = bind_rows
    check: Callable[..., object] | None = None
    replaces: Callable[[Scheme], Replaced] = replaces_nothing
    mutates: tuple[str, ...] = ()
    example: Callable[..., tuple[tuple, dict[str, Any]]] | None = None
    optional: tuple[str, ...] = ()
    parts: int = 1
    width: str = "hidden"
    device: DeviceProducer = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", DeviceProducer(self.load, self.moments, self.apply, self.shared))
        if self.check is None:
            object.__setattr__(self, "check", self._check_x)
        if self.example is None:
            object.__setattr__(self, "example", example_rows)

    def _check_x(self, x: torch.Tensor, *rest: Any, **options: Any) -> None:
        check_rows(self.name, "x", x, parts=self.parts)

    def __call__(self, *inputs: Any, scheme: str, **options: Any) -> Any:
        """Runs the producer: see `tq.kernels.launch.call`."""
        # By its full name: `launch` imports this module, and an import statement here would cost as much as the launch.
        return kernels.launch.call(self, inputs, scheme, options)


@lru_cache(typed=True)  # 0, 0.0 and False are equal
def constant(value: Any) -> tl.constexpr:
    """`value` as a constant of a kernel, made once."""
    return tl.constexpr(value)


def as_rows(tensor: torch.Tensor) -> Rows:
    """`tensor` [..., N], which passed `check_rows`, as rows of one stride."""
    flat = tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])
    return Rows(flat, flat.stride(0))


def check_rows(op: str, name: str, tensor: torch.Tensor, like: torch.Tensor | None = None, parts: int = 1) -> Rows:
    """`tensor` [..., parts * N] as rows of one stride.

    Raises TypeError for a dtype that is not bf16, fp16 or fp32, ValueError for a last stride that is not 1, leading
    dimensions that one stride cannot walk, a hidden size out of [1, 32768], or a shape or device other than `like`'s.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}: {tensor!r}")
    if tensor.dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: {name} must be bfloat16, float16 or float32, got {tensor.dtype}; cast it first")
    if tensor.dim() == 0:
        raise ValueError(f"{op}: {name} must have a hidden dimension, got a 0-d tensor; pass [..., hidden size]")
    if like is not None:
        check_like(op, name, tensor, like.shape, like.device)
    hidden_size = tensor.shape[-1]
    if hidden_size % parts or not 1 <= hidden_size // parts <= MAX_HIDDEN_SIZE:
        wanted = f"{parts} times a number" if parts > 1 else "a number"
        raise ValueError(f"{op}: last size of {name} must be {wanted} in [1, {MAX_HIDDEN_SIZE}], got {hidden_size}")
    if hidden_size > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{op}: last stride of {name} must be 1, got strides {tuple(tensor.stride())}; pass {name}.contiguous()"
        )
    try:
        return as_rows(tensor)
    except RuntimeError:
        raise ValueError(
            f"{op}: leading dimensions of {name} must be walkable with one stride, got shape {tuple(tensor.shape)} "
            f"with strides {tuple(tensor.stride())}; pass {name}.contiguous()"
        ) from None


def check_like(op: str, name: str, tensor: torch.Tensor, shape: torch.Size, device: torch.device) -> None:
    """Raises TypeError unless `tensor` is one, ValueError unless it has this shape and device."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}: {tensor!r}")
    if tensor.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} as x is, got {tensor.device}; move it there")


def check_written(op: str, name: str, tensor: torch.Tensor, rows: Rows, dtype: torch.dtype) -> None:
    """Raises unless the kernel may write `tensor`: of this dtype, and no place belongs to two rows."""
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")
    if rows.data.shape[0] > 1 and rows.stride < rows.data.shape[1]:
        raise ValueError(
            f"{op}: rows of {name} must not overlap, got strides {tuple(tensor.stride())} for shape "
            f"{tuple(tensor.shape)}; pass a tensor of its own"
        )


def check_choice(op: str, name: str, value: Any, choices: tuple) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(map(repr, choices))}; got {value!r}")


def example_rows(rows: int, hidden_size: int, dtype: torch.dtype, device: Any) -> tuple[tuple, dict[str, Any]]:
    """x [rows, hidden size], unit normal."""
    return (torch.randn(rows, hidden_size, device=device).to(dtype),), {}


def round_through(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value` rounded to `dtype` and back: the torch form of `device.round_to`."""
    return value.to(dtype).to(value.dtype)


PRODUCERS: dict[str, Producer] = {}


def register_producer(producer: Producer) -> Producer:
    """Adds a producer to `PRODUCERS` and registers its torch op `tq::<name>`. Raises ValueError where the name is
    taken."""
    from tq.kernels.ops import register_op

    if producer.name in PRODUCERS:
        raise ValueError(f"register_producer: name must be new, got {producer.name!r} twice; choose another name")
    register_op(producer)
    PRODUCERS[producer.name] = producer
    return producer
