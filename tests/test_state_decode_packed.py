"""Decode steps on packed states and rings against the recurrence in float64, token by token."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from comparing import assert_same_bits
from formulas import float64
from helpers import DEVICE
from state_helpers import indices, scales_of
from test_state_decode import BAD, HEADS, KEYS, KINDS, LIVE, SLOTS, VALUES, Case, close, every_kind

import tq.state
from perf import state_accuracy
from tq.state import PackedState, Ring

FORMS = [("int8", "value_channel"), ("fp8_e4m3", "value_channel"), ("int8", "group32"), ("int8", "head")]
FORMS += [("fp8_e4m3", "key_channel"), ("int8", "tile")]


def packed_of(case: Case, code="int8", granularity="value_channel", **ring) -> PackedState:
    """A packed state of the case's; slots that it has not are NaN."""
    sizes = case.state.shape[0], HEADS, case.values, case.keys
    made = None
    if ring:
        gate = "head" if case.kind == "gdn" else "key_channel"
        made = Ring.zeros(*sizes, gate=gate, key_heads=case.key_heads, device=DEVICE, **ring)
        for each in made.tensors[:3]:
            each.fill_(torch.nan)
    state = PackedState.zeros(*sizes, code=code, granularity=granularity, device=DEVICE, ring=made)
    state.scales.fill_(torch.nan)
    live = [slot for slot in case.ids if 0 < slot < sizes[0]]
    return tq.state.pack_(state, indices(live), case.state[live])


def run(case: Case, state: PackedState, **options) -> torch.Tensor:
    """Outputs [rows, heads, values] of the rows of the case."""
    rows = case.qkv.shape[0]
    if case.kind == "gdn":
        out = torch.full((rows, 1, HEADS, case.values), torch.nan, dtype=case.dtype, device=DEVICE)
        rest = case.a_log, case.dt_bias, case.scale, state, out, case.slots, True
        made = tq.state.gdn_decode_packed(case.qkv, case.gate, case.beta, *rest, **options)
        assert made[0] is out and made[1] is state
        return out[:, 0]
    rest = case.a_log, case.dt_bias, case.bound, state, case.slots
    return tq.state.kda_decode_packed(case.qkv, case.gate[None], case.beta[None], *rest, **options)[0][0]


def redraw(case: Case, rows: int | None = None) -> None:
    """Other activations."""
    rows = rows or len(case.ids)
    case.qkv = case.random(rows, case.qkv.shape[1])
    case.gate, case.beta = case.random(rows, *case.gate.shape[1:]), case.random(rows, HEADS)


def held(state: PackedState) -> np.ndarray:
    """All slots, as numbers; unpacking is tested in test_state_packed.py."""
    slots = indices(list(range(state.codes.shape[0])))
    return float64(tq.state.unpack(state, slots, null_slot=None))


def half_steps(state: PackedState, exact: np.ndarray) -> np.ndarray:
    """The most that a rounded element may be off by: half a unit of its code, and roundings of fp32."""
    scales = scales_of(state)
    unit = 1.0
    if state.codes.dtype != torch.int8:
        with np.errstate(divide="ignore", invalid="ignore"):
            unit = np.exp2(np.maximum(np.floor(np.log2(np.abs(exact / scales))), -6) - 3)
    return unit * scales * 0.5 + 1e-5 * np.abs(exact) + 2e-6


