"""NaN, infinities, zeros, bounds of the scale and tiny values, for every scheme. NaN keeps a NaN code, always."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import (
    DEVICE,
    DYNAMIC_SCHEMES,
    FLT_MAX,
    FORMATS,
    ORACLES,
    TOKEN,
    Case,
    as_stored,
    assert_codes,
    assert_same_bits,
    float32,
    float64,
    scaled_by_oracle,
)

import tq

every_scheme = pytest.mark.parametrize("scheme", ORACLES)
dynamic_scheme = pytest.mark.parametrize("scheme", DYNAMIC_SCHEMES)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
E4M3 = FORMATS["e4m3"]
NAN, INF = float("nan"), float("inf")


def quantize(x, scheme, **options):
    """(codes, scales as a [M, G] array) on the device, as numpy."""
    if not tq.SCHEMES[scheme].dynamic:
        options["scale"] = torch.ones(1, device=DEVICE)
    activation = tq.quantize(x.to(DEVICE), scheme=scheme, **options)
    return activation.data.view(torch.uint8).cpu().numpy(), float32(activation.scales())


def compare_with_oracle(x, scheme, scale_ub=None, min_scale=None):
    """Codes and scales of the device, which must be the oracle's to the bit."""
    bound = None if scale_ub is None else torch.tensor([scale_ub], device=DEVICE)
    codes, scales = quantize(x, scheme, scale_ub=bound, min_scale=min_scale)
    expected, expected_scales = scaled_by_oracle(scheme, float32(x), 1.0, scale_ub, min_scale)
    label = f"{scheme} scale_ub={scale_ub} min_scale={min_scale}"
    assert_codes(tq.SCHEMES[scheme], torch.from_numpy(codes), expected, scales, label)
    assert (scales == expected_scales).all() and np.isfinite(scales).all()
    return codes, scales


@every_dtype
@pytest.mark.parametrize("nan", [NAN, -NAN])
@every_scheme
def test_a_nan_stays_one_and_touches_nothing_else(scheme, nan, dtype):
    x = torch.randn(4, 512).to(dtype)
    codes, scales = quantize(x.index_fill(1, torch.tensor([7]), 0.0), scheme)
    x[:, 7] = 0.0
    x[1, 7] = nan
    got, got_scales = quantize(x, scheme)
    assert got[1, 7] & 0x7F == 0x7F and np.isnan(E4M3.decode(got)[1, 7])
    got[1, 7] = codes[1, 7]
    assert (got == codes).all() and (got_scales == scales).all()


@every_dtype
def test_a_static_scale_saturates_infinities(dtype):
    x = torch.ones(4, 256).to(dtype)
    x[2, 3], x[3, 3], x[1, 7] = INF, -INF, NAN
    codes, _ = quantize(x, "fp8_tensor")
    assert (codes[2, 3], codes[3, 3], codes[1, 7] & 0x7F) == (0x7E, 0xFE, 0x7F)
    codes[2, 3] = codes[3, 3] = codes[1, 7] = 0x38
    assert (codes == 0x38).all()


@every_dtype
@dynamic_scheme
def test_an_infinity_gets_the_scale_of_the_largest_finite_value(scheme, dtype):
    """Divided by it, it is NaN; times its reciprocal, it saturates. Neighbours stay finite, other groups the same."""
    x = torch.randn(4, 512).to(dtype)
    codes, scales = quantize(x, scheme)
    x[2, 3], x[3, 300] = INF, -INF
    got, got_scales = quantize(x, scheme)
    assert (got[2, 3], got[3, 300]) == ((0x7F, 0x7F) if ORACLES[scheme] is TOKEN else (0x7E, 0xFE))
    assert np.isnan(E4M3.decode(np.delete(got, [3, 300], 1))).sum() == 0
    size = tq.SCHEMES[scheme].group or 512
    for row, column in ((2, 3), (3, 300)):
        group = column // size
        assert got_scales[row, group] == as_stored(scheme, FLT_MAX / np.float32(448))
        place = slice(group * size, (group + 1) * size)
        got[row, place], got_scales[row, group] = codes[row, place], scales[row, group]
    assert (got == codes).all() and (got_scales == scales).all()


@every_scheme
def test_nothing_but_nan_and_infinities(scheme):
    x = torch.tensor([NAN, INF, -INF, NAN])[:, None].expand(4, 256).contiguous()
    codes, _ = compare_with_oracle(x, scheme)
    assert (codes[[0, 3]] & 0x7F == 0x7F).all()
    assert (codes[1:3] == (0x7F if ORACLES[scheme] is TOKEN else [[0x7E], [0xFE]])).all()


