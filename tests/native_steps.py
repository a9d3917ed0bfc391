"""vLLM's own decode kernels, interpreted on a CPU or as they are on a GPU."""

from __future__ import annotations

import sys

import pytest
import triton
import triton.language as tl
from helpers import DEVICE

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


def native_steps():
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
