"""One decode step of the gated delta rule, with the state rounded on its way in or out.

The template is one; GDN and KDA differ in their gates, which are functions given to it. Whatever shares a scale is in
the registers of one program from load to store.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.kernels.device import Rows, round_to
from tq.kernels.producer import INPUT_DTYPES, check_choice, constant
from tq.state.bind import (
    bind_format,
    bind_rows,
    bind_slots,
    bind_states,
    bind_vector,
    check_out,
    check_shape,
    check_tensor,
    run,
)
from tq.state.cache import elements_of, find_head, part_of
from tq.state.qdq import qdq

NULL_SLOT = 0  # the slot that vLLM pads a batch with
QUANTIZED = ("incoming", "outgoing")


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
    """GROUP: value heads that share a key head. NORMALIZE: q and k are divided by their norms. INCOMING: the state is
    rounded before the step, else after it."""

    load_gates: Any
    GROUP: tl.constexpr
    NORMALIZE: tl.constexpr
    INCOMING: tl.constexpr


@triton.jit
def load_number(pointer):
    return tl.load(pointer).to(tl.float32)


@triton.jit
def softplus(x):
    """log(1 + e^x), x itself above 20."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def load_gdn_gates(gates, request, head, key, mask, cut):
    """(log decay [1, 1], beta): -exp(A_log) * softplus(a + dt_bias), sigmoid(b)."""
    x = load_number(gates.a.data + request * gates.a.stride + head) + load_number(gates.dt_bias + head)
    log_decay = -tl.exp(load_number(gates.A_log + head)) * softplus(x)
    beta = tl.sigmoid(load_number(gates.b.data + request * gates.b.stride + head))
    return tl.zeros([1, 1], tl.float32) + log_decay, beta


@triton.jit
def load_kda_gates(gates, request, head, key, mask, cut):
    """(log decay [1, keys], beta): with x = gate + dt_bias, -exp(A_log) * softplus(x) or lower_bound * sigmoid(
    exp(A_log) * x); sigmoid(beta)."""
    channel = head * cut.COLS + key
    x = tl.load(gates.gate.data + request * gates.gate.stride + channel, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(gates.dt_bias + channel, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(load_number(gates.A_log + head))
    if gates.lower_bound is None:
        log_decay = -rate * softplus(x)
    else:
        log_decay = tl.sigmoid(rate * x) * gates.lower_bound
    beta = tl.sigmoid(load_number(gates.beta.data + request * gates.beta.stride + head))
    return log_decay[None, :], beta


@triton.jit
def normalized(vector):
    """vector / sqrt(sum of its squares + 1e-6)"""
    return vector / tl.sqrt(tl.sum(vector * vector, 0) + 1e-6)


@triton.jit
def decode_kernel(state, qkv, gates, out, scale, step, format, cut):
    """S = decay * S; S += beta * (v - S k) k^T; out = S q * scale. S is [values, keys]."""
    request, head, part = part_of(cut)
    pointer, exists = find_head(state, request, head, cut)
    value = part * cut.BLOCK_ROWS + tl.arange(0, cut.BLOCK_ROWS)
    in_values = value < cut.ROWS
    written = out + (request * cut.HEADS + head) * cut.ROWS + value
    out_dtype: tl.constexpr = out.dtype.element_ty
    if exists:
        dtype: tl.constexpr = state.data.dtype.element_ty
        at, inside = elements_of(part, exists, cut)
        tile = tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)
        key = tl.arange(0, cut.BLOCK_COLS)
        in_keys = key < cut.COLS
        # A token's row is q and k of every key head, then v of every value head.
        row = qkv.data + request * qkv.stride
        keys: tl.constexpr = cut.HEADS // step.GROUP * cut.COLS
        channel = head // step.GROUP * cut.COLS + key
        q = tl.load(row + channel, mask=in_keys, other=0.0).to(tl.float32)
        k = tl.load(row + keys + channel, mask=in_keys, other=0.0).to(tl.float32)
        v = tl.load(row + 2 * keys + head * cut.ROWS + value, mask=in_values, other=0.0).to(tl.float32)
        log_decay, beta = step.load_gates(gates, request, head, key, in_keys, cut)
        if step.NORMALIZE:
            q = normalized(q)
            k = normalized(k)
        q = (q * scale)[None, :]
        k = k[None, :]
        if step.INCOMING:
            tile = round_to(qdq(tile, format, cut), dtype)
        tile *= tl.exp(log_decay)
        update = (v - tl.sum(tile * k, 1)) * beta
        tile += update[:, None] * k
        result = tl.sum(tile * q, 1)
        tile = round_to(tile, dtype)
        if step.INCOMING == False:  # noqa: E712 - a constant of a kernel has no `not`
            tile = round_to(qdq(tile, format, cut), dtype)
        tl.store(written, round_to(result, out_dtype).to(out_dtype), mask=in_values)
        tl.store(pointer + at, tile.to(dtype), mask=inside)
    else:
        tl.store(written, tl.zeros([cut.BLOCK_ROWS], out_dtype), mask=in_values)


def gdn_decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    code: str | None = None,
    granularity: str = "head",
    quantize: str = "incoming",
) -> tuple[torch.Tensor, torch.Tensor]:
    """S = exp(g) S; S += beta (v - S k) k^T; out = scale S q, g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).

    Shapes: mixed_qkv [B, 2 H K + HV V], q then k of H key heads, then v of HV value heads, HV a multiple of H; a, b [B,
    HV]; A_log, dt_bias [HV]; initial_state [S, HV, V, K], updated in place; out [B, 1, HV, V]; ssm_state_indices [B]
    int32 or int64. Dtypes: fp32, bf16 or fp16 each; the step is computed in fp32. use_qk_l2norm_in_kernel: q and k are
    divided by sqrt(sum of squares + 1e-6).
    Slots: a request whose slot is 0, negative or past the cache gets zeros in `out` and updates nothing. Two requests
    must not have the same slot: one of their updates would be lost.
    code, granularity: the state is rounded as by `qdq_`; None: not at all. quantize "incoming": before the step, as
    ModelOpt does it; what is stored is then the exact step of the rounded state. "outgoing": after the step; `out` is
    that of the state before rounding. Rounding: nearest-even, results to the dtype they are stored in.
    Returns (out, initial_state). One launch, no allocation, no synchronization. Raises as `qdq_` does.
    Source: vLLM 0.33 `fused_recurrent_gated_delta_rule_packed_decode` after or before `qdq_`; equal to it up to the
    order of sums.
    """
    op = "state.gdn_decode"
    batch, heads, values, keys = bind_step(op, mixed_qkv, initial_state)
    group = key_group(op, mixed_qkv, heads, values, keys)
    gates = GdnGates(
        bind_rows(op, "a", a, (batch, heads), initial_state),
        bind_rows(op, "b", b, (batch, heads), initial_state),
        bind_vector(op, "A_log", A_log, heads, initial_state),
        bind_vector(op, "dt_bias", dt_bias, heads, initial_state),
    )
    check_out(op, out, (batch, 1, heads, values), initial_state)
    step = step_of(op, load_gdn_gates, group, use_qk_l2norm_in_kernel, quantize)
    decode(op, initial_state, ssm_state_indices, mixed_qkv, gates, out, scale, step, code, granularity)
    return out, initial_state


