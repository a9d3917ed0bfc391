"""A call like an earlier one takes a shorter way; it must never be the way of a call that is unlike."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from comparing import assert_equal_results, assert_same_bits
from helpers import DEVICE, ONE_EACH, PAIR_LAYOUTS, PAIRS, Case, Result, float32, in_nan_memory

import tq
from tq.bench.cases import static_inputs
from tq.kernels import launch, plan, tuning

HIDDEN = 256


@pytest.fixture(autouse=True)
def no_plans():
    plan._plans.clear()


def no_more_plans(*arguments):
    raise AssertionError("a call like an earlier one was checked again")


def copied(result: Result) -> Result:
    """The result, out of reach of later calls."""
    return result._replace(side_outputs=[side.clone() for side in result.side_outputs])


def different_calls() -> list[Case]:
    """Calls that differ from another one in one thing each."""
    cases = []
    for name, scheme, layout in PAIR_LAYOUTS:
        producer, found = tq.PRODUCERS[name], tq.SCHEMES[scheme]

        def case(rows=4, size=HIDDEN, dtype=torch.bfloat16, producer=producer, found=found, layout=layout, **extra):
            cases.append(Case(producer, found, rows, size, dtype, layout, extra))
            return cases[-1]

        case()
        if (name, scheme) not in ONE_EACH[:3] or layout != found.layouts[0].name:
            continue
        case(rows=3)
        case(size=2 * HIDDEN)
        case(dtype=torch.float16)
        case().change_rows(in_nan_memory)
        case().change_rows(lambda rows: rows.view(2, 2, -1))
        # Half a vector further on, so that what is aligned is no longer.
        case().change_rows(lambda rows: torch.cat([rows.new_zeros(4, 4), rows], 1)[:, 4:])
        plain = case()
        for name in producer.optional:
            plain.options.pop(name)
        if found.dynamic:
            case(min_scale=0.5)
            case(min_scale=1.5)
            case(scale_ub=torch.tensor([0.25], device=DEVICE))
        if producer.name == "rms_norm":
            case(rounding="none")
            case(round_residual=not plan.replaced(producer, found).options["round_residual"])
            other = case()
            other.arguments = (*other.arguments[:-1], 0.5)
            other = case()
            other.options["residual"] = other.options["residual"].float()
        if producer.name == "silu_mul":
            case(rounding="product")
    return cases


def test_calls_that_differ_are_not_taken_for_each_other():
    """Each alone, without plans, against all of them in turn, twice."""
    cases, wanted = different_calls(), []
    for case in cases:
        plan._plans.clear()
        wanted.append(copied(case.run()))
    plan._plans.clear()
    for case, want in [*zip(cases, wanted, strict=True)] * 2:
        assert_equal_results(case.run(), want)
    assert len(plan._plans) >= len(cases) * 0.9


@pytest.mark.parametrize(("producer", "scheme"), PAIRS)
def test_the_second_call_is_not_checked_again(producer, scheme, monkeypatch):
    case, other = (Case(tq.PRODUCERS[producer], tq.SCHEMES[scheme], 4, HIDDEN) for _ in range(2))
    first = copied(case.run())
    want = other.run_reference()
    monkeypatch.setattr(plan, "make_plan", no_more_plans)
    again = case.run()
    assert_equal_results(again, first)
    assert again.codes.data_ptr() != first.codes.data_ptr(), "outputs are new in every call"
    # Other tensors of the same description: their values count, not those of the call that made the plan.
    with tq.use_reference():
        assert_equal_results(other.run(), want)
    got = other.run()
    assert (got.codes != first.codes).any()
    assert (got.codes != want.codes).sum() <= 1
    for mine, theirs in zip(got.side_outputs, want.side_outputs, strict=True):
        assert_same_bits(mine, theirs)


def test_a_forced_tiling_has_plans_of_its_own(monkeypatch):
    case = Case(tq.PRODUCERS["quantize"], tq.SCHEMES["fp8_group128"], 4, HIDDEN)
    chosen = []
    monkeypatch.setattr(launch, "cut", lambda *given, cut=launch.cut: chosen.append(cut(*given)) or chosen[-1])
    case.run()
    with tuning.force(tuning.RowConfig(1, 128, 1, 1)):
        case.run()
    case.run()
    assert [tiling.BLOCK_N.value for tiling, _ in chosen][:2] == [HIDDEN, 128]


def test_the_scale_is_read_anew():
    """Written in place, or another tensor at another place."""
    x = torch.randn(4, HIDDEN, device=DEVICE)
    scale = torch.tensor([0.5], device=DEVICE)
    seen = []
    for value in (0.5, 0.25, 0.125):
        scale.fill_(value)
        for given in (scale, scale.clone()):
            seen.append(tq.quantize(x, scheme="fp8_tensor", scale=given))
            assert seen[-1].scale is given
            want = (x / value).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert_same_bits(seen[-1].data, want, f"scale {value}")
    assert len(plan._plans) == 1


def test_bounds_of_the_scale_are_read_anew():
    x = torch.ones(2, HIDDEN, device=DEVICE)
    for bound in (1.0, 0.5, 0.25):
        scales = tq.quantize(x, scheme="fp8_token", scale_ub=torch.tensor([bound], device=DEVICE)).scale
        assert (float32(scales) == float32(torch.tensor(bound / 448))).all()


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("eps must be positive", lambda x, w, r: tq.rms_norm(x, w, 0.0, scheme="fp8_token", residual=r)),
        ("weight must have shape", lambda x, w, r: tq.rms_norm(x, w[1:], scheme="fp8_token", residual=r)),
        ("residual must have shape", lambda x, w, r: tq.rms_norm(x, w, scheme="fp8_token", residual=r[1:])),
        ("last stride of x", lambda x, w, r: tq.rms_norm(x.mT.contiguous().mT, w, scheme="fp8_token", residual=r)),
        ("rounding must be", lambda x, w, r: tq.rms_norm(x, w, scheme="fp8_token", residual=r, rounding="up")),
        ("layout of", lambda x, w, r: tq.rms_norm(x, w, scheme="fp8_token", residual=r, layout="diagonal")),
        ("scheme must be", lambda x, w, r: tq.rms_norm(x, w, scheme="fp8_row", residual=r)),
        ("scale must be None", lambda x, w, r: tq.rms_norm(x, w, scheme="fp8_token", residual=r, scale=w[:1].float())),
        ("scale must be given", lambda x, w, r: tq.rms_norm(x, w, scheme="fp8_tensor", residual=r)),
        ("min_scale must be", lambda x, w, r: tq.rms_norm(x, w, scheme="fp8_token", residual=r, min_scale=0.0)),
    ],
)
def test_checks_are_not_skipped_after_good_calls(message, wrong):
    x, residual = torch.randn(2, 4, HIDDEN, device=DEVICE).bfloat16()
    weight = torch.ones(HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(3):
        tq.rms_norm(x, weight, scheme="fp8_token", residual=residual)
        tq.rms_norm(x, weight, scheme="fp8_tensor", residual=residual, scale=torch.ones(1, device=DEVICE))
        with pytest.raises(ValueError, match=message):
            wrong(x, weight, residual)


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 3)
    for _ in range(2):
        for rows in range(1, 8):
            x = torch.full((rows, 64), float(rows), device=DEVICE)
            assert (tq.quantize(x, scheme="fp8_token").dequantize() - rows).abs().max() < 1e-5 * rows
            assert len(plan._plans) <= 3


def test_plans_keep_no_tensor_alive():
    case = Case(tq.PRODUCERS["rms_norm"], tq.SCHEMES["fp8_token"], 4, HIDDEN)
    result = case.run()
    kept = [weakref.ref(each) for each in (*case.arguments[:2], case.options["residual"], *result.side_outputs)]
    kept.append(weakref.ref(result.activation.scale))
    assert plan._plans and all(each() is not None for each in kept)
    del case, result
    gc.collect()
    assert all(each() is None for each in kept)


def test_a_scheme_that_was_taken_back_is_gone():
    """And another one of its name is another one."""
    given = tq.SCHEMES["fp8_group128"]
    x = torch.randn(2, HIDDEN, device=DEVICE)
    try:
        for group in (32, 64):
            tq.register_scheme(tq.Scheme("test_again", given.code, "group", given.rule, group=group, min_scale=1e-9))
            assert tq.quantize(x, scheme="test_again").scale.shape == (2, HIDDEN // group)
            tq.SCHEMES.pop("test_again")
        with pytest.raises(ValueError, match="scheme must be one of"):
            tq.quantize(x, scheme="test_again")
    finally:
        tq.SCHEMES.pop("test_again", None)


@pytest.mark.parametrize("scheme", list(tq.SCHEMES))
def test_the_default_dtype_changes_nothing(scheme):
    """An engine loads its weights, and quantizes some, under a default dtype of bf16."""
    x, options = torch.randn(3, 256, device=DEVICE), {"scheme": scheme, **static_inputs(scheme, DEVICE)}
    want = tq.quantize(x, **options)
    found = tq.SCHEMES[scheme]
    found.device.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        got, report = tq.quantize(x, **options), tq.check("quantize", x, **options)
        with tq.use_reference():
            reference = tq.quantize(x, **options)
        values = got.dequantize(torch.float32)
    finally:
        torch.set_default_dtype(before)
        found.device.cache_clear()
    assert report.ok
    for made in (got, reference):
        assert_same_bits(made.data, want.data)
        assert_same_bits(made.scales(), want.scales())
    assert_same_bits(values, want.dequantize(torch.float32))


def test_a_device_is_part_of_the_description():
    """A CPU and the meta device have the same index."""
    x = torch.randn(3, HIDDEN, device=DEVICE)
    with pytest.raises(NotImplementedError, match="meta"):
        tq.quantize(x.to("meta"), scheme="fp8_token")
    assert tq.quantize(x, scheme="fp8_token").data.device == x.device
