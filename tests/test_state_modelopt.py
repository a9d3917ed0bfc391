"""Rounding of states against ModelOpt's own TensorQuantizer, where it is installed (the extra `modelopt`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import DEVICE
from state_helpers import assert_same_states, indices

import tq.state

pytest.importorskip("modelopt.torch.quantization.nn", exc_type=ImportError)
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer

ATTRIBUTES = {
    "int8": {"num_bits": 8, "narrow_range": False},
    "int8_narrow": {"num_bits": 8, "narrow_range": True},
    "fp8_e4m3": {"num_bits": (4, 3)},
}
# ModelOpt's states are keys by values, and an axis is one that keeps its own scales.
KEPT = {
    "head": {"axis": (0, 1)},
    "key_channel": {"axis": (0, 1, 2)},
    "value_channel": {"axis": (0, 1, 3)},
    "group16": {"block_sizes": {-1: 16}},
    "group32": {"block_sizes": {-1: 32}},
}
TINY = np.float32(2.0**-24)
AMAX = [
    0.0,
    1e-45,
    1e-40,
    2.0**-25,
    TINY,
    np.nextafter(TINY, np.float32(1)),
    1e-6,
    1.0,
    127.0,
    448.0,
    1e30,
    3.4028235e38,
]
every_code = pytest.mark.parametrize("code", ATTRIBUTES)


def by_modelopt(state: torch.Tensor, code: str, granularity: str = "head") -> torch.Tensor:
    """[N, heads, keys, values] through a quantizer of a recipe."""
    config = QuantizerAttributeConfig(type="dynamic", **ATTRIBUTES[code], **KEPT[granularity])
    return TensorQuantizer(config)(state.clone())


def by_tq(state: torch.Tensor, code: str, granularity: str = "head") -> torch.Tensor:
    state = state.clone()
    ids = indices(list(range(len(state))))
    return tq.state.qdq_(state, ids, code=code, granularity=granularity, layout="key_first", null_slot=None)


@every_code
@pytest.mark.parametrize("granularity", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_states(code, granularity, dtype):
    state = torch.randn(2, 3, 16, 64, device=DEVICE)
    state = (state * torch.exp2(torch.randint(-8, 9, (16, 64), device=DEVICE))).to(dtype)
    assert_same_states(by_tq(state, code, granularity), by_modelopt(state, code, granularity))


@every_code
def test_every_finite_amax(code):
    """Each with ties of the code, zeros of both signs and everything between, in a head of its own."""
    fractions = torch.linspace(-1, 1, 255).double()
    ties = torch.arange(-127, 127).double().add(0.5) / 127
    elements = torch.cat([fractions, ties, torch.tensor([-0.0, 0.0, 1.0])]).view(1, 1, 16, 32)
    amax = torch.from_numpy(np.float32(AMAX)).double().view(2, -1, 1, 1)
    state = (elements * amax).float().to(DEVICE)
    assert_same_states(by_tq(state, code), by_modelopt(state, code))


@every_code
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_number(code, bad):
    """A head alone: in a batch, ModelOpt's INT8 makes NaN of other heads that are zero."""
    state = torch.randn(1, 1, 8, 16, device=DEVICE)
    state[0, 0, 3, 4] = float(bad)
    got = by_tq(state, code)
    assert_same_states(got, by_modelopt(state, code))
    assert got.isnan().all()


@every_code
@pytest.mark.parametrize("granularity", ["head", "group16", "group32"])
def test_a_saved_quantizer(code, granularity):
    """As ModelOpt saves it, before and after it has seen a state."""
    quantizer = TensorQuantizer(QuantizerAttributeConfig(type="dynamic", **ATTRIBUTES[code], **KEPT[granularity]))
    name = "layers.0.linear_attn.gdn_state_quantizer"
    for _ in range(2):
        recipe = tq.state.parse_quantizer_state({name: quantizer.get_modelopt_state()})
        assert recipe.rules == ((name, tq.state.StateOptions(code, granularity)),)
        quantizer(torch.randn(2, 2, 16, 64))
    quantizer.disable()
    assert tq.state.parse_quantizer_state({name: quantizer.get_modelopt_state()}).options(name) is None
