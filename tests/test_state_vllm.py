"""The decode steps against vLLM's own kernels, both interpreted on a CPU or both on a GPU."""

from __future__ import annotations

import sys

import pytest
import torch
import triton
import triton.language as tl
from comparing import assert_same_bits
from formulas import float64
from helpers import DEVICE
from test_state_decode import KINDS, LIVE, Case

pytestmark = pytest.mark.vllm
OF_VLLM = (
    "vllm.third_party.flash_linear_attention.ops.fused_recurrent",
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent",
)


@triton.jit
def exp(x):
    return tl.exp(x)


@triton.jit
def log(x):
    return tl.log(x)


@pytest.fixture(scope="module")
def native():
    """vLLM's packed decode of each kind."""
    pytest.importorskip("vllm")
    import vllm.triton_utils

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            # vLLM takes a CPU for a machine without Triton; this one has it, interpreted.
            patch.setattr(vllm.triton_utils, "triton", triton)
            patch.setattr(vllm.triton_utils, "tl", tl)
            for name in OF_VLLM:
                patch.delitem(sys.modules, name, raising=False)  # an engine of another test had it without Triton
        gdn = pytest.importorskip(OF_VLLM[0])
        kda = pytest.importorskip(OF_VLLM[1])
        if DEVICE == "cpu":
            for module in (gdn, kda):
                patch.setattr(module, "exp", exp)  # bound at import, which the interpreter cannot replace
                patch.setattr(module, "log", log)
            patch.setattr(kda.current_platform, "is_arch_support_pdl", lambda *arguments: False, raising=False)
        yield {
            "gdn": gdn.fused_recurrent_gated_delta_rule_packed_decode,
            "kda": kda.fused_recurrent_kda_packed_decode,
        }


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