def assert_rounded(state: PackedState, slot: int, exact: np.ndarray) -> None:
    """Slot of the state is `exact` [heads, values, keys], rounded with scales of its own groups."""
    one = replace(state, codes=state.codes[slot, None], scales=state.scales[slot, None], ring=None)
    assert (np.abs(held(one) - exact) <= half_steps(one, exact[None])).all()
    largest = np.abs(exact).max((1, 2))
    most = 127.0 if state.codes.dtype == torch.int8 else 448.0
    assert np.allclose(float64(one.scales).max((0, 2, 3)) * most, largest, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "bound", "code", "granularity", "dtype"),
    [(*KINDS[i % 3], *form, (torch.float32, torch.bfloat16)[i % 2]) for i, form in enumerate(FORMS)]
    + [(*KINDS[(i + 1) % 3], *form, torch.float32) for i, form in enumerate(FORMS)],
)
def test_two_steps(kind, bound, code, granularity, dtype):
    """Outputs of the exact recurrence of what was held, then that rounded once; nothing elsewhere."""
    case = Case(kind, bound, dtype, values=VALUES if granularity != "tile" else 80)
    state = packed_of(case, code, granularity)
    before = [each.clone() for each in state.tensors]
    for _ in range(2):
        old = held(state)
        out = run(case, state)
        for request, slot in enumerate(SLOTS):
            if request not in LIVE:
                assert_same_bits(out[request], torch.zeros_like(out[request]))
                continue
            exact = np.empty_like(old[slot])
            for head in range(HEADS):
                exact[head], y = case.recurrence(request, head, old[slot, head])
                close(out[request, head], y, dtype)
            assert_rounded(state, slot, exact)
        redraw(case)
    others = [slot for slot in range(6) if slot not in [SLOTS[request] for request in LIVE]]
    for each, was in zip(state.tensors, before, strict=True):
        assert_same_bits(each[others].view(torch.uint8), was[others].view(torch.uint8))


@pytest.mark.parametrize(
    ("kind", "bound", "code", "granularity"), [(*kind, *form) for kind, form in zip(KINDS, FORMS, strict=False)]
)
def test_replay_rounds_once_in_a_window(kind, bound, code, granularity):
    """Rings of three, begun apart: outputs and states are those of the exact recurrence since the last rounding."""
    case = Case(kind, bound)
    state = packed_of(case, code, granularity, length=3, dtype=torch.float32)
    exact, counts = held(state), dict.fromkeys(SLOTS, 0)
    ids = list(SLOTS)
    for token in range(6):
        if token == 1:
            case.ids = [3, 0, -1, -1, 2, 99]  # slot 5 pauses for a token
            case.slots = indices(case.ids)
        if token == 2:
            case.ids = ids
            case.slots = indices(ids)
        codes = state.codes.clone()
        out = run(case, state)
        for request, slot in enumerate(case.ids):
            if not 0 < slot < 6:
                assert (out[request] == 0).all()
                continue
            for head in range(HEADS):
                exact[slot, head], y = case.recurrence(request, head, exact[slot, head])
                close(out[request, head], y)
            counts[slot] = (counts[slot] + 1) % 3
            assert (state.ring.counts[slot] == counts[slot]).all()
            if counts[slot]:
                assert_same_bits(state.codes[slot].view(torch.uint8), codes[slot].view(torch.uint8))
            else:
                assert_rounded(state, slot, exact[slot])
                exact[slot] = held(state)[slot]
        live = [slot for slot in case.ids if 0 < slot < 6]
        assert np.allclose(held(state)[live], exact[live], rtol=1e-5, atol=3e-6)
        redraw(case)


def assert_same_slots(mine: PackedState, theirs: PackedState, slots: list[int]) -> None:
    """Codes, scales and counts; the entries that are counted show in what they are unpacked to."""
    for a, b in zip((*mine.tensors[:2], mine.ring.counts), (*theirs.tensors[:2], theirs.ring.counts), strict=True):
        assert_same_bits(a[slots].view(torch.uint8), b[slots].view(torch.uint8))
    assert (held(mine)[slots] == held(theirs)[slots]).all()


@pytest.mark.parametrize(("kind", "bound", "dtype"), [("gdn", None, torch.bfloat16), ("kda", None, torch.float32)])
def test_rejected_tokens_leave_no_trace(kind, bound, dtype):
    """Three drafts of which some are accepted, through several roundings: bit for bit what it is to be given only those
    that are accepted."""
    case = Case(kind, bound, ids=[3, 5, 2])
    options = {"length": 5, "drafts": 3, "dtype": dtype}
    drafted, told = packed_of(case, **options), packed_of(case, **options)
    rounded = 0
    for accepted in ([3, 1, 0], [0, 3, 2], [2, 3, 3]):
        redraw(case, 9)
        before = drafted.codes.clone()
        whole = run(case, drafted, verify=3)
        assert_same_slots(drafted, told, case.ids)
        assert tq.state.commit_(drafted, case.slots, indices(accepted)) is drafted
        for i, taken in enumerate(accepted):
            if taken:
                one = Case(kind, bound, ids=case.ids[i : i + 1])
                one.a_log, one.dt_bias = case.a_log, case.dt_bias
                rows = slice(3 * i, 3 * i + taken)
                one.qkv, one.gate, one.beta = case.qkv[rows], case.gate[rows], case.beta[rows]
                assert_same_bits(whole[rows], run(one, told, verify=taken))
                tq.state.commit_(told, one.slots, indices([taken]))
        assert_same_slots(drafted, told, case.ids)
        assert (drafted.ring.counts[case.ids] <= 2).all()
        rounded += int((drafted.codes != before)[case.ids].flatten(1).any(1).sum())
    assert rounded == 4