@every_dtype
@every_scheme
def test_zero_rows_and_groups(scheme, dtype):
    x = torch.randn(3, 512).to(dtype)
    x[1], x[2, 128:256], x[2, 200] = 0.0, 0.0, -0.0
    codes, scales = quantize(x, scheme)
    assert (codes[1] == 0).all() and codes[2, 200] == 0x80
    assert (np.delete(codes[2, 128:256], 200 - 128) == 0).all()
    assert np.isfinite(scales).all() and (scales > 0).all()
    x[1], x[2, 128:256] = 1.0, 1.0  # inside the range that the rest of row 2 spans
    others, other_scales = quantize(x, scheme)
    assert (codes[0] == others[0]).all() and (codes[2, 256:] == others[2, 256:]).all()
    if tq.SCHEMES[scheme].dynamic:
        assert (scales[0] == other_scales[0]).all() and scales[2, -1] == other_scales[2, -1]


@pytest.mark.parametrize("producer", tq.PRODUCERS)
@every_scheme
def test_zero_rows_of_every_producer(producer, scheme):
    """Codes of zero, whatever the sign; a residual that cancels x included."""
    case = Case(tq.PRODUCERS[producer], tq.SCHEMES[scheme], 3, 256)
    case.options.pop("bias", None)  # it is what a zero row gives
    case.change_rows(lambda rows: rows.index_fill(0, torch.tensor([1], device=DEVICE), 0.0))
    got = case.run()
    assert (got.codes[1] & 0x7F == 0).all() and (got.codes[0] & 0x7F != 0).any()
    assert got.activation.scale.isfinite().all() and (got.activation.scale > 0).all()
    if "residual" in case.options:
        case.options["residual"] = -case.arguments[0]
        assert (case.run().codes & 0x7F == 0).all()


@pytest.mark.parametrize("special", [NAN, INF, -INF])
@pytest.mark.parametrize("producer", tq.PRODUCERS)
@every_scheme
def test_specials_stay_in_their_row(producer, scheme, special):
    case = Case(tq.PRODUCERS[producer], tq.SCHEMES[scheme], 5, 256)
    want = case.run()
    case.arguments[0][3, 5] = special
    got = case.run()
    for row in (0, 1, 2, 4):
        assert_same_bits(got.codes[row], want.codes[row])
        if case.scheme.dynamic:
            assert_same_bits(got.activation.scale[row], want.activation.scale[row])
    assert got.activation.scale.isfinite().all()
    if np.isnan(special):
        column = 5 // 2 if producer == "swiglu_oai" else 5  # of pairs
        assert got.codes[3, column] & 0x7F == 0x7F


def test_silu_at_the_ends_of_its_range():
    """silu(-1e4) is -0 and silu(1e4) is 1e4; of -inf it is NaN, as in torch."""
    gate = torch.tensor([[-1e4, 1e4, -INF, INF, -300.0, -88.0, 0.0, -0.0]])
    x, scale = torch.cat([gate, torch.ones_like(gate)], 1).to(DEVICE), torch.full((1,), 100.0, device=DEVICE)
    for rounding in ("none", "product", "activation_and_product"):
        activation = tq.silu_mul(x, scheme="fp8_tensor", scale=scale, rounding=rounding)
        codes = activation.data.view(torch.uint8)[0].tolist()
        assert codes == [0x80, E4M3.encode(100.0), 0x7F, 0x7E, 0x80, 0x80, 0x00, 0x80]


@every_dtype
@pytest.mark.parametrize("limit", [0.5, 1.0, 3.3, 1e30])
@dynamic_scheme
def test_scale_ub_bounds_amax(scheme, limit, dtype):
    x = torch.randn(8, 512).to(dtype)
    codes, scales = compare_with_oracle(x, scheme, scale_ub=limit)
    assert (scales <= as_stored(scheme, np.float32(limit) / np.float32(448))).all()
    if limit == 0.5:
        assert (codes & 0x7F == 0x7E).sum() > 1000


@pytest.mark.parametrize("min_scale", [2.0**-80, 1e-12, 0.01, 3.0])
@dynamic_scheme
def test_min_scale_bounds_the_scale(scheme, min_scale):
    x = torch.randn(8, 512) * torch.logspace(-25, 1, 8)[:, None]
    _, scales = compare_with_oracle(x, scheme, min_scale=min_scale)
    least = as_stored(scheme, min_scale)
    assert (scales >= least).all() and (scales == least).any()


