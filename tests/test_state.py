"""Rounding of recurrent states in a cache, against numpy and bit for bit, and everything that must stay as it is."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from comparing import assert_same_bits, bits
from formulas import float64
from helpers import DEVICE
from state_helpers import LARGEST, SHARED, TINY, assert_same_states, cache, indices, rounded
from test_codes import on_device
from torch.utils._python_dispatch import TorchDispatchMode

import tq.state
from tq.kernels.codes import INT8, INT8_NARROW
from tq.state import bind, qdq

HEADS, VALUES, KEYS = 2, 80, 24  # no powers of two; more values than a tile has
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = {"value_first": (VALUES, KEYS), "key_first": (KEYS, VALUES)}
# Every granularity in both layouts, codes and dtypes in turn so that all pairs of them come.
FORMS = [
    (granularity, layout, list(LARGEST)[(i + j) % 3], DTYPES[(i + 2 * j) % 3])
    for i, granularity in enumerate(SHARED)
    for j, layout in enumerate(LAYOUTS)
]
every_code = pytest.mark.parametrize("code", LARGEST)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [[3, -1, 5, -1], [-1, -1], [0, 5], [8, 3, 2**20], [-(2**31), 2**31 - 1]])
def test_o23_negative_null_and_too_large_slots(dtype, ids):
    pool = torch.full((12, 2, 8, 16), 777.0, device=DEVICE)
    state = pool[2:10]
    state.copy_(torch.randn(state.shape))
    before = pool.clone()
    live = [slot for slot in ids if 0 < slot < 8]
    before[2:10][live] = rounded(state[live], "int8") if live else state[live]
    tq.state.qdq_(state, indices(ids, dtype))
    assert_same_bits(pool, before)
    gathered = tq.state.gather(state, indices(ids, dtype))
    want = torch.stack([state[slot] if slot in live else torch.zeros_like(state[0]) for slot in ids])
    assert_same_bits(gathered, want)
    tq.state.scatter_(state, indices(ids, dtype), torch.full_like(gathered, 5.0))
    before[2:10][live] = 5.0
    assert_same_bits(pool, before)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_o23_accepted_tokens_choose_the_column(ids_dtype):
    """0 accepted, more than there are columns, and numbers that would be another row's slots are skipped."""
    state, _ = cache(16, 1, 8, 8)
    before = state.clone()
    ids = indices([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15], [0, -1, 15]], ids_dtype)
    accepted = indices([1, 3, 0, 4, 2, 2])
    for wide in (torch.zeros(6, 8, dtype=ids_dtype, device=DEVICE)[:, ::2][:, :3].copy_(ids), ids):
        state.copy_(before)
        tq.state.qdq_(state, wide, num_accepted_tokens=accepted)
        live = [1, 6, 14]
        want = before.clone()
        want[live] = rounded(before[live], "int8")
        assert_same_bits(state, want)
    gathered = tq.state.gather(before, ids, num_accepted_tokens=accepted.long())
    assert [float(row.abs().sum()) > 0 for row in gathered] == [True, True, False, False, True, False]
    assert_same_bits(gathered[[0, 1, 4]], before[live])


@every_code
def test_o24_fresh_request_on_a_dirty_slot(code):
    """What the last tenant left, NaN included, is neither read nor changed; gathered, it is zero."""
    pool = torch.full((5, HEADS, 16, 8), torch.nan, device=DEVICE)
    pool[3] = torch.randn(HEADS, 16, 8)
    before = pool.clone()
    has_state = torch.tensor([False, True], device=DEVICE)
    gathered = tq.state.gather(pool, indices([1, 3]), code=code, has_initial_state=has_state)
    assert_same_bits(pool, before)
    assert_same_bits(gathered, torch.stack([torch.zeros_like(pool[0]), rounded(before[3], code)]))
    tq.state.qdq_(pool, indices([1, 3]), code=code, has_initial_state=has_state)
    before[3] = rounded(before[3], code)
    assert_same_bits(pool, before)
    tq.state.scatter_(pool, indices([1, 3]), gathered)
    before[[1, 3]] = gathered
    assert_same_bits(pool, before)


