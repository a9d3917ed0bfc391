"""Bugs that were reported of kernels like these, as tests: those of values. The kind of a bug, not its witness alone.

Oracles are formats.py and oracles.py; what is compared is bytes.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from comparing import assert_codes, assert_same_bits
from formulas import FORMULAS, float64
from helpers import (
    DEVICE,
    DYNAMIC_SCHEMES,
    FORMATS,
    ORACLES,
    Case,
    float32,
    format_of,
    given_of,
    quantized_by_oracle,
    static_options,
)
from oracles import power_of_two_above
from quantizing import code_of, compare_with_oracle, nan_code, quantize, unit_inputs

import tq

E4M3, E2M1 = FORMATS["e4m3"], FORMATS["e2m1"]
NAN, INF = float("nan"), float("inf")
FAMILIES = (
    "fp8_tensor", "fp8_token", "fp8_group128", "fp8_group128_ue8m0", "fp8_fnuz_token", "fp8_e5m2_group128",
    "int8_tensor", "int8_token", "int8_token_azp", "mxfp8", "mxfp4", "nvfp4",
)  # fmt: skip
every_family = pytest.mark.parametrize("scheme", FAMILIES)


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32, device=DEVICE)


@every_family
@pytest.mark.parametrize("reference", [False, True])
def test_o01_nan_is_not_swallowed_by_a_clamp(scheme, reference):
    """Kernel and reference alike: NaN has the code that is stated for it, and the other groups are as without it."""
    x = torch.randn(4, 256).bfloat16()
    x[1, 7] = 0.0
    clean = quantize(x, scheme)
    x[1, 7], x[2, 3], x[3, 3] = NAN, INF, -INF
    if reference:
        with tq.use_reference():
            got = quantize(x, scheme)
    else:
        got = quantize(x, scheme)
    assert got.codes[1, 7] == nan_code(scheme, got.zero_points[1, 0])
    got.codes[1, 7] = clean.codes[1, 7]
    size = tq.SCHEMES[scheme].group or 256
    assert (got.codes[:2] == clean.codes[:2]).all() and (got.codes[2:, size:] == clean.codes[2:, size:]).all()
    if not tq.SCHEMES[scheme].dynamic:
        assert [got.codes[2, 3], got.codes[3, 3]] == [code_of(scheme, 1e9), code_of(scheme, -1e9)]
        assert (np.delete(got.codes, 3, 1) == np.delete(clean.codes, 3, 1)).all()


@pytest.mark.parametrize("scheme", DYNAMIC_SCHEMES)
@pytest.mark.parametrize("producer", ["quantize", "rms_norm"])
def test_o02_a_group_of_zeros(scheme, producer):
    """No 0/0: finite scales, values of 0, the rest as ever; a norm of x - x too."""
    x = torch.randn(3, 512).bfloat16()
    x[1], x[2, 128:256], x[2, 300] = 0.0, 0.0, -0.0
    x, options = x.to(DEVICE), static_options(scheme)
    if producer == "rms_norm":
        ones = torch.ones(512, dtype=torch.bfloat16, device=DEVICE)
        activation, residual = tq.rms_norm(x, ones, residual=-x, scheme=scheme, **options)
        assert (residual == 0).all() and (activation.dequantize() == 0).all()
        activation = tq.rms_norm(x, ones, scheme=scheme, **options)
    else:
        activation = tq.quantize(x, scheme=scheme, **options)
    values, scales = float64(activation.dequantize()), float32(activation.scales())
    assert (values[1] == 0).all() and (values[2, 128:256] == 0).all() and values[2, 300] == 0
    assert np.isfinite(scales).all() and ((scales > 0).all() or scheme == "nvfp4")
    if tq.SCHEMES[scheme].rule.stored == torch.uint8:
        stored = activation.scale.reshape(-1).view(torch.uint8)
        assert (stored != 255).all()
    assert np.isfinite(values).all() and (values[0] != 0).any()


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_e5m2_tensor", "fp8_fnuz_tensor", "int8_tensor"])
def test_o03_no_rounding_by_way_of_another_format(scheme):
    """At, just above and just below each midpoint of the code; uniform values have no bias."""
    values = format_of(scheme).values()
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    points = np.concatenate([middle, np.nextafter(middle, np.float32(INF)), np.nextafter(middle, np.float32(0))])
    compare_with_oracle(torch.from_numpy(np.concatenate([points, -points]))[None], scheme)
    if scheme == "fp8_tensor":
        x = torch.tensor([[1.0625001, 400.199585, 272.156555, 136.002075, 1.0625, 400.0, 272.0, -1.0625001]])
        assert quantize(x, scheme).values[0].tolist() == [1.125, 416, 288, 144, 1.0, 384, 256, -1.125]
    uniform = torch.rand(64, 4096) * values[-1]
    error = quantize(uniform, scheme).values - float64(uniform)
    assert abs(error.mean()) < 5 * error.std() / np.sqrt(error.size)


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp4_ceil", "mxfp4_floor", "nvfp4"])
def test_o04_ties_of_four_bits_and_no_bf16_before_them(scheme):
    ties = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4}
    beside = {2.500004: 3, 0.2500001: 0.5, 1.2500001: 1.5, 5.00001: 6}
    x = torch.zeros(4, 32)
    x[0, :8] = torch.tensor([*ties, 6.0])
    x[1, :5] = torch.tensor([*beside, 6.0])
    x[0, 16], x[1, 16] = 6.0, 6.0
    x[2:] = -x[:2]
    for power in (0, -3, 5) if scheme != "nvfp4" else (0,):
        values = quantize(x * 2.0**power, scheme).values / 2.0**power
        assert values[0, :7].tolist() == [*ties.values()] and values[1, :4].tolist() == [*beside.values()]
        assert (values[2:] == -values[:2]).all()


NORMS = {"rms_norm": 1.0, "gemma_rms_norm": 0.0, "layer_norm": 1.0}  # and the weight that multiplies by 1


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_o05_the_variance_is_of_the_sum_that_is_stated(name, rounded, dtype):
    """The same byte from the kernel, the reference and a compiled graph; the stored residual is rounded once in any."""
    unit = 2.0**-10 if dtype == torch.bfloat16 else 2.0**-13
    x, residual = torch.ones(1, 64), torch.full((1, 64), 3 * unit)
    residual[0, 0] = 0.0
    x, residual = x.to(DEVICE, dtype), residual.to(DEVICE, dtype)
    norms = {}
    for contract, sums in ((True, np.ones(64)), (False, 1.0 + float64(residual)[0])):
        sums = sums - sums.mean() if name == "layer_norm" else sums
        norms[contract] = sums / np.sqrt(np.mean(sums**2) + 1e-6)
    # The first quotient beside a tie of 1 and 1.125, on the side where the other contract's is on the other.
    scale = np.abs(norms[rounded][0]) / 1.0625 * (0.9999 if rounded else 1.0001) or 1.0
    codes_of = {contract: E4M3.encode(norm / np.float32(scale)) for contract, norm in norms.items()}
    assert codes_of[True][0] != codes_of[False][0]
    weight = torch.full((64,), NORMS[name], dtype=torch.float32, device=DEVICE)
    options = {"round_residual": rounded, "rounding": "none", "scale": one(scale)}

    def call(x, residual):
        norm = tq.PRODUCERS[name]
        activation, total = norm(x, weight, 1e-6, residual=residual, scheme="fp8_tensor", **options)
        return activation.data.view(torch.uint8), total

    torch._dynamo.reset()
    made = [call(x, residual), torch.compile(call, fullgraph=True, backend="aot_eager")(x, residual)]
    with tq.use_reference():
        made.append(call(x, residual))
    for codes, total in made:
        assert (total == 1).all()
        assert (codes.cpu().numpy()[0] == codes_of[rounded]).all()


def test_o06_whether_the_norm_is_rounded_before_quantization():
    """The witness under both contracts, and between them never more than one code and never many."""
    x = torch.tensor([[1.140625, 1.046875, 1.046875, 1.046875]]).bfloat16().to(DEVICE)
    w = torch.ones(4, dtype=torch.bfloat16, device=DEVICE)
    for rounding, want in (("none", 1.125), ("after_weight", 1.0)):
        activation = tq.rms_norm(x, w, 1e-6, scheme="fp8_tensor", scale=one(1.0), rounding=rounding)
        assert float64(activation.dequantize())[0, 0] == want
    for scheme in ("fp8_tensor", "fp8_token", "int8_token", "mxfp8"):
        case = Case(tq.PRODUCERS["rms_norm"], tq.SCHEMES[scheme], 64, 1024)
        case.options.pop("residual")
        form, codes, scales = format_of(scheme), [], []
        for rounding in ("none", "after_weight"):
            case.extra = {"rounding": rounding}
            got = case.run()
            codes.append(form.elements(got.codes.cpu().numpy()))
            scales.append(float32(got.activation.scales()))
        flipped = scales[0] * 2.0 == scales[1], scales[1] * 2.0 == scales[0]  # of powers of two
        same = ~(flipped[0] | flipped[1]).repeat(1024 // scales[0].shape[1], 1)
        steps = np.where(same, np.abs(codes[0] - codes[1]), 0)
        # bf16 moves y by 2^-9 of it at most, so that a quotient crosses a midpoint in that part of a spacing.
        assert 0 < (steps > 0).mean() < 2.0**-8 * (form.values()[-1] if scheme == "int8_token" else 16)
        assert steps.max() == 1 and same.mean() > 0.95


@pytest.mark.parametrize("scheme", ["fp8_group128_pow2", "fp8_group128_ue8m0", "mxfp8", "mxfp8_e5m2", "mxfp4_ceil"])
def test_o07_the_smallest_power_of_two_that_covers_amax(scheme):
    form, group = format_of(scheme), tq.SCHEMES[scheme].group
    base = np.float32(form.values()[-1]) * np.exp2(np.float32([-10, -3, 3, 40, -60]))
    tiny = np.float32(form.values()[-1] * 2.0**-130)
    around = [np.nextafter(base, np.float32(0)), np.nextafter(base, np.float32(INF))]
    amax = np.concatenate([base, *around, [tiny, np.float32(3e38)]])
    x = torch.zeros(len(amax), group)
    x[:, 9] = torch.from_numpy(amax)
    activation = tq.quantize(x.to(DEVICE), scheme=scheme)
    scales = float64(activation.scales())[:, 0]
    least = power_of_two_above(np.float32(tq.SCHEMES[scheme].min_scale))
    want = power_of_two_above(np.float64(amax) / form.values()[-1])
    assert (scales == np.maximum(want, max(float(least), 2.0**-127))).all()
    assert (np.float64(amax) / scales <= form.values()[-1]).all()
    if activation.scale.dtype == torch.float32:
        assert (activation.scale.contiguous().view(torch.int32) & 0x807FFFFF == 0).all()


@pytest.mark.parametrize("amax", [2.0, 100.0, INF])
def test_o08_an_activation_beyond_the_calibrated_maximum(amax):
    """The block scale saturates at 448; no byte of a scale is NaN; neighbours are exact."""
    x = torch.full((1, 64), 0.25)
    x[0, 16:32] = amax
    activation = tq.quantize(x.bfloat16().to(DEVICE), scheme="nvfp4", layout="row_major", global_scale_inv=one(2688.0))
    assert activation.scale.dtype == torch.float8_e4m3fn
    stored, codes = activation.scale.view(torch.uint8)[0], E2M1.elements(activation.data.cpu().numpy())[0]
    ordinary = int(E4M3.encode(np.float32(2688) * (np.float32(0.25) * np.float32(1 / 6))))
    assert stored.tolist() == [ordinary, 0x7E, ordinary, ordinary]
    assert (codes[16:32] == 7).all() and (float64(activation.dequantize())[0, 16:32] == 1.0).all()
    assert (np.delete(codes, np.s_[16:32]) == codes[0]).all()


@pytest.mark.parametrize("inverse", [1.0, 0.37, 3.0, 2688 / 12.0, 0.02])
def test_o11_the_global_scale_and_its_reciprocal(inverse):
    """value = code * block scale / global_scale_inv: the byte of each block, the error of each decode, and one GEMM."""
    x, w = torch.randn(32, 256).bfloat16() * 3, torch.randn(48, 256).bfloat16()
    quantized = []
    for each, factor in ((x, inverse), (w, 5.0)):
        activation = tq.quantize(each.to(DEVICE), scheme="nvfp4", layout="row_major", global_scale_inv=one(factor))
        blocks = float32(each).reshape(len(each), 16, 16)
        wanted = E4M3.encode(np.float32(factor) * (np.abs(blocks).max(-1) * np.float32(1 / 6)))
        assert (activation.scale.view(torch.uint8).cpu().numpy() == wanted).all()
        codes = E2M1.decode(activation.data.cpu().numpy()).reshape(blocks.shape)
        unscaled = (codes * E4M3.decode(wanted)[..., None]).reshape(len(each), -1)
        error = np.linalg.norm(unscaled / np.float64(np.float32(factor)) - float64(each)) / np.linalg.norm(
            float64(each)
        )
        assert 0.09 < error < 0.10, f"{factor}: {error}"
        assert np.allclose(float64(activation.dequantize(torch.float32)), unscaled / np.float32(factor), rtol=1e-6)
        quantized.append((unscaled, np.float64(np.float32(factor))))
    (a, a_factor), (b, b_factor) = quantized
    alpha = 1.0 / a_factor * (1.0 / b_factor)
    product = float64(x) @ float64(w).T
    assert np.linalg.norm(alpha * (a @ b.T) - product) < 0.15 * np.linalg.norm(product)


@pytest.mark.parametrize("name", ["silu_mul", "silu"])
def test_o17_activations_at_the_ends_of_their_range(name):
    """No exponential of a large gate becomes NaN; the sign of what vanishes is kept; silu(-inf) is NaN as in torch."""
    gate = torch.tensor([[-1e4, -300.0, -88.0, -50.0, -13.24, -6.0, -3.0, 3.0, 11.0, 40.0, 300.0, 1e4, -INF, INF]])
    x = (torch.cat([gate, torch.ones_like(gate)], 1) if name == "silu_mul" else gate).to(DEVICE)
    g = np.float64(gate.numpy())
    with np.errstate(all="ignore"):
        want = g / (1.0 + np.exp(-g))
    for scheme in ("fp8_tensor", "fp8_e5m2_tensor", "fp8_fnuz_tensor"):
        scale = 25.0
        activation = tq.PRODUCERS[name](x, scheme=scheme, scale=one(scale), rounding="none")
        form, largest = format_of(scheme), format_of(scheme).values()[-1]
        got = form.decode(activation.data.view(torch.uint8).cpu().numpy())
        assert np.isnan(got[0, -2]) and got[0, -1] == largest and (np.isnan(got).sum() == 1)
        known = np.clip(want[:, :-2] / scale, -largest, largest)
        assert (np.abs(got[:, :-2] - known) <= form.spacing(known) / 2 * 1.00001).all()
        if not form.one_zero:
            assert np.signbit(got[0, :7]).all()


@pytest.mark.parametrize("name", ["gelu", "gelu_mul"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_o17_gelu_of_large_values(name, approximate):
    """No NaN, x above, and a zero or a negative below; the two forms are the two formulas."""
    values = [-3e38, -1e20, -300.0, -50.0, -13.24, -6.0, -5.0, -4.0, -3.0, 3.0, 11.0, 13.5, 40.0, 300.0, 1e20, 3e38]
    x = torch.tensor(values, device=DEVICE)[:, None]
    given = x if name == "gelu" else torch.cat([x, torch.ones_like(x)], 1)
    for dtype in (torch.float32, torch.bfloat16):
        activation = tq.PRODUCERS[name](
            given.to(dtype), scheme="fp8_token", approximate=approximate, rounding="none", min_scale=2.0**-80
        )
        got, exact = float64(activation.dequantize(torch.float32))[:, 0], float64(x.to(dtype))[:, 0]
        with np.errstate(over="ignore"):
            want = FORMULAS["gelu"](x.to(dtype), approximate)[:, 0]
        assert not np.isnan(got).any() and (np.signbit(got) == np.signbit(exact)).all()
        assert (got[exact <= -13] > -1e-30).all()
        # One code for a row: what is below the least scale is 0.
        slack = 2.0**-80 if approximate == "tanh" else np.abs(exact) * 2.0**-23 * (exact < 0)
        assert (np.abs(got - want) <= 1e-4 * np.abs(want) + slack).all(), (got, want)
    # At -3 the forms are 10 % apart.
    gap = FORMULAS["gelu"](x, "none") / FORMULAS["gelu"](x, "tanh")
    assert np.abs(gap[8, 0] - 1) > 0.1


@pytest.mark.parametrize("scheme", ORACLES)
def test_o26_the_interpreter_rounds_as_the_formats_say(scheme):
    """126.24 is one of the values that some versions lose the carry of."""
    x = torch.tensor([126.24, -126.24, 7.9, 31.7, 0.99999994, 1.9999999, -3.9999998, 57343.9] * 64).view(2, 256)
    want = quantized_by_oracle(scheme, float32(x), given_of(unit_inputs(scheme)))
    got = tq.quantize(x.to(DEVICE), scheme=scheme, **unit_inputs(scheme))
    assert_codes(tq.SCHEMES[scheme], got.data.view(torch.uint8), want.codes, want.scales, scheme)
    rounded = tq.quantize(x.to(DEVICE), scheme=scheme, return_unquantized=True, **unit_inputs(scheme))[1]
    assert_same_bits(rounded, x.to(DEVICE))
    assert np.float32(126.24).astype(ml_dtypes.float8_e4m3fn) == 128