@dynamic_scheme
def test_scale_ub_below_min_scale(scheme):
    """The least scale wins, as where the bounds of a scale are applied in this order."""
    _, scales = quantize(torch.randn(3, 256), scheme, scale_ub=torch.zeros(1, device=DEVICE), min_scale=0.25)
    assert (scales == 0.25).all()


@pytest.mark.parametrize("value", [1e-45, 1e-40, 1.1754944e-38, 2.0**-80, 1e-12])
@dynamic_scheme
def test_an_amax_below_the_least_scale(scheme, value):
    """Subnormal fp32 values: a finite scale, and codes of y / scale rounded to zero with y's sign."""
    x = torch.zeros(2, 256)
    x[0, 3], x[0, 4], x[1] = value, -value, value
    codes, scales = quantize(x, scheme)
    least = np.float32(tq.SCHEMES[scheme].min_scale)
    assert (scales[1] == as_stored(scheme, np.maximum(np.float32(value) / np.float32(448), least))).all()
    assert codes[0, 3] == E4M3.encode(np.float32(value) / scales[0, 0])
    assert codes[0, 4] == codes[0, 3] | 0x80 and (np.delete(codes[0], [3, 4]) == 0).all()


@every_scheme
def test_ties_and_magnitudes_of_every_kind(scheme):
    """A million bf16 values over 60 binades, and fp32 values whose quotients lie at ties, against the oracle."""
    exponents = torch.randint(-30, 30, (256, 4)).repeat_interleave(1024, 1)
    compare_with_oracle((torch.randn(256, 4096) * torch.exp2(exponents.float())).bfloat16(), scheme)
    ties = torch.from_numpy((E4M3.values()[1:] + E4M3.values()[:-1]) / 2).float()
    rows = torch.cat([ties, -ties, torch.tensor([448.0, -448.0, 0.0, 1.0])])
    rows = rows.expand(8, 256) * torch.exp2(torch.arange(-4.0, 4.0))[:, None]
    compare_with_oracle(rows.contiguous(), scheme)


@pytest.mark.parametrize("scale", [1.0, 0.1, 3.7, 1e-30, 1e30, 2.0**-126])
def test_a_static_scale_multiplies_by_its_reciprocal(scale):
    x = torch.randn(8, 256) * scale * 50
    got = tq.quantize(x.to(DEVICE), scheme="fp8_tensor", scale=torch.tensor(scale, device=DEVICE))
    want, _ = scaled_by_oracle("fp8_tensor", float32(x), scale)
    assert_codes(tq.SCHEMES["fp8_tensor"], got.data.view(torch.uint8), want, scale, f"scale {scale}")
    assert (want & 0x7F > 0x40).mean() > 0.5 and got.scale.shape == ()


@dynamic_scheme
def test_ties_of_the_quotient(scheme):
    """Y / scale and y * (1 / scale) part at ties; the rows hold thousands of quotients within an ulp of one."""
    ties = torch.from_numpy((E4M3.values()[1:] + E4M3.values()[:-1]) / 2).float()
    scales = (1 + torch.arange(64) / 64) * 2.0**-3
    x = torch.cat([ties, -ties, torch.tensor([448.0, -448.0, 0.0, 1.0])]) * scales[:, None]
    codes, _ = compare_with_oracle(x.contiguous(), scheme)
    quotient, product = x.numpy() / float32(scales)[:, None], x.numpy() * (np.float32(1) / float32(scales)[:, None])
    assert (E4M3.encode(quotient) != E4M3.encode(product)).sum() > 100 and codes.shape == x.shape


@every_dtype
def test_norms_of_the_largest_and_smallest_rows(dtype):
    """A tiny row is divided by the root of eps; one whose squares leave fp32 gives zeros, as its formula does."""
    limit = torch.finfo(dtype).max
    x = torch.full((3, 64), 1.0).to(dtype)
    x[1], x[2] = 1e-6, limit
    weight = torch.ones(64, dtype=dtype, device=DEVICE)
    activation = tq.rms_norm(x.to(DEVICE), weight, 1e-6, scheme="fp8_token", rounding="none", min_scale=2.0**-80)
    y = float64(activation.dequantize(torch.float32))
    small = float(x[1, 0]) / np.sqrt(float(x[1, 0]) ** 2 + 1e-6)
    assert np.allclose(y[0], 1.0, rtol=2e-6) and np.allclose(y[1], small, rtol=2e-6)
    assert (y[2] == 0).all() if dtype != torch.float16 else np.allclose(y[2], 1.0, rtol=2e-6)