@pytest.mark.parametrize("varying", ["values", "keys"])
@pytest.mark.parametrize("size", [(64, 64), (64, 32)])
@every_layout
def test_o25_the_axis_that_shares_a_scale(varying, size, layout):
    """Magnitudes 2^-8 to 2^8 along one axis: scales along it keep every channel, scales across it lose the small."""
    values, keys = size
    magnitude = torch.exp2(torch.linspace(-8, 8, values if varying == "values" else keys))
    head = torch.sign(torch.randn(values, keys)) * (1.0 + torch.rand(values, keys))
    head *= magnitude[:, None] if varying == "values" else magnitude[None, :]
    by = {"values": "value_channel", "keys": "key_channel"}
    worst = {}
    for axis, granularity in by.items():
        state = head if layout == "value_first" else head.T
        state = state[None, None].clone(memory_format=torch.contiguous_format).to(DEVICE)
        tq.state.qdq_(state, indices([0]), granularity=granularity, layout=layout, null_slot=None)
        back = state[0, 0].cpu() if layout == "value_first" else state[0, 0].cpu().T
        worst[axis] = float(((back - head).abs() / head.abs()).max())
    other = "keys" if varying == "values" else "values"
    assert worst[varying] < 2 / 127 and worst[other] > 0.9


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


class TestCheck:
    @pytest.mark.parametrize(("granularity", "layout", "code", "dtype"), FORMS)
    def test_is_the_error_in_float64(self, granularity, layout, code, dtype):
        state, _ = cache(4, HEADS, *LAYOUTS[layout], dtype=dtype)
        before, options = state.clone(), {"code": code, "granularity": granularity, "layout": layout}
        ids = indices([3, 0, 1])
        report = tq.state.check(state, ids, **options)
        assert_same_bits(state, before, "the check changes nothing")
        assert report.ok and report.rows.shape[:2] == (3, HEADS) and not report.rows[1].any()
        after = rounded(state[[3, 1]], code, granularity, layout)
        error, signal = float64(after) - float64(state[[3, 1]]), float64(state[[3, 1]])
        snr = 10 * np.log10((signal**2).sum((2, 3)) / (error**2).sum((2, 3)))
        assert np.allclose(float64(report.snr_db[[0, 2]]), snr, rtol=1e-4)
        assert 0.45 < report.worst_ulps <= 0.5 + {torch.float32: 1e-4, torch.float16: 0.07, torch.bfloat16: 0.5}[dtype]
        tq.state.qdq_(state, ids, **options)
        again = tq.state.check(before, ids, quantized=state, **options)
        assert_same_bits(again.rows, report.rows)

    def test_worst_ulps_by_hand(self):
        """amax 127 makes the step of INT8 one: 0.5 is lost as half a step, and 126.75 as a quarter."""
        state = torch.zeros(1, 2, 4, 4, device=DEVICE)
        state[0, :, 0, 0] = 127.0
        state[0, 0, 1, 1], state[0, 1, 2, 2] = 0.5, 126.75
        report = tq.state.check(state, indices([0]), null_slot=None)
        assert report.column("worst_ulps").tolist() == [[0.5, 0.25]]
        assert report.column("noise").tolist() == [[0.25, 0.0625]]

    def test_finds_what_is_wrong(self):
        state, _ = cache(3, HEADS, 16, 16)
        state[2, 0, 3, 3] = torch.nan
        after = state.clone()
        ids = indices([1, 2])
        tq.state.qdq_(after, ids)
        after[1, 1, 4, 5] *= 1.5
        after[2, 1, 0, 0] = torch.nan
        report = tq.state.check(state, ids, quantized=after)
        assert not report.ok
        assert report.column("wrong").tolist() == [[0.0, 1.0], [0.0, 1.0]]
        assert report.column("nonfinite").tolist() == [[0.0, 0.0], [256.0, 1.0]]
        assert report.column("worst_ulps")[0, 1] > 0.5


