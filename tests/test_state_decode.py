"""One decode step of GDN and KDA against the recurrence in float64, and its rounding against that in the cache."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from comparing import assert_same_bits
from formulas import float64
from helpers import DEVICE
from state_helpers import assert_same_states, cache, indices, numbers, rounded, sigmoid, softplus, step

import tq.state

KEY_HEADS, HEADS, VALUES, KEYS = 2, 4, 48, 32
SLOTS = [3, 0, 5, -1, 2, 99]
LIVE = [0, 2, 4]
GATES = {"gdn": [None], "kda": [None, -5.0]}
KINDS = [(kind, bound) for kind, bounds in GATES.items() for bound in bounds]
every_kind = pytest.mark.parametrize(("kind", "bound"), KINDS)
FORMS = [("int8", "head"), ("fp8_e4m3", "value_channel"), ("int8_narrow", "key_channel"), ("int8", "group32")]


@dataclass
class Case:
    """Random activations of a batch, and a cache with other memory between its slots."""

    kind: str
    bound: float | None = None
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    values: int = VALUES
    keys: int = KEYS
    ids: list = field(default_factory=lambda: SLOTS)

    def __post_init__(self) -> None:
        batch, heads = len(self.ids), HEADS
        self.key_heads = KEY_HEADS if self.kind == "gdn" else heads
        self.state, self.memory = cache(6, heads, self.values, self.keys, self.state_dtype, pad=16)
        self.slots = indices(self.ids)
        self.qkv = self.random(batch, 2 * self.key_heads * self.keys + heads * self.values + 8)[:, :-8]
        self.a_log = torch.randn(heads, device=DEVICE)
        channels = () if self.kind == "gdn" else (self.keys,)
        self.dt_bias = torch.randn(heads, *channels, device=DEVICE).flatten()
        self.gate = self.random(batch, heads, *channels)
        self.beta = self.random(batch, heads)
        self.scale = self.keys**-0.5

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(self.dtype)

    def run(self, state: torch.Tensor | None = None, **options) -> torch.Tensor:
        """The outputs [B, heads, values] of a step on `state`, the case's own for None."""
        state = self.state if state is None else state
        if self.kind == "gdn":
            out = torch.full((len(self.ids), 1, HEADS, self.values), torch.nan, dtype=self.dtype, device=DEVICE)
            rest = self.a_log, self.dt_bias, self.scale, state, out, self.slots, True
            made = tq.state.gdn_decode(self.qkv, self.gate, self.beta, *rest, **options)
            assert made[0] is out and made[1] is state
            return out[:, 0]
        rest = self.a_log, self.dt_bias, self.bound, state, self.slots
        made = tq.state.kda_decode(self.qkv, self.gate[None], self.beta[None], *rest, **options)
        assert made[1] is state
        return made[0][0]

    def recurrence(self, request: int, head: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(state, output) in float64."""
        qkv, gate, beta, a_log, bias = numbers(self.qkv, self.gate, self.beta, self.a_log, self.dt_bias)
        q, k, v = np.split(qkv[request], [self.key_heads * self.keys, 2 * self.key_heads * self.keys])
        key_head = head * self.key_heads // HEADS
        q, k = (x.reshape(self.key_heads, self.keys)[key_head] for x in (q, k))
        v = v.reshape(HEADS, self.values)[head]
        x = gate[request, head] + bias.reshape(HEADS, -1).squeeze()[head]
        rate = np.exp(a_log[head])
        log_decay = -rate * softplus(x) if self.bound is None else self.bound * sigmoid(rate * x)
        return step(state, q, k, v, log_decay, sigmoid(beta[request, head]), self.scale)


def close(got: torch.Tensor, want: np.ndarray, dtype: torch.dtype = torch.float32) -> None:
    """Within rounding of sums of some ten numbers of unit size in fp32, and of the result to its dtype."""
    relative = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    assert np.allclose(float64(got), want, rtol=1e-5 + relative, atol=2e-6), np.abs(float64(got) - want).max()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(VALUES, KEYS), (32, 40)])
def test_o25_two_steps_of_the_recurrence(kind, bound, dtype, sizes):
    """Outputs and states of both; zeros for the requests without a slot, and not a byte changed elsewhere."""
    case = Case(kind, bound, dtype, values=sizes[0], keys=sizes[1])
    before, want = case.memory.clone(), float64(case.state)
    for _ in range(2):
        out = case.run()
        for request in range(len(SLOTS)):
            if request not in LIVE:
                assert_same_bits(out[request], torch.zeros_like(out[request]))
                continue
            for head in range(HEADS):
                slot = SLOTS[request]
                want[slot, head], y = case.recurrence(request, head, want[slot, head])
                close(out[request, head], y, dtype)
                close(case.state[slot, head], want[slot, head])
        case.qkv += 0.5
    for slot in (SLOTS[request] for request in LIVE):
        case.memory[1 + slot, : case.state[0].numel()] = before[1 + slot, : case.state[0].numel()]
    assert_same_bits(case.memory, before)


def test_o25_a_square_state_is_not_transposed():
    case = Case("kda", values=32, keys=32)
    want = float64(case.state)
    case.run()
    state, _ = case.recurrence(0, 1, want[SLOTS[0], 1])
    close(case.state[SLOTS[0], 1], state)
    assert np.abs(float64(case.state[SLOTS[0], 1]) - state.T).max() > 0.5


@pytest.mark.parametrize(
    ("kind", "bound", "code", "granularity", "state_dtype"),
    [(*KINDS[i % 3], *form, (torch.float32, torch.bfloat16)[i // 4]) for i, form in enumerate(FORMS * 2)],
)
def test_rounding_inside_is_rounding_before_or_after(kind, bound, code, granularity, state_dtype):
    """Bit for bit: incoming is `qdq_` and then the plain step, outgoing the plain step and then `qdq_`."""
    case = Case(kind, bound, state_dtype=state_dtype)
    options = {"code": code, "granularity": granularity}
    before, plain = case.state.clone(), case.state.clone()
    tq.state.qdq_(plain, case.slots, **options)
    assert_same_states(plain[5], rounded(before[5], code, granularity))
    want = case.run(plain)
    fused = before.clone()
    assert_same_bits(case.run(fused, **options), want)
    assert_same_bits(fused, plain)
    plain, fused = before.clone(), before.clone()
    want = case.run(plain)
    tq.state.qdq_(plain, case.slots, **options)
    assert_same_bits(case.run(fused, quantize="outgoing", **options), want)
    assert_same_bits(fused, plain)


def test_without_normalization():
    case = Case("gdn")
    want = float64(case.state)
    out = torch.empty(len(SLOTS), 1, HEADS, VALUES, device=DEVICE)
    rest = case.a_log, case.dt_bias, 0.25, case.state, out, case.slots
    tq.state.gdn_decode(case.qkv * 0.1, case.gate, case.beta, *rest)
    q, k, v = np.split(float64(case.qkv * 0.1)[0], [KEY_HEADS * KEYS, 2 * KEY_HEADS * KEYS])
    gate, beta, a_log, bias = numbers(case.gate, case.beta, case.a_log, case.dt_bias)
    log_decay = -np.exp(a_log[3]) * softplus(gate[0, 3] + bias[3])
    vectors = q.reshape(-1, KEYS)[1], k.reshape(-1, KEYS)[1], v.reshape(-1, VALUES)[3]
    state, y = step(want[3, 3], *vectors, log_decay, sigmoid(beta[0, 3]), 0.25, normalize=False)
    close(case.state[3, 3], state)
    close(out[0, 0, 3], y)


def test_o24_nan_in_slots_that_are_not_addressed_goes_nowhere():
    case = Case("gdn", ids=[1, 2])
    case.state[:] = torch.nan
    case.state[1:3] = 1.0
    assert case.run(code="int8").isfinite().all()
    assert case.state[1:3].isfinite().all() and case.state[[0, 3, 4, 5]].isnan().all()


def change(name, function):
    def apply(case):
        setattr(case, name, function(getattr(case, name)))

    return apply


BAD = [
    ("gdn", ValueError, "mixed_qkv must have 2 * key heads * 32 + 4 * 48 channels", change("qkv", lambda x: x[:, 1:])),
    ("gdn", ValueError, "mixed_qkv must be [B, channels]", change("qkv", lambda x: x.T.contiguous().T)),
    ("gdn", TypeError, "mixed_qkv must be bfloat16 or float16 or float32", change("qkv", lambda x: x.double())),
    ("gdn", ValueError, "a must have shape (6, 4), got (5, 4)", change("gate", lambda x: x[1:])),
    ("gdn", ValueError, "last stride of b must be 1", change("beta", lambda x: x.T.contiguous().T)),
    ("gdn", ValueError, "A_log must have 4 elements", change("a_log", lambda x: x[1:])),
    ("gdn", ValueError, "the state indices must have shape (6,), got (5,)", change("slots", lambda x: x[1:])),
    ("gdn", ValueError, "heads of initial_state must be dense", change("state", lambda x: x.transpose(2, 3))),
    ("kda", ValueError, "mixed_qkv must have a key head for each of 4", change("qkv", lambda x: x[:, 128:])),
    ("kda", ValueError, "raw_g must have shape (1, 6, 4, 32)", change("gate", lambda x: x[:, :, 1:])),
    ("kda", ValueError, "heads of raw_g must be dense", change("gate", lambda x: x.transpose(1, 2).contiguous().mT)),
    ("kda", ValueError, "dt_bias must have 128 elements", change("dt_bias", lambda x: x[:4])),
    ("kda", ValueError, "A_log must be contiguous", change("a_log", lambda x: x.repeat_interleave(2)[::2])),
    ("kda", TypeError, "the state indices must be int32 or int64", change("slots", lambda x: x.float())),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "error", "message", "change"), BAD, ids=[f"{bad[0]}: {bad[2]}" for bad in BAD])
def test_bad_arguments_change_nothing(kind, error, message, change):
    case = Case(kind)
    before = case.memory.clone()
    change(case)
    with pytest.raises(error, match=re.escape(message)) as caught:
        case.run()
    assert str(caught.value).startswith(f"state.{kind}_decode: ")
    assert_same_bits(case.memory, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "later"}, "quantize must be one of 'incoming', 'outgoing'"),
        ({"code": "int4"}, "code must be one of"),
        ({"code": "int8", "granularity": "row"}, "granularity must be one of"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Case("gdn").run(**options)
