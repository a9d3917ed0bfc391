"""NaN, infinities, zeros, bounds of the scale and tiny values, for every scheme.

NaN keeps a NaN code where the code has one; of INT8 it is 0, or the zero point, and of E2M1 the largest value.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comparing import assert_same_bits
from formulas import float64
from helpers import DEVICE, DYNAMIC_SCHEMES, FORMATS, ORACLES, PAIRS, Case, as_stored, format_of
from oracles import GROUP, INVERSE, STATIC_DIVIDED, TOKEN
from quantizing import code_of, compare_with_oracle, nan_code, quantize, unit_inputs

import tq

STATIC_SCHEMES = [name for name in ORACLES if name not in DYNAMIC_SCHEMES]
BOUNDED_SCHEMES = [name for name in DYNAMIC_SCHEMES if "scale_ub" in tq.SCHEMES[name].rule.takes]
every_scheme = pytest.mark.parametrize("scheme", ORACLES)
static_scheme = pytest.mark.parametrize("scheme", STATIC_SCHEMES)
dynamic_scheme = pytest.mark.parametrize("scheme", DYNAMIC_SCHEMES)
bounded_scheme = pytest.mark.parametrize("scheme", BOUNDED_SCHEMES)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
every_pair = pytest.mark.parametrize(("producer", "scheme"), PAIRS)
E4M3 = FORMATS["e4m3"]
NAN, INF = float("nan"), float("inf")


@every_dtype
@every_scheme
def test_a_nan_stays_one_and_touches_nothing_else(scheme, dtype):
    x = torch.randn(4, 512).to(dtype)
    x[:, 7] = 0.0
    want = quantize(x, scheme)
    for nan in (NAN, -NAN):
        x[1, 7] = nan
        got = quantize(x, scheme)
        assert got.codes[1, 7] == nan_code(scheme, got.zero_points[1, 0])
        got.codes[1, 7] = want.codes[1, 7]
        assert (got.codes == want.codes).all() and (got.scales == want.scales).all()
        assert (got.zero_points == want.zero_points).all()


@every_dtype
@static_scheme
def test_a_static_scale_saturates_infinities(scheme, dtype):
    x = torch.ones(4, 256).to(dtype)
    x[2, 3], x[3, 3], x[1, 7] = INF, -INF, NAN
    codes = quantize(x, scheme).codes
    assert (codes[2, 3], codes[3, 3]) == (code_of(scheme, 1e9), code_of(scheme, -1e9))
    assert codes[1, 7] == nan_code(scheme, 3.0 if tq.SCHEMES[scheme].rule.zero_point else 0.0)
    codes[2, 3] = codes[3, 3] = codes[1, 7] = code_of(scheme, 1.0)
    assert (codes == code_of(scheme, 1.0)).all()


@static_scheme
def test_a_static_scale_saturates_whatever_leaves_fp32(scheme):
    """Quotients beyond FLT_MAX, of finite values by a tiny scale."""
    x = torch.tensor([[1e38, -1e38, 3e38, -3e38] * 16])
    codes = compare_with_oracle(x, scheme, scale=torch.tensor([1e-4], device=DEVICE)).codes
    assert set(codes[0, ::2]) == {code_of(scheme, 1e9)} and set(codes[0, 1::2]) == {code_of(scheme, -1e9)}


@every_dtype
@dynamic_scheme
def test_an_infinity_gets_the_scale_of_the_largest_finite_value(scheme, dtype):
    """Divided by it, it is NaN; times its reciprocal, it saturates. Neighbours stay finite, other groups the same."""
    x = torch.randn(4, 512).to(dtype)
    want = quantize(x, scheme)
    x[2, 3], x[3, 300] = INF, -INF
    got = compare_with_oracle(x, scheme)
    ends = [code_of(scheme, value) for value in (1e9, -1e9)]
    wanted = [nan_code(scheme)] * 2 if ORACLES[scheme].infinity == "nan" else ends
    assert [got.codes[2, 3], got.codes[3, 300]] == wanted
    assert np.isfinite(np.delete(got.values, [3, 300], 1)).all()
    size = tq.SCHEMES[scheme].group or 512
    for row, column in ((2, 3), (3, 300)):
        group = column // size
        assert got.scales[row, group] > want.scales[row, group]
        place = slice(group * size, (group + 1) * size)
        got.codes[row, place], got.scales[row, group] = want.codes[row, place], want.scales[row, group]
    assert (got.codes == want.codes).all() and (got.scales == want.scales).all()


@every_scheme
def test_nothing_but_nan_and_infinities(scheme):
    x = torch.tensor([NAN, INF, -INF, NAN, INF])[:, None].expand(5, 256).contiguous()
    x[4, ::2] = -INF
    got = compare_with_oracle(x, scheme)
    for row in (0, 3):
        assert (got.codes[row] == nan_code(scheme, got.zero_points[row, 0])).all()
        assert (np.isnan(got.values[row]) | (np.abs(got.values[row]) <= 6.0)).all()
    if tq.SCHEMES[scheme].code.name != "int8":
        ends = [[code_of(scheme, value)] for value in (1e9, -1e9)]
        wanted = nan_code(scheme) if ORACLES[scheme].infinity == "nan" else ends
        assert (got.codes[1:3] == wanted).all()


@every_dtype
@every_scheme
def test_zero_rows_and_groups(scheme, dtype):
    x = torch.randn(3, 512).to(dtype)
    x[1], x[2, 128:256], x[2, 200] = 0.0, 0.0, -0.0
    got = quantize(x, scheme)
    assert (got.values[1] == 0).all() and (got.values[2, 128:256] == 0).all()
    if tq.SCHEMES[scheme].code.name != "int8":
        form = format_of(scheme)
        assert (got.codes[1] == 0).all() and (np.delete(got.codes[2, 128:256], 200 - 128) == 0).all()
        assert got.codes[2, 200] == (0 if getattr(form, "one_zero", False) else form.sign)
    assert np.isfinite(got.scales).all() and ((got.scales > 0).all() or scheme == "nvfp4")
    x[1], x[2, 128:256] = 1.0, 1.0  # inside the range that the rest of row 2 spans
    others = quantize(x, scheme)
    assert (got.codes[0] == others.codes[0]).all() and (got.codes[2, 256:] == others.codes[2, 256:]).all()
    if tq.SCHEMES[scheme].dynamic:
        assert (got.scales[0] == others.scales[0]).all() and got.scales[2, -1] == others.scales[2, -1]


@every_pair
def test_zero_rows_of_every_producer(producer, scheme):
    """Codes of zero, whatever the sign; a residual that cancels x included."""
    case = Case(tq.PRODUCERS[producer], tq.SCHEMES[scheme], 3, 256)
    case.options.pop("bias", None)  # it is what a zero row gives
    case.change_rows(lambda rows: rows.index_fill(0, torch.tensor([1], device=DEVICE), 0.0))
    activation = case.run().activation
    values = activation.dequantize(torch.float32)
    assert (values[1] == 0).all() and (values[0] != 0).any()
    scales = activation.scales()
    assert scales.isfinite().all() and ((scales > 0).all() or scheme == "nvfp4")
    if "residual" in case.options:
        case.options["residual"] = -case.arguments[0]
        assert (case.run().activation.dequantize(torch.float32) == 0).all()


@every_pair
def test_specials_stay_in_their_row(producer, scheme):
    case = Case(tq.PRODUCERS[producer], tq.SCHEMES[scheme], 5, 256)
    want = case.run()
    for row, special in ((1, NAN), (2, INF), (3, -INF)):
        case.arguments[0][row, 5] = special
    got = case.run()
    for row in (0, 4):
        assert_same_bits(got.codes[row], want.codes[row])
        if case.scheme.dynamic:
            assert_same_bits(got.activation.scales()[row], want.activation.scales()[row])
    assert got.activation.scales().isfinite().all()
    zero = 0.0 if got.activation.zero_point is None else float64(got.activation.zero_point).reshape(-1)
    column = 5 // 2 if producer == "swiglu_oai" else 5  # of pairs
    element = format_of(scheme).elements(got.codes.cpu().numpy())[1, column]
    assert element == nan_code(scheme, np.broadcast_to(zero, 5)[1])


def test_silu_at_the_ends_of_its_range():
    """silu(-1e4) is -0 and silu(1e4) is 1e4; of -inf it is NaN, as in torch."""
    gate = torch.tensor([[-1e4, 1e4, -INF, INF, -300.0, -88.0, 0.0, -0.0]])
    x, scale = torch.cat([gate, torch.ones_like(gate)], 1).to(DEVICE), torch.full((1,), 100.0, device=DEVICE)
    for rounding in ("none", "product", "activation_and_product"):
        activation = tq.silu_mul(x, scheme="fp8_tensor", scale=scale, rounding=rounding)
        codes = activation.data.view(torch.uint8)[0].tolist()
        assert codes == [0x80, E4M3.encode(100.0), 0x7F, 0x7E, 0x80, 0x80, 0x00, 0x80]


@every_dtype
@bounded_scheme
def test_scale_ub_bounds_amax(scheme, dtype):
    x = torch.randn(8, 512).to(dtype)
    free = quantize(x, scheme)
    for limit in (0.5, 1.0, 3.3, 1e30):
        got = compare_with_oracle(x, scheme, scale_ub=torch.tensor([limit], device=DEVICE))
        assert (got.scales <= free.scales).all()
        if limit == 0.5:
            magnitude = np.abs(np.where(got.codes < 0, got.codes + 1, got.codes & ~format_of(scheme).sign))
            assert (magnitude == code_of("int8_token" if magnitude.max() == 127 else scheme, 1e9)).sum() > 1000
        if limit == 1e30:
            assert (got.scales == free.scales).all()


@every_dtype
@bounded_scheme
def test_a_bounded_scale_saturates_whatever_leaves_fp32(scheme, dtype):
    """Finite values whose quotients are beyond FLT_MAX are an end of the code's range, as in vLLM's op; an infinity is
    what it is without a bound."""
    x = torch.tensor([[1e38, -1e38, 3e38, -3e38, 1.0, -1.0, 0.0, -0.0] * 16, [INF, -INF, NAN, 3e38] * 32]).to(dtype)
    for limit in (1e-30, 1e-3, 1.0):
        got = compare_with_oracle(x, scheme, scale_ub=torch.tensor([limit], device=DEVICE))
        ends = [code_of(scheme, value) for value in (1e9, -1e9)]
        if not tq.SCHEMES[scheme].rule.zero_point:
            assert got.codes[0, :4].tolist() == 2 * ends and got.codes[1, 3] == ends[0]
            wanted = [nan_code(scheme)] * 2 if ORACLES[scheme].infinity == "nan" else ends
            assert got.codes[1, :2].tolist() == wanted and got.codes[1, 2] == nan_code(scheme)


@bounded_scheme
def test_min_scale_bounds_the_scale(scheme):
    x = torch.randn(8, 512) * torch.logspace(-25, 1, 8)[:, None]
    for min_scale in (2.0**-80, 1e-12, 0.01, 3.0):
        got, least = compare_with_oracle(x, scheme, min_scale=min_scale), as_stored(scheme, min_scale)
        assert (got.scales >= least).all() and (got.scales == least).any()


@bounded_scheme
def test_scale_ub_below_min_scale(scheme):
    """The least scale wins, as where the bounds of a scale are applied in this order."""
    got = compare_with_oracle(torch.randn(3, 256), scheme, scale_ub=torch.zeros(1, device=DEVICE), min_scale=0.25)
    assert (got.scales == 0.25).all()


@pytest.mark.parametrize("value", [1e-45, 1e-40, 1.1754944e-38, 2.0**-80, 1e-12])
@dynamic_scheme
def test_an_amax_below_the_least_scale(scheme, value):
    """Subnormal fp32 values: a finite scale, and codes of y / scale rounded to zero with y's sign."""
    x = torch.zeros(2, 256)
    x[0, 3], x[0, 4], x[1] = value, -value, value
    got = compare_with_oracle(x, scheme)
    form, largest = format_of(scheme), format_of(scheme).values()[-1]
    if scheme not in ("nvfp4", "int8_token_azp") and value / largest < tq.SCHEMES[scheme].min_scale:
        assert (got.scales[1] == as_stored(scheme, tq.SCHEMES[scheme].min_scale)).all()
    assert np.isfinite(got.values).all() and (np.delete(got.values[0], [3, 4]) == 0).all()
    if hasattr(form, "bias"):
        assert got.codes[0, 4] == got.codes[0, 3] | (0 if got.codes[0, 3] == 0 and form.one_zero else form.sign)