def arguments():
    state, _ = cache(4, HEADS, 8, 16)
    return state, indices([1, 2])


class NotATensor:
    pass


BAD = [
    (TypeError, "state must be a tensor", lambda s, i: (NotATensor(), i), {}),
    (TypeError, "state must be bfloat16 or float16 or float32, got torch.float64", lambda s, i: (s.double(), i), {}),
    (ValueError, "state must be [slots, heads, rows, columns], got shape (4, 16, 16)",
     lambda s, i: (s.flatten(1, 2), i), {}),
    (ValueError, "heads of state must be dense", lambda s, i: (s.transpose(2, 3), i), {}),
    (ValueError, "slots of state must not overlap", lambda s, i: (s[:1].expand(4, -1, -1, -1), i), {}),
    (NotImplementedError, "at most 65536 elements", lambda s, i: (torch.zeros(1, 1, 257, 256, device=DEVICE), i), {}),
    (TypeError, "slots must be int32 or int64, got torch.int16", lambda s, i: (s, i.short()), {}),
    (ValueError, "slots must be [B], got shape (2, 1)", lambda s, i: (s, i[:, None]), {}),
    (ValueError, "slots must be [B, T] with num_accepted_tokens", lambda s, i: (s, i), {"num_accepted_tokens": "ids"}),
    (ValueError, "slots must be on", lambda s, i: (s, i.to("meta")), {}),
    (ValueError, "null_slot must be a slot or None, got -1", lambda s, i: (s, i), {"null_slot": -1}),
    (TypeError, "has_initial_state must be bool", lambda s, i: (s, i), {"has_initial_state": "ids"}),
    (ValueError, "has_initial_state must be contiguous",
     lambda s, i: (s, i), {"has_initial_state": torch.ones(4, dtype=torch.bool, device=DEVICE)[::2]}),
    (ValueError, "code must be one of 'int8', 'int8_narrow', 'fp8_e4m3'", lambda s, i: (s, i), {"code": "int4"}),
    (ValueError, "code must be named, got None", lambda s, i: (s, i), {"code": None}),
    (ValueError, "granularity must be one of 'head'", lambda s, i: (s, i), {"granularity": "row"}),
    (ValueError, "layout must be one of 'value_first', 'key_first'", lambda s, i: (s, i), {"layout": "vk"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "change", "options"), BAD, ids=[message for _, message, _, _ in BAD])
@pytest.mark.parametrize("name", ["qdq_", "check"])
def test_bad_arguments_change_nothing(name, kind, message, change, options):
    state, ids = arguments()
    before = state.clone()
    options = {key: ids if value == "ids" else value for key, value in options.items()}
    with pytest.raises(kind, match=re.escape(message)) as caught:
        getattr(tq.state, name)(*change(state, ids), **options)
    assert str(caught.value).startswith(f"state.{name}: ")
    assert_same_bits(state, before)


def test_bad_tensors_beside_the_cache():
    state, ids = arguments()
    before = state.clone()
    with pytest.raises(ValueError, match=r"state.gather: out must have shape \(2, 2, 8, 16\), got \(3, 2, 8, 16\)"):
        tq.state.gather(state, ids, out=torch.empty(3, 2, 8, 16, device=DEVICE))
    with pytest.raises(TypeError, match=r"state.scatter_: values must be torch.float32 as the state is or float32"):
        tq.state.scatter_(state, ids, torch.empty(2, 2, 8, 16, dtype=torch.bfloat16, device=DEVICE))
    with pytest.raises(TypeError, match=r"state.check: quantized must be torch.float32 as the state is"):
        tq.state.check(state, ids, quantized=state.half())
    assert_same_bits(state, before)
