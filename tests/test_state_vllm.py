"""The decode steps against vLLM's own kernels, both interpreted on a CPU or both on a GPU."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_same_bits
from formulas import float64
from helpers import DEVICE
from test_state_decode import KINDS, LIVE, Case

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("kind", "bound"), KINDS)
def test_the_native_step(native, kind, bound):
    """Interpreted, sums have one order, and every bit is the same; on a GPU they agree to the rounding of fp32."""
    case = Case(kind, bound, ids=[3, 0, 5, -1, 2])
    theirs = case.state.clone()
    out = torch.zeros(5, 1, 4, case.values, device=DEVICE)
    vectors = case.a_log, case.dt_bias
    if kind == "gdn":
        rest = case.scale, theirs, out, case.slots, True
        native["gdn"](case.qkv, case.gate, case.beta, *vectors, *rest)
    else:
        out, _ = native["kda"](case.qkv, case.gate[None], case.beta[None], *vectors, bound, theirs, case.slots)
    ours = case.run()
    out = out.reshape(ours.shape)
    if DEVICE == "cpu":
        assert_same_bits(ours, out)
        assert_same_bits(case.state, theirs)
    else:
        scale = float(theirs[1:].abs().max())
        assert abs(float64(case.state) - float64(theirs)).max() < 1e-6 * scale
        assert abs(float64(ours) - float64(out)).max() < 1e-6 * max(scale, float(out.abs().max()))
    assert ours[LIVE].abs().sum() > 0