def ties_in_groups(scheme: str) -> np.ndarray:
    """[groups * group]: all midpoints of the code's neighbours, of both signs; in each group the ends of the code's
    range, so that its scale is 1."""
    form, group = format_of(scheme), tq.SCHEMES[scheme].group or 256
    values = form.values()
    middle = (values[1:] + values[:-1]) / 2
    ties = np.concatenate([middle, -middle])
    ties = np.concatenate([ties, np.zeros(-len(ties) % (group - 2))]).reshape(-1, group - 2)
    low = -values[-1] - (tq.SCHEMES[scheme].code.name == "int8" and scheme == "int8_token_azp")
    ends = np.broadcast_to([values[-1], low], (len(ties), 2))
    return np.concatenate([ties, ends], 1).astype(np.float32).reshape(-1)


@every_scheme
def test_ties_and_magnitudes_of_every_kind(scheme):
    """bf16 values over 60 binades, and fp32 values whose quotients lie at ties, against the oracle."""
    exponents = torch.randint(-30, 30, (64, 4)).repeat_interleave(512, 1)
    compare_with_oracle((torch.randn(64, 2048) * torch.exp2(exponents.float())).bfloat16(), scheme)
    ties = torch.from_numpy(ties_in_groups(scheme))
    # Scales of powers of two; under a given one, and those of NVFP4 that saturate, only some rows are in range.
    got = compare_with_oracle(ties * torch.exp2(torch.arange(-4.0, 4.0))[:, None], scheme)
    if tq.SCHEMES[scheme].dynamic and scheme != "nvfp4":
        assert (got.scales[4] == 1.0).all()


