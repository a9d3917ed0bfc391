"""One decode step of the gated delta rule, with the state rounded on its way in or out.

Whatever shares a scale is in the registers of one program from load to store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tq.kernels.device import round_to
from tq.kernels.producer import check_choice
from tq.state.bind import bind_format, bind_slots, bind_states, check_shape, run
from tq.state.cache import begin, find_head, load_quarters, store_quarters
from tq.state.qdq import qdq
from tq.state.step import Activations, bind_gdn, bind_kda, load_gates, load_keys, load_values, norm, store_output

NULL_SLOT = 0  # the slot that vLLM pads a batch with
QUANTIZED = ("incoming", "outgoing")


@triton.jit
def once(vector):
    """A vector as it is. Without the gather each thread would load and compute it for the columns of its elements, the
    same in every row; with it, one does so for each element."""
    return tl.gather(vector, tl.arange(0, vector.shape[0]), 0)


@triton.jit
def decode_kernel(state, given, INCOMING: tl.constexpr, format, cut):
    """S = decay * S; S += beta * (v - S k) k^T; out = S q * scale. S is [values, keys]; INCOMING: rounded before, else
    after."""
    request, head, part = begin(cut)
    # All is asked for before anything is waited for.
    loaded, gates = load_keys(given, request, head, cut), load_gates(given, request, head, cut)
    values = load_values(given, request, head, part, cut)
    pointer, exists = find_head(state, request, head, cut)
    dtype: tl.constexpr = state.data.dtype.element_ty
    asked = load_quarters(pointer, part, exists, cut)
    log_decay, beta = given.step.gates_of(gates, given.gates)
    q, k = loaded
    q, k, v = q.to(tl.float32), k.to(tl.float32), values.to(tl.float32)
    q = q / norm(q, given) * given.scale
    k = once(k / norm(k, given))[None, :]
    decay = tl.exp(log_decay)
    if decay.shape[1] > 1:
        decay = once(tl.reshape(decay, [cut.BLOCK_COLS]))[None, :]
    # What is above goes through shared memory many times and is done while the state is on its way. The branch keeps it
    # there: within one block of instructions, ptxas puts the first of what follows ahead of most of it.
    if exists:
        tile = asked.to(tl.float32)
        if INCOMING:
            tile = round_to(qdq(tile, format, cut), dtype)
        tile *= decay
        update = (v - tl.sum(tile * k, 1)) * beta
        tile += update[:, None] * k
        # q is made last of all: with k and decay it would take more registers than there are.
        if INCOMING:
            store_quarters(pointer, part, exists, round_to(tile, dtype).to(dtype), cut)
            result = tl.sum(tile * once(q)[None, :], 1)
        else:
            result = tl.sum(tile * once(q)[None, :], 1)
            tile = round_to(qdq(round_to(tile, dtype), format, cut), dtype)
            store_quarters(pointer, part, exists, tile.to(dtype), cut)
        store_output(given, request, head, part, result, cut)
    else:
        store_output(given, request, head, part, tl.zeros([cut.BLOCK_ROWS], tl.float32), cut)


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
    bind_states(op, "initial_state", initial_state)
    given = bind_gdn(op, initial_state, mixed_qkv, a, b, A_log, dt_bias, scale, out, use_qk_l2norm_in_kernel)
    decode(op, initial_state, ssm_state_indices, given, code, granularity, quantize)
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
    bind_states(op, "initial_state", initial_state)
    given = bind_kda(op, initial_state, mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, scale, out)
    decode(op, initial_state, state_indices, given, code, granularity, quantize)
    return given.out, initial_state


def decode(
    op: str,
    state: torch.Tensor,
    slots: torch.Tensor,
    given: Activations,
    code: str | None,
    granularity: str,
    quantize: str,
) -> None:
    """Launches the template for any gates."""
    check_choice(op, "quantize", quantize, QUANTIZED)
    cache = bind_slots(op, bind_states(op, "initial_state", state), slots, NULL_SLOT, name="the state indices")
    check_shape(op, "the state indices", slots, (given.qkv.data.shape[0],))
    launch = bind_format(op, cache, code, granularity, "value_first")
    # Sums of products are contracted as vLLM's are; nothing that is rounded to a code is a sum of a product.
    run(decode_kernel, slots.shape[0], launch, state.device, cache, given, quantize == "incoming", fusion=True)
