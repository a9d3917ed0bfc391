"""One step of the gated delta rule: its activations, checked, loaded and stored, whatever holds the state.

GDN and KDA differ in their gates, which are functions that a kernel is given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.kernels.device import Rows, round_to
from tq.kernels.producer import INPUT_DTYPES, constant
from tq.kernels.target import INTERPRETED
from tq.state.bind import bind_rows, bind_vector, check_out, check_shape, check_tensor


class GdnGates(NamedTuple):
    """a, b [B, heads] with strides; A_log, dt_bias [heads]."""

    a: Rows
    b: Rows
    A_log: torch.Tensor
    dt_bias: torch.Tensor


class KdaGates(NamedTuple):
    """gate [B, heads * keys] and beta [B, heads] with strides; A_log [heads]; dt_bias [heads * keys]."""

    gate: Rows
    beta: Rows
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float | None


class Step(NamedTuple):
    """load_gates and gates_of of GDN or KDA. GROUP: value heads that share a key head. NORMALIZE: q and k are divided
    by their norms."""

    load_gates: Any
    gates_of: Any
    GROUP: tl.constexpr
    NORMALIZE: tl.constexpr


class Activations(NamedTuple):
    """Rows of q and k of every key head, then v of every value head; gates; where outputs go; the factor of q."""

    qkv: Rows
    gates: Any
    out: torch.Tensor
    scale: float
    step: Step


@triton.jit
def softplus(x):
    """log(1 + e^x), x itself above 20."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def load_gdn_gates(gates, row, head, key, mask, cut):
    """(a, dt_bias, A_log, b) of a head."""
    a = tl.load(gates.a.data + row * gates.a.stride + head)
    b = tl.load(gates.b.data + row * gates.b.stride + head)
    return a, tl.load(gates.dt_bias + head), tl.load(gates.A_log + head), b


@triton.jit
def gdn_gates_of(loaded, gates):
    """(log decay [1, 1], beta): -exp(A_log) * softplus(a + dt_bias), sigmoid(b)."""
    a, dt_bias, rate, b = loaded
    log_decay = -tl.exp(rate.to(tl.float32)) * softplus(a.to(tl.float32) + dt_bias.to(tl.float32))
    return tl.zeros([1, 1], tl.float32) + log_decay, tl.sigmoid(b.to(tl.float32))


@triton.jit
def load_kda_gates(gates, row, head, key, mask, cut):
    """(gate [keys], dt_bias [keys], A_log, beta) of a head."""
    channel = head * cut.COLS + key
    gate = tl.load(gates.gate.data + row * gates.gate.stride + channel, mask=mask, other=0.0)
    beta = tl.load(gates.beta.data + row * gates.beta.stride + head)
    return gate, tl.load(gates.dt_bias + channel, mask=mask, other=0.0), tl.load(gates.A_log + head), beta


@triton.jit
def kda_gates_of(loaded, gates):
    """(log decay [1, keys], beta): with x = gate + dt_bias, -exp(A_log) * softplus(x) or lower_bound * sigmoid(
    exp(A_log) * x); sigmoid(beta)."""
    gate, dt_bias, rate, beta = loaded
    x = gate.to(tl.float32) + dt_bias.to(tl.float32)
    rate = tl.exp(rate.to(tl.float32))
    if gates.lower_bound is None:
        log_decay = -rate * softplus(x)
    else:
        log_decay = tl.sigmoid(rate * x) * gates.lower_bound
    return log_decay[None, :], tl.sigmoid(beta.to(tl.float32))


@triton.jit
def load_keys(given, row, head, cut):
    """(q [keys], k [keys]) of a row, in their dtype."""
    key = tl.arange(0, cut.BLOCK_COLS)
    in_keys = key < cut.COLS
    keys: tl.constexpr = cut.HEADS // given.step.GROUP * cut.COLS
    at = given.qkv.data + row * given.qkv.stride + head // given.step.GROUP * cut.COLS + key
    return tl.load(at, mask=in_keys, other=0.0), tl.load(at + keys, mask=in_keys, other=0.0)


@triton.jit
def load_values(given, row, head, block, cut):
    """v [values of a block] of a head of a row, in their dtype."""
    value = block * cut.BLOCK_ROWS + tl.arange(0, cut.BLOCK_ROWS)
    keys: tl.constexpr = cut.HEADS // given.step.GROUP * cut.COLS
    at = given.qkv.data + row * given.qkv.stride + 2 * keys + head * cut.ROWS + value
    return tl.load(at, mask=value < cut.ROWS, other=0.0)


@triton.jit
def load_gates(given, row, head, cut):
    """What the gates of a head of a row are made of, in its dtypes."""
    key = tl.arange(0, cut.BLOCK_COLS)
    return given.step.load_gates(given.gates, row, head, key, key < cut.COLS, cut)


@triton.jit
def norm(vector, given):
    """sqrt(sum of squares + 1e-6); 1 where the step does not normalize."""
    length = 1.0
    if given.step.NORMALIZE:
        length = tl.sqrt(tl.sum(vector * vector, 0) + 1e-6)
    return length


class Vectors(NamedTuple):
    """q and k of a row [keys], as they multiply a state, their product and bounds of their magnitudes."""

    q: Any
    k: Any
    both: Any
    most_q: Any
    most_k: Any


@triton.jit
def add_three(a, b, c, x, y, z):
    return a + x, b + y, c + z


