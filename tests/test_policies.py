"""Where a producer rounds: inputs on which policies differ, and which policy each pair defaults to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comparing import assert_codes, assert_equal_results, assert_same_bits
from formulas import float64
from helpers import ALL_PAIRS, DEVICE, FORMATS, ORACLES, Case, as_stored, float32, names, rounded

import tq
from tq.kernels.plan import replaced

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONE = torch.ones(1)
E4M3 = FORMATS["e4m3"]

# What vLLM 0.33's ops do, from their compiled kernels: (options, least scale).
FUSED_NORM = {"rounding": "before_and_after_weight", "round_residual": False}
PLAIN_NORM = {"rounding": "after_weight", "round_residual": True}
PLAIN_ACT = {"rounding": "activation_and_product"}
VLLM_FLOOR = 1.0 / (448.0 * 512.0)
REPLACED = {
    ("quantize", "fp8_tensor"): ({}, None),
    ("quantize", "fp8_token"): ({}, VLLM_FLOOR),
    ("quantize", "fp8_group128"): ({}, 1e-10 / 448.0),
    ("quantize", "fp8_group64"): ({}, 1e-10 / 448.0),
    ("quantize", "fp8_group128_pow2"): ({}, 1e-10),
    ("quantize", "fp8_group128_ue8m0"): ({}, 1e-10 / 448.0),
    ("rms_norm", "fp8_tensor"): (PLAIN_NORM, None),
    ("rms_norm", "fp8_token"): (FUSED_NORM, VLLM_FLOOR),
    ("rms_norm", "fp8_group128"): (FUSED_NORM, VLLM_FLOOR),
    ("rms_norm", "fp8_group64"): (FUSED_NORM, VLLM_FLOOR),
    # No fused op has these scales: the norm and the group quantizer one after the other.
    ("rms_norm", "fp8_group128_pow2"): (PLAIN_NORM, 1e-10),
    ("rms_norm", "fp8_group128_ue8m0"): (PLAIN_NORM, 1e-10 / 448.0),
    ("silu_mul", "fp8_tensor"): (PLAIN_ACT, None),
    ("silu_mul", "fp8_token"): (PLAIN_ACT, VLLM_FLOOR),
    ("silu_mul", "fp8_group128"): ({"rounding": "none"}, VLLM_FLOOR),
    ("silu_mul", "fp8_group64"): ({"rounding": "none"}, VLLM_FLOOR),
    ("silu_mul", "fp8_group128_pow2"): (PLAIN_ACT, 1e-10),
    ("silu_mul", "fp8_group128_ue8m0"): (PLAIN_ACT, 1e-10 / 448.0),
    # Nor INT8 and MX, whose scales have no least value of vLLM's but that of the group quantizer.
    **{("quantize", scheme): ({}, None) for scheme in ("int8_tensor", "int8_token", "mxfp8", "mxfp4", "nvfp4")},
    **{("rms_norm", scheme): (PLAIN_NORM, None) for scheme in ("int8_tensor", "int8_token", "mxfp8", "mxfp4", "nvfp4")},
    **{("silu_mul", scheme): (PLAIN_ACT, None) for scheme in ("int8_tensor", "int8_token", "mxfp8", "mxfp4")},
    ("silu_mul", "nvfp4"): ({"rounding": "product"}, None),
    ("quantize", "int8_group128"): ({}, float(np.float32(1e-10) / np.float32(127))),
    ("rms_norm", "int8_group128"): (PLAIN_NORM, float(np.float32(1e-10) / np.float32(127))),
    ("silu_mul", "int8_group128"): (PLAIN_ACT, float(np.float32(1e-10) / np.float32(127))),
}


def tensor(values, dtype=BF16):
    made = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert (float64(made) == np.asarray(values)).all(), "the witness must be exact in its dtype"
    return made.to(DEVICE)


def first_code(made) -> int:
    activation = made[0] if isinstance(made, tuple) else made
    return int(activation.data.view(torch.uint8)[0, 0])


@pytest.mark.parametrize(
    ("x0", "weight", "codes"),
    [
        # The norm is 1.0649273, beyond the tie at 1.0625 that rounding to bf16 puts it on.
        (1.140625, 1.0, {"none": 1.125, "after_weight": 1.0, "before_and_after_weight": 1.0}),
        # The norm is 1.0275943, in bf16 1.03125; times the weight 1.1801279, or 1.1843262 and in bf16 1.1875, a tie.
        (1.0859375, 1.1484375, {"none": 1.125, "after_weight": 1.125, "before_and_after_weight": 1.25}),
    ],
)
def test_rms_norm_rounds_where_its_policy_says(x0, weight, codes):
    x, w = tensor([[x0, 1.046875, 1.046875, 1.046875]]), tensor([weight, 1.0, 1.0, 1.0])
    for rounding, value in codes.items():
        got = first_code(tq.rms_norm(x, w, 1e-6, scheme="fp8_tensor", scale=ONE.to(DEVICE), rounding=rounding))
        assert E4M3.decode(got) == value, rounding


@pytest.mark.parametrize(
    ("gate", "up", "codes"),
    [
        (1.3046875, 1.0390625, {"none": 1.125, "product": 1.0, "activation_and_product": 1.0}),
        (1.5859375, 1.625, {"none": 2.25, "product": 2.25, "activation_and_product": 2.0}),
    ],
)
def test_silu_mul_rounds_where_its_policy_says(gate, up, codes):
    x = tensor([[gate, up]])
    for rounding, value in codes.items():
        got = first_code(tq.silu_mul(x, scheme="fp8_tensor", scale=ONE.to(DEVICE), rounding=rounding))
        assert E4M3.decode(got) == value, rounding


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_norm_is_of_the_residual_its_policy_says(dtype):
    """63 of 64 sums round down to 1, so the norm of the first is 0.9971 of the fp32 sums and 1 of the rounded ones."""
    step = 3 * 2.0**-10 if dtype == BF16 else 3 * 2.0**-13
    x, residual = torch.ones(1, 64), torch.full((1, 64), step)
    residual[0, 0] = 0.0
    x, residual, weight = x.to(DEVICE, dtype), residual.to(DEVICE, dtype), torch.ones(64, dtype=dtype, device=DEVICE)
    unrounded = rounded(1 / np.sqrt((63 * (1 + step) ** 2 + 1) / 64 + 1e-6), dtype)
    assert unrounded == (0.99609375 if dtype == BF16 else unrounded) and unrounded < 1
    # Scaled so that the tie between two codes lies between the two norms.
    scale = np.float32(np.sqrt(unrounded) / 0.96875)
    codes = {}
    for round_residual, norm in ((False, unrounded), (True, 1.0)):
        activation, total = tq.rms_norm(
            x, weight, 1e-6, residual=residual, scheme="fp8_tensor", scale=torch.tensor([scale], device=DEVICE),
            rounding="before_and_after_weight", round_residual=round_residual,
        )  # fmt: skip
        assert (total == 1).all() and total.dtype == dtype
        codes[round_residual] = first_code(activation)
        assert codes[round_residual] == E4M3.encode(np.float32(norm) * (np.float32(1) / scale))
    assert codes[True] != codes[False]


def test_rounding_to_the_weights_dtype_is_nothing_for_an_fp32_weight():
    x, weight = torch.randn(33, 256).to(DEVICE, BF16), torch.randn(256).to(DEVICE)
    got = tq.rms_norm(x, weight, scheme="fp8_token", rounding="before_and_after_weight")
    want = tq.rms_norm(x, weight, scheme="fp8_token", rounding="after_weight")
    assert_same_bits(got.data, want.data)
    assert_same_bits(got.scale, want.scale)


# The contracts in float64, rounded where each policy says and nowhere else.
def norm_contract(rounding, x, weight, dtype):
    norm = float64(x) / np.sqrt(np.mean(float64(x) ** 2, -1, keepdims=True) + 1e-6)
    if rounding == "before_and_after_weight":
        norm = rounded(norm, dtype)
    return norm * float64(weight) if rounding == "none" else rounded(norm * float64(weight), dtype)


def silu_contract(rounding, x, dtype):
    gate, up = np.split(float64(x), 2, -1)
    activation = gate / (1 + np.exp(-gate))
    if rounding == "activation_and_product":
        activation = rounded(activation, dtype)
    return activation * up if rounding == "none" else rounded(activation * up, dtype)


@pytest.mark.parametrize(
    ("producer", "rounding"),
    [
        *(("rms_norm", rounding) for rounding in ("none", "after_weight", "before_and_after_weight")),
        *(("silu_mul", rounding) for rounding in ("none", "product", "activation_and_product")),
    ],
)
def test_a_million_values_follow_the_contract(producer, rounding):
    """Against float64: only a value beside a rounding boundary may differ, and by one code."""
    contracts = {"rms_norm": norm_contract, "silu_mul": silu_contract}
    case = Case(tq.PRODUCERS[producer], tq.SCHEMES["fp8_tensor"], 256, 4096, BF16, extra={"rounding": rounding})
    case.options.pop("residual", None)
    tensors = [value for value in case.arguments if isinstance(value, torch.Tensor)]
    y = contracts[producer](rounding, *tensors, BF16)
    scale = np.float32(case.call_options()["scale"].item())
    want = E4M3.encode(y * np.float64(np.float32(1) / scale))
    # The product with the reciprocal rounds to fp32 too, hence the few at a tie.
    assert_codes(case.scheme, case.run().codes, want, scale, case, allowed=want.size // 100_000 + 8)


@pytest.mark.parametrize(("producer", "scheme"), ALL_PAIRS)
def test_the_default_is_the_replaced_ops_policy(producer, scheme):
    case = Case(tq.PRODUCERS[producer], tq.SCHEMES[scheme], 16, 512)
    stands_for = replaced(case.producer, case.scheme)
    options, least = REPLACED.get((producer, scheme), (stands_for.options, stands_for.min_scale))
    explicit = Case(case.producer, case.scheme, 16, 512)
    explicit.arguments, explicit.options = case.arguments, {**case.options, **options}
    assert set(options) <= set(names(case.producer))
    if least is not None and case.scheme.dynamic:
        explicit.options["min_scale"] = float(np.float32(least))
    assert_equal_results(case.run(), explicit.run())
    if case.scheme.dynamic and least is not None:
        # Rows so small that the least scale decides.
        for each in (case, explicit):
            each.change_rows(lambda rows: rows * 2.0**-60)
        got = case.run()
        assert_equal_results(got, explicit.run())
        if scheme in ORACLES:
            assert (float32(got.activation.scales()) == as_stored(scheme, least)).all()


def test_the_default_policies_differ_where_the_ops_do():
    """The same witnesses through the defaults: the byte is that of the policy in the table above."""
    x, w = tensor([[1.0859375, 1.046875, 1.046875, 1.046875]]), tensor([1.1484375, 1.0, 1.0, 1.0])
    scale = ONE.to(DEVICE)
    assert E4M3.decode(first_code(tq.rms_norm(x, w, 1e-6, scheme="fp8_tensor", scale=scale))) == 1.125
    assert E4M3.decode(first_code(tq.silu_mul(tensor([[1.5859375, 1.625]]), scheme="fp8_tensor", scale=scale))) == 2.0
    for producer, scheme in REPLACED:
        assert replaced(tq.PRODUCERS[producer], tq.SCHEMES[scheme]).options == REPLACED[producer, scheme][0]
