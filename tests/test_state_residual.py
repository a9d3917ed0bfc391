"""Packed states that keep four bits more of each element, or value channels mixed by a Hadamard matrix, or both."""

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
from test_state_decode import HEADS, KINDS, Case, close
from test_state_decode_packed import held, packed_of, redraw, run

import tq.state
from tq.state import PackedState

# Code, granularity, residuals, channels that are mixed, entries of a ring.
FORMS = [
    ("int8", "value_channel", True, 0, 0),
    ("int8", "value_channel", True, 16, 2),
    ("int8", "group16", True, 16, 0),
    ("int8", "head", True, 0, 2),
    ("int8", "value_channel", False, 8, 0),
    ("fp8_e4m3", "value_channel", False, 16, 0),
    ("fp8_e4m3", "key_channel", False, 2, 2),
]


def made_of(case: Case, code: str, granularity: str, residual: bool, hadamard: int, length: int) -> PackedState:
    """The states of a case, packed; residuals elsewhere are 7."""
    ring = {"length": length, "dtype": torch.float32} if length else {}
    state = packed_of(case, code, granularity, **ring)
    slots, heads, values, keys = state.codes.shape
    residuals = torch.full((slots, heads, values, keys // 2), 0x77, dtype=torch.uint8, device=DEVICE)
    state = replace(state, residuals=residuals if residual else None, hadamard=hadamard)
    live = [slot for slot in case.ids if 0 < slot < slots]
    return tq.state.pack_(state, indices(live), case.state[live])


def mixed(states: np.ndarray, size: int) -> np.ndarray:
    """H states [..., values, keys] in float64, with Sylvester's matrix."""
    matrix = np.ones((1, 1))
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    groups = states.reshape(*states.shape[:-2], -1, matrix.shape[0], states.shape[-1])
    return (matrix / np.sqrt(matrix.shape[0]) @ groups).reshape(states.shape)


def numbers(state: PackedState) -> np.ndarray:
    """(codes + residuals / 14) * scales in float64, of all slots."""
    values = float64(state.codes if state.codes.dtype == torch.int8 else state.codes.float())
    if state.residuals is not None:
        pair = state.residuals.cpu().numpy().astype(np.int64)
        halves = np.stack([pair & 15, pair >> 4], -1).reshape(values.shape)
        values = values + (halves - 16 * (halves > 7)) / 14.0
    return values * scales_of(state)


def assert_rounded(state: PackedState, slots: list[int], exact: np.ndarray) -> None:
    """Slots are `exact`, mixed, to half a part of a code: a unit of INT8, of E4M3, or a 14th."""
    exact = mixed(exact, max(state.hadamard, 1))
    scales = scales_of(state)[slots]
    unit = 1.0 / 14.0 if state.residuals is not None else 1.0
    if state.codes.dtype != torch.int8:
        with np.errstate(divide="ignore"):
            unit = np.exp2(np.maximum(np.floor(np.log2(np.abs(exact / scales))), -6) - 3)
    error = np.abs(numbers(state)[slots] - exact)
    assert (error <= 0.5 * unit * scales + 1e-5 * np.abs(exact) + 2e-6).all()
    assert error.max() > 0.4 * (unit * scales).min()


@pytest.mark.parametrize(("kind", "bound", "form"), [(*KINDS[i % 3], form) for i, form in enumerate(FORMS)])
def test_what_is_packed_and_two_steps(kind, bound, form):
    """Packed, unpacked, and stepped as the exact recurrence of what was held; rounded once in a step, or in two."""
    case = Case(kind, bound, ids=[3, 5, 2])
    state = made_of(case, *form)
    assert_rounded(state, case.ids, float64(case.state)[case.ids])
    others = [slot for slot in range(state.codes.shape[0]) if slot not in case.ids]
    before = [each[others].clone() for each in state.tensors]
    exact = held(state)
    assert np.allclose(exact[case.ids], mixed(numbers(state), max(state.hadamard, 1))[case.ids], rtol=1e-5, atol=3e-6)
    for token in range(2):
        out = run(case, state)
        for request, slot in enumerate(case.ids):
            for head in range(HEADS):
                exact[slot, head], y = case.recurrence(request, head, exact[slot, head])
                close(out[request, head], y)
        if state.ring is None or token == 1:
            assert_rounded(state, case.ids, exact[case.ids])
            exact = held(state)
        else:
            assert np.allclose(held(state)[case.ids], exact[case.ids], rtol=1e-5, atol=3e-6)
        redraw(case)
    for each, was in zip(state.tensors, before, strict=True):
        assert_same_bits(each[others].contiguous().view(torch.uint8), was.view(torch.uint8))


def test_residuals_keep_a_fourteenth():
    """Bit for bit: residuals of even keys below, halves to even, two's complement."""
    values = torch.tensor([127.0, 0.5, 1.5, 2.25, -126.5, -63.75, -0.125, 5.0], device=DEVICE).view(1, 1, 1, 8)
    state = PackedState.zeros(1, 1, 1, 8, device=DEVICE, residual=True)
    tq.state.pack_(state, indices([0]), values, null_slot=None)
    assert state.codes.flatten().tolist() == [127, 0, 2, 2, -126, -64, 0, 5]
    # 14 times what is left: 0, 7, -7, 3.5 to 4, -7, 3.5 to 4, -1.75 to -2, 0.
    assert state.residuals.flatten().tolist() == [0x70, 0x49, 0x49, 0x0E]
    assert state.slot_bytes == 8 + 4 + 4


def test_residuals_and_mixed_channels_are_copied():
    case = Case("gdn", ids=[1, 2])
    state = made_of(case, "int8", "value_channel", True, 16, 0)
    want = tq.state.unpack(state, indices([1]))
    tq.state.copy_(state, indices([1]), indices([3]))
    assert_same_bits(tq.state.unpack(state, indices([3])), want)


def test_outliers_of_a_value_channel_are_spread():
    """What the mixing is for: with one scale a head, a channel a hundred times larger costs the others their bits."""
    values = torch.randn(1, 1, 32, 32, device=DEVICE)
    values[0, 0, 7] *= 100.0
    errors = []
    for size in (0, 32):
        state = PackedState.zeros(1, 1, 32, 32, granularity="head", device=DEVICE, hadamard=size)
        tq.state.pack_(state, indices([0]), values, null_slot=None)
        errors.append((tq.state.unpack(state, indices([0]), null_slot=None) - values).norm())
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "hadamard must be 0 or a power of two that divides 40 values, got 16", {"hadamard": 16}),
        (ValueError, "hadamard must be 0 or a power of two that divides 40 values, got 5", {"hadamard": 5}),
        (ValueError, "hadamard must be 0 or a power of two that divides 40 values, got -2", {"hadamard": -2}),
        (TypeError, "residuals must be uint8", {"residuals": torch.zeros(2, 1, 40, 8, device=DEVICE)}),
        (ValueError, "residuals must have shape (2, 1, 40, 8)", {
            "residuals": torch.zeros(2, 1, 40, 16, dtype=torch.uint8, device=DEVICE)
        }),
        (NotImplementedError, "residuals must be of int8 codes, got torch.float8_e4m3fn", {
            "codes": torch.zeros(2, 1, 40, 16, device=DEVICE).to(torch.float8_e4m3fn),
            "residuals": torch.zeros(2, 1, 40, 8, dtype=torch.uint8, device=DEVICE),
        }),
    ],
)  # fmt: skip
def test_what_does_not_fit(error, message, change):
    state = PackedState.zeros(2, 1, 40, 16, device=DEVICE)
    with pytest.raises(error, match=re.escape(f"state.unpack: {message}")):
        tq.state.unpack(replace(state, **change), indices([1]))
    odd = PackedState.zeros(2, 1, 8, 5, device=DEVICE, residual=True)
    with pytest.raises(ValueError, match="keys must be even where states have residuals, got 5"):
        tq.state.unpack(odd, indices([1]))