@triton.jit
def three_sums(x, y, z):
    """Each summed up, in one pass through the threads; the interpreter takes a pass of Python for every element."""
    if INTERPRETED:
        return tl.sum(x, 0), tl.sum(y, 0), tl.sum(z, 0)
    return tl.reduce((x, y, z), 0, add_three)


@triton.jit
def vectors_of(loaded, given):
    """`load_keys` in fp32, normalized and q scaled. One factor for all keys: a division of each would cost more than
    codes do."""
    q, k = loaded
    q, k = q.to(tl.float32), k.to(tl.float32)
    of_q, of_k, both = three_sums(q * q, k * k, q * k)
    most_q, most_k = tl.sqrt(of_q + 1e-6), tl.sqrt(of_k + 1e-6)
    factor_q, factor_k = given.scale, 1.0
    if given.step.NORMALIZE:
        factor_q, factor_k = given.scale / most_q, 1.0 / most_k
    most_q, most_k = tl.abs(factor_q) * most_q, factor_k * most_k
    return Vectors(q * factor_q, k * factor_k, both * (factor_q * factor_k), most_q, most_k)


@triton.jit
def store_output(given, row, head, block, result, cut):
    """Outputs [values] of a block of a row, rounded to their dtype."""
    dtype: tl.constexpr = given.out.dtype.element_ty
    value = block * cut.BLOCK_ROWS + tl.arange(0, cut.BLOCK_ROWS)
    written = given.out + (row * cut.HEADS + head) * cut.ROWS + value
    tl.store(written, round_to(result, dtype).to(dtype), mask=value < cut.ROWS)


def bind_gdn(
    op: str,
    state: torch.Tensor,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    normalize: bool,
) -> Activations:
    """The arguments of a step of GDN on a checked state [S, heads, values, keys]."""
    rows, heads, values, keys = bind_step(op, mixed_qkv, state)
    group = key_group(op, mixed_qkv, heads, values, keys)
    gates = GdnGates(
        bind_rows(op, "a", a, (rows, heads), state),
        bind_rows(op, "b", b, (rows, heads), state),
        bind_vector(op, "A_log", A_log, heads, state),
        bind_vector(op, "dt_bias", dt_bias, heads, state),
    )
    check_out(op, out, (rows, 1, heads, values), state)
    step = Step(load_gdn_gates, gdn_gates_of, constant(group), constant(bool(normalize)))
    return Activations(Rows(mixed_qkv, mixed_qkv.stride(0)), gates, out, float(scale), step)


def bind_kda(
    op: str,
    state: torch.Tensor,
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    scale: float | None,
    out: torch.Tensor | None,
) -> Activations:
    """As `bind_gdn`, of KDA."""
    rows, heads, values, keys = bind_step(op, mixed_qkv, state)
    group = key_group(op, mixed_qkv, heads, values, keys)
    if group != 1:
        raise ValueError(f"{op}: mixed_qkv must have a key head for each of {heads} value heads, got 1 for {group}")
    check_tensor(op, "raw_g", raw_g, INPUT_DTYPES, state.device)
    check_shape(op, "raw_g", raw_g, (1, rows, heads, keys))
    check_tensor(op, "raw_beta", raw_beta, INPUT_DTYPES, state.device)
    check_shape(op, "raw_beta", raw_beta, (1, rows, heads))
    if rows and not raw_g[0, 0].is_contiguous():
        raise ValueError(f"{op}: heads of raw_g must be dense, got strides {raw_g.stride()}; pass raw_g.contiguous()")
    gates = KdaGates(
        Rows(raw_g, raw_g.stride(1)),
        bind_rows(op, "raw_beta", raw_beta[0], (rows, heads), state),
        bind_vector(op, "A_log", A_log, heads, state),
        bind_vector(op, "dt_bias", dt_bias, heads * keys, state),
        lower_bound,
    )
    if out is None:
        out = torch.empty((1, rows, heads, values), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    check_out(op, out, (1, rows, heads, values), state)
    step = Step(load_kda_gates, kda_gates_of, constant(1), constant(True))
    scale = keys**-0.5 if scale is None else scale
    return Activations(Rows(mixed_qkv, mixed_qkv.stride(0)), gates, out, float(scale), step)


def bind_step(op: str, mixed_qkv: torch.Tensor, state: torch.Tensor) -> tuple[int, int, int, int]:
    """(rows, heads, values, keys) of the state and the packed activations."""
    check_tensor(op, "mixed_qkv", mixed_qkv, INPUT_DTYPES, state.device)
    if mixed_qkv.dim() != 2 or mixed_qkv.stride(1) != 1:
        raise ValueError(
            f"{op}: mixed_qkv must be [B, channels] with channels side by side, got shape {tuple(mixed_qkv.shape)} "
            f"with strides {mixed_qkv.stride()}"
        )
    return mixed_qkv.shape[0], *state.shape[1:]


def key_group(op: str, mixed_qkv: torch.Tensor, heads: int, values: int, keys: int) -> int:
    """Value heads for each key head."""
    key_heads, rest = divmod(mixed_qkv.shape[1] - heads * values, 2 * keys)
    if rest or key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"{op}: mixed_qkv must have 2 * key heads * {keys} + {heads} * {values} channels, the key heads dividing "
            f"{heads}, got {mixed_qkv.shape[1]}"
        )
    return heads // key_heads
