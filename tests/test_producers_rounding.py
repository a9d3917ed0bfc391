"""Where every producer rounds: codes lie on ties, so that they tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formulas import FORMULAS, float64
from helpers import DEVICE, FORMATS, ROUNDINGS, Case, rounded

import tq

E4M3 = FORMATS["e4m3"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


ONCE = [(name, each) for name in ROUNDINGS for each in ("output", "product", "after_weight") if each in ROUNDINGS[name]]


@pytest.mark.parametrize(("name", "rounding"), ONCE)
def test_the_output_is_rounded_once(name, rounding):
    """To bf16, whose values lie on ties of E4M3 under a scale of a power of two, so that codes tell."""
    scale = torch.tensor([0.125], device=DEVICE)
    case = Case(tq.PRODUCERS[name], tq.SCHEMES["fp8_tensor"], 16, 512, BF16, extra={"scale": scale})
    case.options.pop("residual", None)
    y = FORMULAS[name](*case.arguments, **case.options)
    codes = {value: E4M3.encode(value_of * 8.0) for value, value_of in (("none", y), (rounding, rounded(y, BF16)))}
    assert (codes["none"] != codes[rounding]).mean() > 3e-3 or name == "fatrelu_mul"
    for each, want in codes.items():
        case.extra["rounding"] = each
        got = case.run().codes.cpu().numpy()
        # Only what lies beside a tie may differ.
        assert (got != want).sum() <= 3, (each, (got != want).sum())


def with_up(name: str, x: torch.Tensor, value: float) -> torch.Tensor:
    """The input with another up."""
    x = x.clone()
    x[:, 1::2] = value if name == "swiglu_oai" else x[:, 1::2]
    x[:, x.shape[-1] // 2 :] = x[:, x.shape[-1] // 2 :] if name == "swiglu_oai" else value
    return x


@pytest.mark.parametrize("name", ["fatrelu_mul", "gelu_mul", "silu_mul", "swiglu_oai"])
def test_activation_and_product_are_rounded(name):
    scale = torch.tensor([0.125], device=DEVICE)
    extra = {"scale": scale, "rounding": "activation_and_product"}
    case = Case(tq.PRODUCERS[name], tq.SCHEMES["fp8_tensor"], 16, 512, BF16, extra=extra)
    (x,) = case.arguments
    if name == "swiglu_oai":
        activation, factor = FORMULAS[name](with_up(name, x, 0.0)), np.clip(float64(x)[:, 1::2], -7.0, 7.0) + 1.0
    else:
        activation, factor = FORMULAS[name](with_up(name, x, 1.0)), float64(x)[:, 512:]
    want = E4M3.encode(rounded(rounded(activation, BF16) * factor, BF16) * 8.0)
    assert (case.run().codes.cpu().numpy() != want).sum() <= 3


def test_norm_and_output_are_rounded():
    """Position 0 turns nothing, so that what is rounded twice is so once; elsewhere some codes differ."""
    case = Case(tq.PRODUCERS["qk_norm_rope"], tq.SCHEMES["fp8_tensor"], 16, 512, BF16)
    case.extra = {"scale": torch.tensor([0.125], device=DEVICE), "rounding": "output"}
    case.arguments[3][0] = 0
    once = case.run().codes.cpu().numpy()
    case.extra["rounding"] = "norm_and_output"
    twice = case.run().codes.cpu().numpy()
    assert (once[0] == twice[0]).all() and 0.001 < (once != twice).mean() < 0.1
    # The norms rounded, by the formula of a rotation by nothing; then that of the rotation with weights of 1 and the
    # mean of squares of the rounded norms given back.
    x, q_weight, k_weight, positions, cache, eps = case.arguments
    norm = rounded(FORMULAS["qk_norm_rope"](x, q_weight, k_weight, 0 * positions, cache, eps, **case.options), BF16)
    heads, half = norm.reshape(16, -1, 128), 64
    cos_sin = float64(cache)[positions.cpu().numpy()][:, None, :]
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    first, second = heads[..., :half], heads[..., half:]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1).reshape(16, -1)
    assert (twice != E4M3.encode(rounded(turned, BF16) * 8.0)).sum() <= 3


def test_a_gemma_weight_is_added_to_one_in_fp32():
    """1 + 2^-12 is 1 in bf16: its product, with the largest value of a fp32 norm, would be the same code."""
    x = torch.tensor([[1.0, 1.0]], device=DEVICE)
    weight = torch.tensor([2.0**-12, 0.0], device=DEVICE).bfloat16()
    scale = torch.tensor([1.0 / (1.0625 - 2.0**-14)], device=DEVICE)  # 1 lies just below a tie, 1 + 2^-12 above
    made = tq.gemma_rms_norm(x, weight, 1e-20, scheme="fp8_tensor", scale=scale, rounding="none")
    assert made.data.view(torch.uint8)[0].tolist() == E4M3.encode(np.array([1.125, 1.0])).tolist()
