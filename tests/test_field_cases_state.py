"""Field cases O23, O24 and O25: slots, fresh requests and the axis of a scale."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_same_bits
from helpers import DEVICE
from state_helpers import HEADS, LARGEST, LAYOUTS, cache, indices, rounded

import tq.state

every_code = pytest.mark.parametrize("code", LARGEST)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


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