def test_a_step_is_one_token_verified_and_accepted():
    case = Case("gdn", ids=[2])
    step, told = packed_of(case, length=2), packed_of(case, length=2)
    for _ in range(3):
        assert_same_bits(run(case, step), run(case, told, verify=1))
        tq.state.commit_(told, case.slots, indices([1]))
        assert_same_slots(step, told, [2])
        redraw(case)


@every_kind
def test_verify_is_the_recurrence(kind, bound):
    """Outputs of four drafts in order from a state with entries in its ring; then three of them are accepted."""
    case = Case(kind, bound, ids=[2, 4])
    state = packed_of(case, length=8, drafts=4, dtype=torch.float32)
    exact = held(state)
    run(case, state)
    for request, slot in enumerate(case.ids):
        for head in range(HEADS):
            exact[slot, head], _ = case.recurrence(request, head, exact[slot, head])
    redraw(case, 8)
    out = run(case, state, verify=4)
    for request, slot in enumerate(case.ids):
        for head in range(HEADS):
            draft = exact[slot, head]
            for token in range(4):
                draft, y = case.recurrence(4 * request + token, head, draft)
                close(out[4 * request + token, head], y)
                if token == 2:
                    exact[slot, head] = draft
    tq.state.commit_(state, case.slots, indices([3, 3], torch.int64))
    assert (state.ring.counts[[2, 4]] == 4).all()
    assert np.allclose(held(state)[[2, 4]], exact[[2, 4]], rtol=1e-5, atol=3e-6)
    tq.state.flush_(state, case.slots)
    assert (state.ring.counts == 0).all()
    for slot in case.ids:
        assert_rounded(state, slot, exact[slot])
    again = [each.clone() for each in state.tensors]
    tq.state.flush_(state, case.slots)
    for each, was in zip(state.tensors, again, strict=True):
        assert_same_bits(each.view(torch.uint8), was.view(torch.uint8))


def test_accepted_numbers_out_of_range_and_slots_that_are_none():
    case = Case("gdn", ids=[2, 3, 0, -1, 99])
    state = packed_of(case, length=8, drafts=2)
    before = state.codes.clone()
    redraw(case, 10)
    run(case, state, verify=2)
    tq.state.commit_(state, case.slots, indices([-7, 100, 2, 2, 2]))
    assert state.ring.counts[:, 0, 0].tolist() == [0, 0, 0, 2, 0, 0]
    assert_same_bits(state.codes, before)


@every_kind
@pytest.mark.parametrize("ring", [{}, {"length": 2}])
def test_decays_that_leave_nothing(kind, bound, ring):
    """Where exp(g) is 0 in fp32 the state is forgotten, and no 0/0 or infinity comes of it."""
    case = Case(kind, bound, ids=[1, 2])
    case.a_log += 8.0
    case.gate += 4.0
    state = packed_of(case, **ring)
    exact = held(state)
    for _ in range(3):
        out = run(case, state)
        for request, slot in enumerate(case.ids):
            for head in range(HEADS):
                exact[slot, head], y = case.recurrence(request, head, exact[slot, head])
                assert np.isfinite(float64(out)).all()
                assert np.abs(float64(out[request, head]) - y).max() < 0.02 * max(np.abs(y).max(), 1.0)
        redraw(case)


