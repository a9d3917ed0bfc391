"""Rounding of recurrent states in a cache, against numpy and bit for bit, and everything that must stay as it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comparing import assert_same_bits, bits
from helpers import DEVICE
from state_helpers import (
    DTYPES,
    FORMS,
    HEADS,
    KEYS,
    LARGEST,
    LAYOUTS,
    SHARED,
    TINY,
    VALUES,
    assert_same_states,
    cache,
    indices,
    rounded,
)
from test_codes import on_device
from torch.utils._python_dispatch import TorchDispatchMode

import tq.state
from tq.kernels.codes import INT8, INT8_NARROW
from tq.state import bind, qdq

every_code = pytest.mark.parametrize("code", LARGEST)


def test_every_format_has_its_oracle():
    assert set(tq.state.FORMATS) == set(LARGEST) and set(tq.state.GRANULARITIES) == set(SHARED)


@pytest.mark.parametrize(
    ("granularity", "layout", "code", "dtype", "part"),
    [(*form, bind.Tuning().part) for form in FORMS] + [(*form, 256) for form in FORMS[::3]],
)
def test_rounds_the_slots_it_is_given(granularity, layout, code, dtype, part, monkeypatch):
    """Two of four slots, whose groups have magnitudes of their own, with other memory between and around them; by one
    program a head and by several."""
    monkeypatch.setattr(bind, "tuning", bind.Tuning(part=part))
    state, memory = cache(4, HEADS, *LAYOUTS[layout], dtype=dtype, pad=40)
    state *= torch.exp2(torch.randint(-4, 5, state.shape[2:], device=DEVICE)).to(dtype)
    before = memory.clone()
    want = rounded(state[[2, 1]], code, granularity, layout)
    options = {"code": code, "granularity": granularity, "layout": layout}
    assert tq.state.qdq_(state, indices([2, 1]), **options) is state
    assert_same_states(state[[2, 1]], want, options)
    assert not torch.equal(bits(state[1]), bits(before[2, : state[1].numel()].view(state[1].shape)))
    state[[2, 1]] = before[[3, 2], : state[0].numel()].view(want.shape)
    assert_same_bits(memory, before, "memory beside the two slots")


SPECIAL = {
    "zero": [0.0, -0.0],
    "subnormal": [1e-40, -1e-45, 0.0],
    "just flushed": [TINY, -TINY, TINY / 2],
    "just kept": [np.nextafter(TINY, np.float32(1)), -TINY, TINY / 2],
    "small": [1e-6, -3e-7, 0.0],
    "ties of int8": [127.0, 0.5, 1.5, 2.5, -0.5, -126.5, 63.5],
    "ties of e4m3": [448.0, 17.0, 19.0, -(2.0**-10), 3 * 2.0**-10, 1.0625],
    "large": [1e30, -3e29, 1e20],
    "largest": [np.finfo(np.float32).max, -1e38, 1.0],
    "infinity": [np.inf, 1.0, -2.0],
    "minus infinity": [-np.inf, 1.0],
    "NaN": [np.nan, 1.0, -2.0],
    "NaN and infinity": [np.nan, np.inf],
}


@every_code
def test_every_class_of_amax(code):
    """One head of each, all in one call: none of them changes its neighbours."""
    state = torch.zeros(2, len(SPECIAL), 4, 8)
    for i, values in enumerate(SPECIAL.values()):
        state[1, i].view(-1)[: len(values)] = torch.tensor(values)
        state[1, i].view(-1)[-len(values) :] = -torch.tensor(values)
    want = rounded(state[1], code)
    for i, name in enumerate(SPECIAL):
        bad = name in ("infinity", "minus infinity", "NaN", "NaN and infinity")
        flushed = name in ("zero", "subnormal", "just flushed")
        assert want[i].isnan().all() == bad and (want[i] == 0).all() == flushed, name
    state = state.to(DEVICE)
    tq.state.qdq_(state, indices([1]), code=code)
    for i, name in enumerate(SPECIAL):
        assert_same_states(state[1, i].cpu(), want[i], name)


@every_code
def test_a_second_rounding_changes_no_code(code):
    """What is at amax stays there, so the scale moves by some roundings of fp32 at most, and no element with it."""
    state, _ = cache(2, HEADS, 64, 32)
    tq.state.qdq_(state, indices([1]), code=code)
    once = state[1].clone()
    tq.state.qdq_(state, indices([1]), code=code)
    assert ((state[1] - once).abs() <= 2.0**-21 * once.abs()).all()


@pytest.mark.parametrize(("code", "low"), [(INT8, -128), (INT8_NARROW, -127)])
def test_int8_codes(code, low):
    """Ties to even, both ends, and what lies beyond them."""
    values = np.float32(
        [0.5, 1.5, -0.5, -1.5, 126.5, 127.4, 1e30, np.inf, -126.5, -127.4, -127.6, -128.0, -1e30, -np.inf]
    )
    want = np.clip(np.rint(values.astype(np.float64)), low, 127).astype(np.int8)
    for got in (on_device(code.encode, values, torch.uint8), code.reference_encode(torch.from_numpy(values))):
        assert (got.cpu().numpy().view(np.int8) == want).all()
    assert (on_device(code.decode, want.view(np.uint8), torch.float32).cpu().numpy() == want).all()


def test_the_full_range_has_no_value_that_the_narrow_one_has_not():
    state, _ = cache(3, 1, 64, 64)
    narrow = state.clone()
    tq.state.qdq_(state, indices([1, 2]), code="int8")
    tq.state.qdq_(narrow, indices([1, 2]), code="int8_narrow")
    assert_same_bits(state, narrow)


@pytest.mark.skipif(DEVICE == "cuda", reason="the file is in memory of the CPU")
def test_slots_further_apart_than_32_bits_count(tmp_path):
    """Three slots over 8 GiB of a file of which almost nothing is there."""
    apart, shape = 1 << 30, (HEADS, 8, 16)
    memory = torch.from_file(str(tmp_path / "states"), shared=True, size=2 * apart + 256, dtype=torch.float32)
    state = memory.as_strided((3, *shape), (apart, 128, 16, 1))
    state[1:] = torch.randn(2, *shape)
    want = rounded(state[[2, 1]], "int8")
    tq.state.qdq_(state, torch.tensor([2, 1]))
    assert_same_bits(state[[2, 1]], want)


def test_a_slot_of_several_requests_is_rounded_once():
    """As often as it is given, also further apart than requests are compared at a time."""
    state, _ = cache(40, 1, 2, 8)
    once, ids = state.clone(), torch.randint(1, 40, (264,), generator=torch.Generator().manual_seed(3))
    tq.state.qdq_(once, ids.unique().to(DEVICE))
    tq.state.qdq_(state, ids.to(DEVICE))
    assert_same_bits(state, once)


def test_of_several_requests_with_a_slot_the_first_is_scattered():
    state, _ = cache(4, 1, 2, 8)
    values = torch.randn(4, 1, 2, 8, device=DEVICE)
    want = state.clone()
    want[2], want[3] = values[0], values[2]
    tq.state.scatter_(state, indices([2, 2, 3, 2]), values)
    assert_same_bits(state, want)


def test_only_a_null_slot_that_is_named_is_skipped():
    state, _ = cache(3, 1, 8, 8)
    before = state.clone()
    tq.state.qdq_(state, indices([0, 1]), null_slot=1)
    assert_same_bits(state[1:], before[1:])
    assert_same_bits(state[0], rounded(before[0], "int8"))
    tq.state.qdq_(state, indices([1]), null_slot=None)
    assert_same_bits(state[1], rounded(before[1], "int8"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beside", ["cache", "fp32"])
def test_gather_and_scatter_are_rounding_in_place_and_a_copy(dtype, beside):
    other = dtype if beside == "cache" else torch.float32
    state, memory = cache(5, HEADS, VALUES, KEYS, dtype, pad=8)
    ids, options = indices([3, 1]), {"code": "fp8_e4m3", "granularity": "group32"}
    in_place = state.clone()
    tq.state.qdq_(in_place, ids, **options)
    out = torch.empty(2, HEADS, VALUES, KEYS, dtype=other, device=DEVICE)
    assert tq.state.gather(state, ids, out=out, **options) is out
    assert_same_bits(out, in_place[[3, 1]].to(other))
    assert_same_bits(tq.state.gather(state, ids), state[[3, 1]])
    # Values come in the precision they were computed in, and are rounded to the cache's before anything else.
    values = torch.randn(out.shape, device=DEVICE).to(other)
    before = memory.clone()
    want = state.clone()
    want[[3, 1]] = values.to(dtype)
    tq.state.qdq_(want, ids, **options)
    assert tq.state.scatter_(state, ids, values, **options) is state
    assert_same_bits(state, want)
    state[[3, 1]] = before[[4, 2], : state[0].numel()].view(values.shape)
    assert_same_bits(memory, before)


class Launches:
    """Stands where the kernel stands and counts."""

    count = 0

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **options):
        self.count += 1


class Operators(TorchDispatchMode):
    """The torch operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