def kda_decode(
    mixed_qkv: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    initial_state: torch.Tensor,
    state_indices: torch.Tensor,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    *,
    code: str | None = None,
    granularity: str = "head",
    quantize: str = "incoming",
) -> tuple[torch.Tensor, torch.Tensor]:
    """S = S diag(exp(g)); S += beta (v - S k) k^T; out = scale S q, beta = sigmoid(raw_beta) and, for each key channel,
    g = -exp(A_log) softplus(raw_g + dt_bias), or lower_bound sigmoid(exp(A_log) (raw_g + dt_bias)) where one is given.

    Shapes: mixed_qkv [B, 2 H K + H V]; raw_g [1, B, H, K]; raw_beta [1, B, H]; A_log [H]; dt_bias of H K elements;
    initial_state [S, H, V, K]; state_indices [B]; out [1, B, H, V], a new tensor of mixed_qkv's dtype for None. scale:
    K^-0.5 for None. q and k are normalized always. All else as `gdn_decode`.
    Source: vLLM 0.33 `fused_recurrent_kda_packed_decode`.
    """
    op = "state.kda_decode"
    batch, heads, values, keys = bind_step(op, mixed_qkv, initial_state)
    group = key_group(op, mixed_qkv, heads, values, keys)
    if group != 1:
        raise ValueError(f"{op}: mixed_qkv must have a key head for each of {heads} value heads, got 1 for {group}")
    check_tensor(op, "raw_g", raw_g, INPUT_DTYPES, initial_state.device)
    check_shape(op, "raw_g", raw_g, (1, batch, heads, keys))
    check_tensor(op, "raw_beta", raw_beta, INPUT_DTYPES, initial_state.device)
    check_shape(op, "raw_beta", raw_beta, (1, batch, heads))
    if batch and not raw_g[0, 0].is_contiguous():
        raise ValueError(f"{op}: heads of raw_g must be dense, got strides {raw_g.stride()}; pass raw_g.contiguous()")
    gates = KdaGates(
        Rows(raw_g, raw_g.stride(1)),
        bind_rows(op, "raw_beta", raw_beta[0], (batch, heads), initial_state),
        bind_vector(op, "A_log", A_log, heads, initial_state),
        bind_vector(op, "dt_bias", dt_bias, heads * keys, initial_state),
        lower_bound,
    )
    if out is None:
        out = torch.empty((1, batch, heads, values), dtype=mixed_qkv.dtype, device=mixed_qkv.device)
    check_out(op, out, (1, batch, heads, values), initial_state)
    step = step_of(op, load_kda_gates, group, True, quantize)
    scale = keys**-0.5 if scale is None else scale
    decode(op, initial_state, state_indices, mixed_qkv, gates, out, scale, step, code, granularity)
    return out, initial_state


def decode(
    op: str,
    state: torch.Tensor,
    slots: torch.Tensor,
    mixed_qkv: torch.Tensor,
    gates: Any,
    out: torch.Tensor,
    scale: float,
    step: Step,
    code: str | None,
    granularity: str,
) -> None:
    """Launches the template for any gates."""
    cache = bind_slots(op, bind_states(op, "initial_state", state), slots, NULL_SLOT, name="the state indices")
    check_shape(op, "the state indices", slots, (mixed_qkv.shape[0],))
    launch = bind_format(op, cache, code, granularity, "value_first")
    qkv = Rows(mixed_qkv, mixed_qkv.stride(0))
    # Sums of products are contracted as vLLM's are; nothing that is rounded to a code is a sum of a product.
    run(decode_kernel, slots.shape[0], launch, state.device, cache, qkv, gates, out, float(scale), step, fusion=True)


def bind_step(op: str, mixed_qkv: torch.Tensor, state: torch.Tensor) -> tuple[int, int, int, int]:
    """(B, heads, values, keys) of the state and the packed activations."""
    bind_states(op, "initial_state", state)
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


def step_of(op: str, load_gates: Any, group: int, normalize: bool, quantize: str) -> Step:
    check_choice(op, "quantize", quantize, QUANTIZED)
    return Step(load_gates, *map(constant, (group, bool(normalize), quantize == "incoming")))
