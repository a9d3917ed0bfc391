"""The check of rounded states, against float64 and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comparing import assert_same_bits
from formulas import float64
from helpers import DEVICE
from state_helpers import FORMS, HEADS, LAYOUTS, cache, indices, rounded

import tq.state


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
