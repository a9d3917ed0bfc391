"""Bad input of every producer, and what each stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DEVICE, ROUNDINGS

import tq
from tq.kernels import launch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def bad(name: str, **changes: Any) -> tuple[tuple, dict[str, Any]]:
    """The example of a producer, one argument or option replaced."""
    arguments, options = tq.PRODUCERS[name].example(4, 256, BF16, DEVICE)
    parameters = tq.PRODUCERS[name].bind.__code__.co_varnames
    given = dict(zip(parameters, arguments, strict=False))
    positional = [changes.pop(key) if key in changes else value for key, value in given.items()]
    return tuple(positional), {**options, **changes}


WEIGHT = torch.ones(255, device=DEVICE)
INTS = torch.arange(4, device=DEVICE)
CACHE = torch.ones(9, 128, device=DEVICE)


@pytest.mark.parametrize(
    ("name", "changes", "kind", "message"),
    [
        ("gelu", {"approximate": "erf"}, ValueError, "approximate must be one of 'none', 'tanh'; got 'erf'"),
        ("gelu_mul", {"approximate": True}, ValueError, "approximate must be one of"),
        ("gelu_mul", {"x": torch.ones(2, 257, device=DEVICE)}, ValueError, "last size of x must be 2 times"),
        ("swiglu_oai", {"x": torch.ones(2, 257, device=DEVICE)}, ValueError, "last size of x must be 2 times"),
        ("swiglu_oai", {"limit": 0.0}, ValueError, "limit must be positive, got 0.0"),
        ("swiglu_oai", {"limit": float("nan")}, ValueError, "limit must be positive, got nan"),
        ("swiglu_oai", {"alpha": float("inf")}, ValueError, "alpha must be finite, got inf"),
        ("fatrelu_mul", {"threshold": float("nan")}, ValueError, "threshold must be finite, got nan"),
        ("gemma_rms_norm", {"weight": WEIGHT}, ValueError, "weight must have shape"),
        ("gemma_rms_norm", {"eps": 0.0}, ValueError, "eps must be positive"),
        ("gemma_rms_norm", {"rounding": "before_and_after_weight"}, ValueError, "rounding must be one of"),
        ("layer_norm", {"bias": WEIGHT}, ValueError, "bias must have shape"),
        ("layer_norm", {"bias": torch.ones(256, device=DEVICE).double()}, TypeError, "bias must be bfloat16"),
        ("layer_norm", {"bias": torch.ones(512, device=DEVICE)[::2]}, ValueError, "stride of bias must be 1"),
        ("layer_norm", {"residual": WEIGHT}, ValueError, "residual must have shape"),
        ("gated_rms_norm", {"gate": torch.ones(4, 128, device=DEVICE)}, ValueError, "gate must have shape"),
        ("gated_rms_norm", {"weight": WEIGHT[:64]}, ValueError, "weight must have shape (256,), got (64,)"),
        ("gated_rms_norm", {"weight": 1.0}, TypeError, "weight must be a tensor"),
        ("gated_rms_norm", {"group_size": 48}, ValueError, "group_size must be a power of two that divides"),
        ("gated_rms_norm", {"group_size": 512}, ValueError, "group_size must be a power of two that divides"),
        ("gated_rms_norm", {"group_size": 0}, ValueError, "group_size must be a power of two that divides"),
        ("gated_rms_norm", {"group_size": -8}, ValueError, "group_size must be a power of two that divides"),
        ("gated_rms_norm", {"activation": "relu"}, ValueError, "activation must be one of 'silu', 'sigmoid'"),
        ("gated_rms_norm", {"eps": -1.0}, ValueError, "eps must be positive"),
        ("qk_norm_rope", {"q_weight": WEIGHT[:96]}, ValueError, "size of q_weight, a head's, must be a power of two"),
        ("qk_norm_rope", {"q_weight": WEIGHT[:0]}, ValueError, "size of q_weight, a head's, must be a power of two"),
        ("qk_norm_rope", {"q_weight": None}, TypeError, "q_weight must be a tensor"),
        ("qk_norm_rope", {"k_weight": WEIGHT[:64]}, ValueError, "k_weight must have shape (128,), got (64,)"),
        ("qk_norm_rope", {"k_weight": None, "q_heads": 1}, ValueError, "q_heads must be None or 2"),
        ("qk_norm_rope", {"q_heads": 3}, ValueError, "q_heads must be in [0, 2]"),
        ("qk_norm_rope", {"q_heads": None}, ValueError, "q_heads must be in [0, 2]"),
        ("qk_norm_rope", {"positions": INTS[:3]}, ValueError, "positions must have shape (4,), got (3,)"),
        ("qk_norm_rope", {"positions": INTS.float()}, TypeError, "positions must be an int32 or int64 tensor"),
        ("qk_norm_rope", {"positions": 3}, TypeError, "positions must be an int32 or int64 tensor, got int"),
        ("qk_norm_rope", {"positions": INTS.repeat_interleave(2)[::2]}, ValueError, "positions must be contiguous"),
        ("qk_norm_rope", {"positions": INTS.to("meta")}, ValueError, "positions must be on"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE[:, :127]}, ValueError, "the rotary size even and at most"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE.repeat(1, 2)}, ValueError, "the rotary size even and at most"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE[0]}, ValueError, "cos_sin_cache must be [positions, rotary size]"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE[:, ::2]}, ValueError, "its last stride 1"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE.double()}, TypeError, "cos_sin_cache must be a bfloat16, float16"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE.to("meta")}, ValueError, "cos_sin_cache must be on"),
        ("qk_norm_rope", {"eps": 0.0}, ValueError, "eps must be positive"),
    ],
)
def test_bad_input(name, changes, kind, message, monkeypatch):
    """Raises before any launch."""
    monkeypatch.setattr(launch, "quantize_rows_kernel", None)
    arguments, options = bad(name, **changes)
    with pytest.raises(kind) as caught:
        tq.PRODUCERS[name](*arguments, scheme="fp8_token", **options)
    assert str(caught.value).startswith(f"{name}: ") and message in str(caught.value), caught.value


def test_what_each_replaces_is_named():
    """The op, and the quantizer after it where no fused op has both."""
    named = {
        "silu_mul": "_C.silu_and_mul",
        "gelu_mul": "_C.gelu_(tanh_)and_mul",
        "swiglu_oai": "_C.swigluoai_and_mul",
        "fatrelu_mul": "_C.fatrelu_and_mul",
        "relu2": "_C.relu_squared",
        "qk_norm_rope": "_C.fused_qk_norm_rope",
    }
    for name, op in named.items():
        replaced = tq.PRODUCERS[name].replaces(tq.SCHEMES["fp8_token"])
        assert replaced.op == f"{op} + _C.dynamic_per_token_scaled_fp8_quant"
        assert replaced.options["rounding"] in ROUNDINGS[name]
