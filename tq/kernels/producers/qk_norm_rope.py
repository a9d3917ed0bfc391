"""y = rope(norm(head)) for every head of queries and keys, norm(h) = h / sqrt(mean(h^2) + eps) * weight."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.activation import QuantizedActivation
from tq.kernels.device import Rows, load_rows, load_vector, round_to, widen
from tq.kernels.launch import call
from tq.kernels.producer import (
    INPUT_DTYPES,
    Bound,
    Producer,
    Reference,
    as_rows,
    check_choice,
    check_rows,
    constant,
    register_producer,
    round_through,
)
from tq.kernels.producers.norms import check_eps, check_vector
from tq.kernels.producers.quantize import followed_by_quantizer

OP = "qk_norm_rope"
ROUNDINGS = ("none", "output", "norm_and_output")


class Args(NamedTuple):
    """HEAD, ROTARY: sizes of a head and of the part of it that is rotated. QUERIES: columns that are of queries."""

    x: Rows
    q_weight: torch.Tensor
    k_weight: torch.Tensor | None
    positions: torch.Tensor
    tokens: int
    cos_sin: Rows
    eps: float
    HEAD: tl.constexpr
    ROTARY: tl.constexpr
    QUERIES: tl.constexpr
    INTERLEAVED: tl.constexpr
    ROUNDING: tl.constexpr


@triton.jit
def rotation(args, col):
    """Of a column, in its head: its place, the place it is rotated with, whether it comes first, and its angle."""
    place = col % args.HEAD
    half: tl.constexpr = args.ROTARY // 2
    if args.INTERLEAVED:
        first = place % 2 == 0
        partner = tl.where(first, place + 1, place - 1)
        angle = place // 2
    else:
        first = place < half
        partner = tl.where(first, place + half, place - half)
        angle = tl.where(first, place, partner)
        if half % 8 == 0:
            # Eight columns are on one side; told that, the compiler reads them at once.
            partner = tl.max_contiguous(tl.multiple_of(partner, [1, 8]), [1, 8])
            angle = tl.max_contiguous(tl.multiple_of(angle, [1, 8]), [1, 8])
    return place, partner, first, angle


@triton.jit
def load_pair(args, row, col, mask):
    """An element, and the one it is rotated with, which is read a second time."""
    place, partner, _, _ = rotation(args, col)
    partner += col // args.HEAD * args.HEAD
    return load_rows(args.x, row, col, mask), load_rows(args.x, row, partner, mask & (place < args.ROTARY))


@triton.jit
def add_square(args, loaded, means, total):
    return tl.fma(loaded[0], loaded[0], total)


@triton.jit
def load_weight(args, place, col, mask):
    """The weight at a place of the head, query or key, that the column is in."""
    if args.k_weight is None:
        weight = load_vector(args.q_weight, place, mask)
    else:
        weight = load_vector(args.q_weight, place, mask & (col < args.QUERIES))
        weight += load_vector(args.k_weight, place, mask & (col >= args.QUERIES))
    return weight


@triton.jit
def rotate(args, loaded, means, row, col, mask):
    dtype: tl.constexpr = args.x.data.dtype.element_ty
    place, partner, first, angle = rotation(args, col)
    rotated = mask & (place < args.ROTARY)
    inverse = tl.rsqrt(means[0] + args.eps)
    y = loaded[0] * (inverse * load_weight(args, place, col, mask))
    other = loaded[1] * (inverse * load_weight(args, partner, col, rotated))
    if args.ROUNDING == "norm_and_output":
        y, other = round_to(y, dtype), round_to(other, dtype)
    position = tl.load(args.positions + row, mask=row < args.tokens, other=0).to(tl.int64)
    cos_sin = args.cos_sin.data + (position * args.cos_sin.stride + angle)
    cos = widen(tl.load(cos_sin, mask=rotated, other=1.0))
    sin = widen(tl.load(cos_sin + args.ROTARY // 2, mask=rotated, other=0.0))
    turned = y * cos + other * tl.where(first, -sin, sin)
    # Not 1 * y + 0 * other, which for an infinite y is NaN.
    y = tl.where(rotated, turned, y)
    return y if args.ROUNDING == "none" else round_to(y, dtype)


def bind(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float = 1e-6,
    *,
    q_heads: int | None = None,
    interleaved: bool = False,
    rounding: str = "output",
) -> Bound:
    rows, head_size, hidden_size = as_rows(x), q_weight.shape[0], x.shape[-1]
    queries = hidden_size if k_weight is None or q_heads is None else q_heads * head_size
    sizes = map(int, (head_size, cos_sin_cache.shape[1], queries))  # constants of the kernel, also while tracing
    constants = map(constant, (*sizes, interleaved, rounding))
    cos_sin = Rows(cos_sin_cache, cos_sin_cache.stride(0))
    args = Args(rows, q_weight, k_weight, positions, rows.data.shape[0], cos_sin, eps, *constants)
    return Bound(args, x.shape, x.dtype, x.device, mean_group=0 if head_size == hidden_size else head_size)


def check(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float = 1e-6,
    *,
    q_heads: int | None = None,
    interleaved: bool = False,
    rounding: str,
) -> None:
    rows, hidden_size = check_rows(OP, "x", x), x.shape[-1]
    head_size = q_weight.shape[-1] if isinstance(q_weight, torch.Tensor) and q_weight.dim() else 1
    check_vector(OP, "q_weight", q_weight, torch.Size((head_size,)), x.device)
    if head_size != hidden_size and (head_size & (head_size - 1) or not head_size or hidden_size % head_size):
        raise ValueError(
            f"{OP}: size of q_weight, a head's, must be a power of two that divides the hidden size {hidden_size}, or "
            f"the hidden size, got {head_size}"
        )
    heads = hidden_size // head_size
    if k_weight is not None:
        check_vector(OP, "k_weight", k_weight, q_weight.shape, x.device)
        if q_heads is None or not 0 <= q_heads <= heads:
            raise ValueError(f"{OP}: q_heads must be in [0, {heads}] where there is a k_weight, got {q_heads}")
    elif q_heads is not None and q_heads != heads:
        raise ValueError(f"{OP}: q_heads must be None or {heads} where there is no k_weight, got {q_heads}")
    check_positions(positions, rows.data.shape[0], x)
    check_cache(cos_sin_cache, head_size, x.device)
    check_eps(OP, eps)
    check_choice(OP, "rounding", rounding, ROUNDINGS)


def check_positions(positions: torch.Tensor, tokens: int, x: torch.Tensor) -> None:
    """Raises unless there is one position for each row of `x`."""
    if not isinstance(positions, torch.Tensor) or positions.dtype not in (torch.int32, torch.int64):
        came = positions.dtype if isinstance(positions, torch.Tensor) else type(positions).__name__
        raise TypeError(f"{OP}: positions must be an int32 or int64 tensor, got {came}; cast it first")
    if positions.shape not in ((tokens,), x.shape[:-1]):
        raise ValueError(f"{OP}: positions must have shape ({tokens},), got {tuple(positions.shape)}")
    if not positions.is_contiguous():
        raise ValueError(f"{OP}: positions must be contiguous, got strides {tuple(positions.stride())}")
    if positions.device != x.device:
        raise ValueError(f"{OP}: positions must be on {x.device} as x is, got {positions.device}; move it there")


def check_cache(cos_sin_cache: torch.Tensor, head_size: int, device: torch.device) -> None:
    """Raises unless `cos_sin_cache` is a table for heads of this size."""
    if not isinstance(cos_sin_cache, torch.Tensor) or cos_sin_cache.dtype not in INPUT_DTYPES:
        came = cos_sin_cache.dtype if isinstance(cos_sin_cache, torch.Tensor) else type(cos_sin_cache).__name__
        raise TypeError(f"{OP}: cos_sin_cache must be a bfloat16, float16 or float32 tensor, got {came}")
    shape = tuple(cos_sin_cache.shape)
    if len(shape) != 2 or shape[1] % 2 or shape[1] > head_size or (shape[1] and cos_sin_cache.stride(1) != 1):
        raise ValueError(
            f"{OP}: cos_sin_cache must be [positions, rotary size], its last stride 1, the rotary size even and at "
            f"most the head's {head_size}, got shape {shape} with strides {tuple(cos_sin_cache.stride())}"
        )
    if cos_sin_cache.device != device:
        raise ValueError(f"{OP}: cos_sin_cache must be on {device} as x is, got {cos_sin_cache.device}; move it there")


def reference(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float = 1e-6,
    *,
    q_heads: int | None = None,
    interleaved: bool = False,
    rounding: str,
    precision: torch.dtype = torch.float32,
) -> Reference:
    heads = x.reshape(-1, x.shape[-1]).to(precision).unflatten(-1, (-1, q_weight.shape[0]))
    weight = q_weight.to(precision).expand(heads.shape[1:])
    if k_weight is not None:
        weight = torch.cat([weight[:q_heads], k_weight.to(precision).expand_as(weight[q_heads:])])
    y = heads * (torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight)
    if rounding == "norm_and_output":
        y = round_through(y, x.dtype)
    rotary = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions.flatten()].to(precision).unsqueeze(1).chunk(2, -1)
    if interleaved:
        first, second = y[..., 0:rotary:2], y[..., 1:rotary:2]
    else:
        first, second = y[..., : rotary // 2], y[..., rotary // 2 : rotary]
    turned = first * cos - second * sin, second * cos + first * sin
    parts = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    y = torch.cat([parts, y[..., rotary:]], -1).flatten(-2)
    return Reference(y if rounding == "none" else round_through(y, x.dtype))


def example(rows: int, hidden_size: int, dtype: torch.dtype, device: Any) -> tuple[tuple, dict[str, Any]]:
    """Heads of at most 128, or a single one where no power of two of 8 or more divides the hidden size; a quarter of
    them are keys."""
    head_size = min(hidden_size & -hidden_size, 128)
    head_size = head_size if head_size >= 8 else hidden_size
    heads, rotary = hidden_size // head_size, head_size // 2 * 2
    x = torch.randn(rows, hidden_size, device=device).to(dtype)
    weights = (1.0 + 0.1 * torch.randn(2, head_size, device=device)).to(dtype)
    angles = torch.arange(509, device=device)[:, None] * 1e4 ** (-torch.arange(0, rotary, 2, device=device) / head_size)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
    positions = torch.randint(509, (rows,), device=device)
    return (x, *weights, positions, cos_sin, 1e-6), {"q_heads": heads - heads // 4}


QK_NORM_ROPE = register_producer(
    Producer(
        OP,
        load=load_pair,
        moments=(add_square,),
        apply=rotate,
        bind=bind,
        check=check,
        reference=reference,
        replaces=partial(followed_by_quantizer, "_C.fused_qk_norm_rope", {"rounding": "output"}),
        example=example,
    )
)


def qk_norm_rope(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float = 1e-6,
    *,
    scheme: str,
    q_heads: int | None = None,
    interleaved: bool | None = None,
    rounding: str | None = None,
    **options: Any,
) -> QuantizedActivation:
    """For every head h of H elements n = h / sqrt(mean(h^2) + eps) * weight, and of each pair (a, b) of the first R of
    n, at its angle: y = (a * cos - b * sin, b * cos + a * sin); data = encode(y / scale).

    Shapes: x [..., heads * H] bf16, fp16 or fp32, last stride 1 (the queries and keys of qkv); heads * H at most 32768.
    q_weight [H] is of the first q_heads heads, k_weight [H] of the others; None where all are of queries. H is a power
    of two, or there is one head. positions: one a row of x, int32 or int64, each a row of cos_sin_cache, which is not
    checked. cos_sin_cache [positions, R]: the cosines of the R / 2 angles, then their sines; R even, at most H. A pair
    is n[i], n[i + R / 2], or with `interleaved` n[2i], n[2i + 1].
    Rounding: "none" keeps fp32, "output" rounds y to x's dtype, "norm_and_output" rounds n too, as the norm and the
    rotation one after the other do; None is what the replaced op does. The mean is summed in fp32 in an order of its
    own. Raises ValueError for eps <= 0 or sizes, shapes, strides or devices that do not fit, TypeError for dtypes;
    options and errors common to all producers are those of `tq.kernels.launch.call`.
    Source: vLLM 0.33 `_C.fused_qk_norm_rope` (all in fp32, rounded once), followed by the quantizer.
    """
    given = {"q_heads": q_heads, "interleaved": interleaved, "rounding": rounding, **options}
    return call(QK_NORM_ROPE, (x, q_weight, k_weight, positions, cos_sin_cache, eps), scheme, given)