@static_scheme
def test_a_static_scale_and_its_reciprocal(scheme):
    for scale in (1.0, 0.1, 3.7, 1e-30, 1e30, 2.0**-126):
        x = torch.randn(8, 256) * scale * 50
        got = compare_with_oracle(x, scheme, scale=torch.tensor([scale], device=DEVICE))
        assert (got.values != 0).mean() > 0.9
    given = torch.tensor(0.1, device=DEVICE)
    assert tq.quantize(x.to(DEVICE), scheme=scheme, **{**unit_inputs(scheme), "scale": given}).scale.shape == ()


QUOTIENTS = [name for name, oracle in ORACLES.items() if oracle in (TOKEN, GROUP, INVERSE, STATIC_DIVIDED)]


@pytest.mark.parametrize("scheme", QUOTIENTS)
def test_ties_of_the_quotient(scheme):
    """y / scale and y * (1 / scale) part at ties; the rows hold thousands of quotients within an ulp of one."""
    scales, ties = ((1 + torch.arange(64) / 64) * 2.0**-3)[:, None], torch.from_numpy(ties_in_groups(scheme))
    if tq.SCHEMES[scheme].dynamic:
        calls = [(ties * scales, {})]
    else:
        calls = [((ties * scale)[None], {"scale": scale.to(DEVICE)}) for scale in torch.rand(16) + 0.5]
    form, size, parted = format_of(scheme), tq.SCHEMES[scheme].group or len(ties), 0
    for x, options in calls:
        scale = compare_with_oracle(x, scheme, **options).scales.repeat(size, 1)
        parted += (form.encode(x.numpy() / scale) != form.encode(x.numpy() * (np.float32(1) / scale))).sum()
    assert parted > 50


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
