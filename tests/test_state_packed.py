"""Packed states: what a slot holds, the ways in and out, and copies, against numpy; and what must stay as it is."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from comparing import assert_same_bits
from formulas import float64
from helpers import DEVICE
from state_helpers import LARGEST, SHARED, TINY, assert_same_states, indices, rounded, scales_of

import tq.state
from tq.state import PackedState, Ring

HEADS, VALUES, KEYS = 2, 80, 24  # no powers of two, and groups that are not full
CODES = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
every_code = pytest.mark.parametrize("code", CODES)


def paged(slots: int = 5, code: str = "int8", granularity: str = "value_channel", ring: bool = False, heads=HEADS):
    """(state, memory): all of a slot in one page of bytes, pages of 0xFF with other memory between and around them."""
    state = PackedState.zeros(slots, heads, VALUES, KEYS, code=code, granularity=granularity)
    if ring:
        made = Ring.zeros(slots, heads, VALUES, KEYS, length=4, gate="key_channel", dtype=torch.bfloat16)
        state = PackedState(state.codes, state.scales, granularity, made)
    size = sum(-(-each[0].nbytes // 16) * 16 for each in state.tensors) + 48
    memory = torch.full((slots + 2, size), 0xFF, dtype=torch.uint8, device=DEVICE)
    views, start = [], 0
    for each in state.tensors:
        span = memory[1:-1, start : start + each[0].nbytes]
        views.append(span.view(each.dtype).unflatten(1, each.shape[1:]))
        start += -(-each[0].nbytes // 16) * 16
    return PackedState(*views[:2], granularity, Ring(*views[2:]) if ring else None), memory


def numbers(state: PackedState) -> np.ndarray:
    """codes * scales in float64, group by group."""
    return float64(state.codes if state.codes.dtype == torch.int8 else state.codes.float()) * scales_of(state)


@every_code
@pytest.mark.parametrize("granularity", SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_packed(code, granularity, dtype):
    """Codes and scales in two slots are those of the rounded state, no other byte changes, and back it is the same."""
    state, memory = paged(5, code, granularity)
    assert state.codes.dtype == CODES[code]
    values = torch.randn(2, HEADS, VALUES, KEYS) * torch.exp2(torch.randint(-4, 5, (VALUES, KEYS)))
    values = values.to(DEVICE).to(dtype)
    assert tq.state.pack_(state, indices([3, 1]), values) is state
    want = rounded(values.float(), code, granularity)
    got = numbers(state)[[3, 1]]
    # The scale is a reciprocal of the rounded scale: 3 roundings of fp32. A code off by one would be off by 1/127.
    assert (np.abs(got - float64(want)) <= 2.0**-22 * np.abs(got)).all() and np.abs(got).max() > 1.0
    back = tq.state.unpack(state, indices([3, 1]))
    assert back.dtype == torch.float32 and (float64(back) == got.astype(np.float32)).all()
    if code == "fp8_e4m3":
        assert_same_bits(back, want)
    rest = memory.clone()
    for slot in (3, 1):
        for each in state.tensors:
            each[slot] = torch.full_like(each[slot].view(torch.uint8), 0xFF).view(each.dtype)
    assert (memory == 0xFF).all() and (rest != 0xFF).any()


@every_code
def test_every_class_of_amax(code):
    """A value channel of each: what is too small is zero, what is no number is NaN, and neighbours are as they are."""
    state = PackedState.zeros(2, 1, 7, 4, code=code, device=DEVICE)
    small = [TINY, -TINY, TINY / 2, 0.0]
    rows = [
        small,
        [0.0] * 4,
        [np.inf, 1, 2, 0],
        [1, -2, 3, np.nan],
        [1e30, -3e29, 0, 1],
        [1, -0.5, 0.25, 2],
        [3e38] * 4,
    ]
    values = torch.tensor(rows, dtype=torch.float32, device=DEVICE)[None, None]
    back = tq.state.unpack(tq.state.pack_(state, indices([1]), values), indices([1]))[0, 0]
    assert (back[:2] == 0).all() and back[2:4].isnan().all()
    want = rounded(values[0, 0, 4:], code, "value_channel")
    assert (np.abs(float64(back[4:]) - float64(want)) <= 2.0**-22 * np.abs(float64(want))).all()


def test_int8_has_no_minus_128_and_rounds_to_even():
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -126.5, -127.0, -0.5, 63.5], device=DEVICE).view(1, 1, 1, 8)
    state = PackedState.zeros(1, 1, 1, 8, device=DEVICE)
    tq.state.pack_(state, indices([0]), values, null_slot=None)
    assert state.codes.flatten().tolist() == [127, 0, 2, 2, -126, -127, 0, 64] and float(state.scales) == 1.0


def test_every_int8_code_comes_back():
    codes = torch.arange(-128, 128).to(torch.int8).view(1, 1, 16, 16).to(DEVICE)
    state = PackedState(codes, torch.full((1, 1, 16, 1), 0.5, device=DEVICE))
    back = tq.state.unpack(state, indices([0]), null_slot=None)
    assert (float64(back) == float64(codes) / 2).all()


def test_every_e4m3_code_comes_back():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).to(DEVICE).view(torch.float8_e4m3fn)
    state = PackedState(codes, torch.ones(1, 1, 16, 1, device=DEVICE))
    back = tq.state.unpack(state, indices([0]), null_slot=None)
    assert_same_states(back, codes.float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_that_are_none_and_slots_of_several_requests(dtype):
    """Null, negative and too large ones are skipped; of several requests with one slot the first is written."""
    state, memory = paged(5, ring=True)
    ids = indices([2, 0, -1, 5, 2, 4, 2**30], dtype)
    values = torch.randn(7, HEADS, VALUES, KEYS, device=DEVICE)
    before = memory.clone()
    tq.state.pack_(state, ids, values)
    assert_same_bits(memory[[0, 1, 2, 4, 6]], before[[0, 1, 2, 4, 6]])
    live = {0: 2, 5: 4}
    back = tq.state.unpack(state, ids)
    for request in range(7):
        source = {4: 0}.get(request, request)
        want = rounded(values[source], "int8", "value_channel") if source in live else torch.zeros_like(values[0])
        assert (np.abs(float64(back[request]) - float64(want)) <= 2.0**-22 * np.abs(float64(want))).all()
    assert (state.ring.counts[[2, 4]] == 0).all() and (state.ring.counts[[0, 1, 3]] == 0xFF).all()
    tq.state.pack_(state, indices([0]), values[:1], null_slot=None)
    assert_same_bits(tq.state.unpack(state, indices([0]), null_slot=None)[0], back[0])


@every_code
def test_a_fresh_request_reads_nothing(code):
    """NaN in codes, scales and ring of the last tenant: zeros for who has no state, and not a byte changed."""
    state, memory = paged(4, code, ring=True)
    values = torch.randn(1, HEADS, VALUES, KEYS, device=DEVICE)
    tq.state.pack_(state, indices([3]), values)
    before = memory.clone()
    present = torch.tensor([False, True], device=DEVICE)
    out = torch.full((2, HEADS, VALUES, KEYS), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    assert tq.state.unpack(state, indices([1, 3]), has_initial_state=present, out=out) is out
    assert (out[0] == 0).all() and out[1].isfinite().all()
    assert_same_bits(out[1], tq.state.unpack(state, indices([3]))[0].bfloat16())
    assert_same_bits(memory, before)
    assert tq.state.unpack(state, indices([1]))[0].isnan().any()  # there was something to read


def test_accepted_tokens_choose_the_column():
    state, _ = paged(6)
    values = torch.randn(2, HEADS, VALUES, KEYS, device=DEVICE)
    ids, accepted = indices([[1, 2], [3, 4]]), indices([2, 1])
    tq.state.pack_(state, ids, values, num_accepted_tokens=accepted)
    back = tq.state.unpack(state, indices([2, 3]))
    assert_same_bits(tq.state.unpack(state, ids, num_accepted_tokens=accepted), back)
    assert (np.abs(float64(back) - float64(rounded(values, "int8", "value_channel"))) < 1e-6).all()


@every_code
@pytest.mark.parametrize("ring", [False, True])
def test_copies(code, ring):
    """Every byte of a slot, NaN too; the first of two sources; nothing for targets that are none."""
    state, memory = paged(6, code, ring=ring)
    memory.random_(0, 256)
    before = memory.clone()
    assert tq.state.copy_(state, indices([1, 2, 3, 1]), indices([4, 5, -1, 5])) is state
    for each in state.tensors:
        parts = each.flatten(1).view(torch.uint8) if each.dtype.itemsize == 1 else each.contiguous().view(torch.uint8)
        assert_same_bits(parts[4], parts[1])
        assert_same_bits(parts[5], parts[2])
    kept = [0, 1, 2, 3, 4, 7]
    assert_same_bits(memory[kept], before[kept])


def test_bytes_of_a_slot():
    """At most 0.26 of fp32 for heads of 128 x 128."""
    state = PackedState.zeros(1, 4, 128, 128)
    assert state.slot_bytes == 4 * (128 * 128 + 128 * 4) <= 0.26 * 4 * 4 * 128 * 128
    ring = Ring.zeros(1, 4, 128, 128, length=16, key_heads=2)
    entries = 16 * (2 * 128 * 2 + 4 * 128 * 2 + 4 * 4) + 4 * 128
    assert PackedState.zeros(1, 4, 128, 128, ring=ring).slot_bytes == state.slot_bytes + entries


def other(name, value):
    """The arguments of PackedState with another one."""
    return lambda s: PackedState(**{"codes": s.codes, "scales": s.scales, "ring": s.ring, name: value(s)})


def other_ring(name, value):
    fields = ("keys", "updates", "decays", "counts", "drafts")
    return other("ring", lambda s: Ring(**{f: value(s.ring) if f == name else getattr(s.ring, f) for f in fields}))


BAD = [
    (TypeError, "the state must be a PackedState, got Tensor", lambda s: s.codes),
    (TypeError, "codes must be int8 or float8_e4m3fn", other("codes", lambda s: s.codes.float())),
    (ValueError, "heads of codes must be dense", other("codes", lambda s: s.codes.transpose(1, 2))),
    (TypeError, "scales must be float32", other("scales", lambda s: s.scales.half())),
    (ValueError, "scales must have shape (4, 2, 3, 24), got (4, 2, 80, 1)", other("granularity", lambda s: "group32")),
    (ValueError, "granularity must be one of", other("granularity", lambda s: "row")),
    (ValueError, "ring.keys must be [4, key heads, L, 24]", other_ring("keys", lambda r: r.keys[0])),
    (ValueError, "dividing 2, got shape (4, 3,", other_ring("keys", lambda r: r.keys.repeat(1, 2, 1, 1)[:, :3])),
    (TypeError, "ring.updates must be bfloat16", other_ring("updates", lambda r: r.updates.float())),
    (ValueError, "ring.updates must have shape (4, 2, 4, 80)", other_ring("updates", lambda r: r.updates[:, :, :3])),
    (TypeError, "ring.decays must be float32", other_ring("decays", lambda r: r.decays.bfloat16())),
    (ValueError, "ring.decays must be [4, 2, 4, 1 or 24]", other_ring("decays", lambda r: r.decays[..., :2])),
    (ValueError, "ring.counts must have shape (4, 2, 80)", other_ring("counts", lambda r: r.counts[:, :1])),
    (ValueError, "ring.drafts must be 1 to 4", other_ring("drafts", lambda r: 5)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "change"), BAD, ids=[bad[1] for bad in BAD])
def test_bad_states_change_nothing(error, message, change):
    state, memory = paged(4, ring=True)
    before = memory.clone()
    values = torch.ones(1, HEADS, VALUES, KEYS, device=DEVICE)
    for name, call in {
        "pack_": lambda s: tq.state.pack_(s, indices([1]), values),
        "unpack": lambda s: tq.state.unpack(s, indices([1])),
        "copy_": lambda s: tq.state.copy_(s, indices([1]), indices([2])),
        "flush_": lambda s: tq.state.flush_(s, indices([1])),
    }.items():
        with pytest.raises(error, match=re.escape(message)) as caught:
            call(change(state))
        assert str(caught.value).startswith(f"state.{name}: ")
    assert_same_bits(memory, before)


def test_bad_arguments():
    state, memory = paged(4)
    before = memory.clone()
    values = torch.ones(2, HEADS, VALUES, KEYS, device=DEVICE)
    with pytest.raises(ValueError, match=r"values must have shape \(1, 2, 80, 24\)"):
        tq.state.pack_(state, indices([1]), values)
    with pytest.raises(ValueError, match=r"sources must have shape \(1,\)"):
        tq.state.copy_(state, indices([1, 2]), indices([3]))
    with pytest.raises(TypeError, match="sources must be int32 or int64"):
        tq.state.copy_(state, indices([1]).float(), indices([3]))
    with pytest.raises(ValueError, match="code must be one of"):
        PackedState.zeros(1, 1, 8, 8, code="int4")
    with pytest.raises(ValueError, match="gate must be one of"):
        Ring.zeros(1, 1, 8, 8, gate="row")
    assert_same_bits(memory, before)
    assert set(CODES) < set(LARGEST)
