"""The decode steps against vLLM's own kernels, both interpreted on a CPU or both on a GPU."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_same_bits
from formulas import float64
from helpers import DEVICE
from test_state_decode import KINDS, LIVE, Case

import tq.state
from perf.state_watch import Watch

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


def plain_step(**given):
    return given["step"](*given["args"])


def other_code(**given):
    return given["step"](*given["args"], code="int8_narrow", granularity="value_channel")


def also_elsewhere(**given):
    given["state"][4, 0, 0, 0] += 1.0
    return given["step"](*given["args"], code="int8_narrow", granularity="head")


def other_outputs(**given):
    made = given["step"](*given["args"], code="int8_narrow", granularity="head")
    made[0].mul_(1.01)
    return made


WRONG = {
    None: set(),
    plain_step: {"wrong_elements_after_steps", "wrong_outputs"},
    other_code: {"wrong_elements_after_steps", "wrong_outputs"},
    also_elsewhere: {"wrong_elements_of_other_slots"},
    other_outputs: {"wrong_outputs"},
}


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("change", WRONG)
def test_what_watched_engines_say_of_a_step(native, kind, change):
    """That it is vLLM's on rounded states, and of each thing that is wrong with it that it is."""
    case = Case(kind, ids=[3, 0, 5, -1, 2])
    out = torch.zeros(5, 1, 4, case.values, device=DEVICE)
    given = case.qkv, case.gate, case.beta, case.a_log, case.dt_bias, case.scale, case.state, out, case.slots, True
    if kind == "kda":
        given = case.qkv, case.gate[None], case.beta[None], case.a_log, case.dt_bias, None, case.state, case.slots
    step = tq.state.gdn_decode if kind == "gdn" else tq.state.kda_decode

    def changed(*args, code, granularity):
        return change(step=step, args=args, state=case.state)

    watch = Watch("int8_narrow")
    watch.inside(step if change is None else changed, native[kind])(*given, code="int8_narrow", granularity="head")
    wrong = {name for name, count in watch.counts.items() if name.startswith("wrong_") and count}
    assert wrong == WRONG[change]
    assert watch.counts["roundings_inside"] == 1 and watch.counts["elements_after_steps"] == 3 * case.state[0].numel()