def test_one_launch_without_allocation_or_synchronization(monkeypatch):
    """Of torch's operators only those that look at a tensor another way run, so a graph can capture all of it."""
    launches = Launches()
    monkeypatch.setattr(qdq, "move_kernel", launches)
    state, _ = cache(4, HEADS, 8, 16)
    ids, accepted = indices([[1, 2], [3, 0]]), indices([1, 2])
    has_state, beside = torch.tensor([True, False], device=DEVICE), torch.zeros(2, HEADS, 8, 16, device=DEVICE)
    with Operators() as operators:
        tq.state.qdq_(state, ids, num_accepted_tokens=accepted, has_initial_state=has_state)
        tq.state.gather(state, ids[:, 0], has_initial_state=has_state, out=beside)
        tq.state.scatter_(state, ids[:, 1], beside, code="int8")
    assert launches.count == 3
    assert operators.names <= {"select", "slice", "view", "alias", "detach"}


@pytest.mark.parametrize("batch", [0, 1])
def test_empty_batches_and_caches(batch):
    empty = torch.zeros(0, HEADS, 8, 8, device=DEVICE)
    ids = indices([1] * batch)
    tq.state.qdq_(empty, ids)
    assert tq.state.gather(empty, ids).abs().sum() == 0
    assert tq.state.check(empty, ids).worst_ulps == 0.0
