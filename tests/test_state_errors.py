"""What rounding of states does not take: it says so and changes nothing."""

from __future__ import annotations

import re

import pytest
import torch
from comparing import assert_same_bits
from helpers import DEVICE
from state_helpers import HEADS, cache, indices

import tq.state


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