def test_nan_stays_in_its_value_channel():
    case = Case("gdn", ids=[1])
    case.qkv[0, 2 * KEY_HEADS_KEYS + 7] = torch.nan  # v of channel 7 of head 0
    state = packed_of(case)
    out = run(case, state)
    after = held(state)
    assert out[0, 0].isnan().nonzero().flatten().tolist() == [7]
    assert np.isnan(after[1, 0]).all(1).nonzero()[0].tolist() == [7] and np.isfinite(after[1, 1:]).all()


END = 16  # tokens, of which the last eight count


@pytest.mark.parametrize("every", [1, 4])
def test_the_simulation_is_of_these_kernels(every):
    """perf/state_accuracy.py and the kernels err alike on the same stream of GDN."""
    stream = state_accuracy.make_stream("gdn", 5, END)
    formats = [state_accuracy.Format(None), state_accuracy.Format("int8", "value_channel", every, ring=every > 1)]
    found = state_accuracy.simulate(stream, formats, lambda t: None)
    wanted = state_accuracy.errors(found)[END][1].numpy()
    size = state_accuracy.SIZE
    ring = Ring.zeros(2, HEADS, size, size, length=every, device=DEVICE) if every > 1 else None
    state = PackedState.zeros(2, HEADS, size, size, device=DEVICE, ring=ring)
    qkv = torch.cat([each.flatten(1) for each in (stream.q, stream.k, stream.v)], 1).float().to(DEVICE)
    rate = -stream.decay[:, :, 0].log()
    gate, beta = torch.log(torch.expm1(rate)), torch.logit(stream.beta)
    zeros = torch.zeros(HEADS, device=DEVICE)
    outs = []
    for t in range(END):
        out = torch.empty(1, 1, HEADS, size, device=DEVICE)
        a, b = (each[t, None].float().to(DEVICE) for each in (gate, beta))
        tq.state.gdn_decode_packed(qkv[t, None], a, b, zeros, zeros, 1.0, state, out, indices([1]))
        outs.append(float64(out[0, 0]))
    exact = found[END][0].numpy()
    mine = np.stack(outs[-exact.shape[0] :])
    error = np.linalg.norm(mine - exact, axis=(0, 2)) / np.linalg.norm(exact, axis=(0, 2))
    # Not equal: where u or a code lies near the middle of two numbers, fp32 may round it otherwise than float64.
    assert (np.abs(error / wanted - 1.0) < 0.05).all(), (error, wanted)


KEY_HEADS_KEYS = 2 * KEYS


@pytest.mark.parametrize(("kind", "error", "message", "change"), BAD, ids=[f"{bad[0]}: {bad[2]}" for bad in BAD])
def test_bad_arguments_change_nothing(kind, error, message, change):
    case = Case(kind)
    if "initial_state" in message:
        return
    state = packed_of(case)
    before = [each.clone() for each in state.tensors]
    change(case)
    with pytest.raises(error, match=re.escape(message)) as caught:
        run(case, state)
    assert str(caught.value).startswith(f"state.{kind}_decode_packed: ")
    for each, was in zip(state.tensors, before, strict=True):
        assert_same_bits(each.view(torch.uint8), was.view(torch.uint8))


def test_bad_rings():
    case = Case("gdn")
    with pytest.raises(NotImplementedError, match="verify must be None for a state without a ring, got 2"):
        run(case, packed_of(case), verify=2)
    with pytest.raises(ValueError, match="verify must be 1 to the ring's 2 drafts, got 3"):
        run(case, packed_of(case, length=4, drafts=2), verify=3)
    with pytest.raises(ValueError, match=r"the state indices must have shape \(3,\), got \(6,\)"):
        run(case, packed_of(case, length=4, drafts=2), verify=2)
    other = Case("kda")
    with pytest.raises(ValueError, match="the ring must have 2 key heads and 1 decays of a head, got 4 and 32"):
        run(case, packed_of(other, length=4))
    for call in (lambda s: tq.state.commit_(s, case.slots, case.slots), lambda s: tq.state.flush_(s, case.slots)):
        with pytest.raises(NotImplementedError, match="the state must have a ring"):
            call(packed_of(case))
    with pytest.raises(TypeError, match="accepted must be int32 or int64"):
        tq.state.commit_(packed_of(case, length=4), case.slots, case.slots.float())
