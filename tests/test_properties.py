"""Calls that hypothesis makes up: sizes, strides, dtypes, schemes, layouts, policies, bounds, experts, widths and
smooth scales together."""

from __future__ import annotations

import torch
import triton
from comparing import assert_matches, assert_same_bits, worst_ulps
from helpers import DEVICE, ROUNDINGS, Case, in_nan_memory, names
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tq
from tq.kernels import tuning

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COUNTS = (torch.int32, torch.int64)
few = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def cases(draw, with_experts: bool = True) -> Case:
    producer = tq.PRODUCERS[draw(st.sampled_from(sorted(tq.PRODUCERS)))]
    scheme = tq.SCHEMES[draw(st.sampled_from(sorted(tq.SCHEMES)))]
    size = draw(st.integers(1, 5)) * scheme.group or draw(st.integers(1, 300))
    experts = draw(st.sampled_from((0, 0, 1, 3))) if with_experts else 0
    rows = experts * draw(st.integers(0, 7)) if experts else draw(st.integers(0, 20))
    case = Case(producer, scheme, rows, size, draw(st.sampled_from(DTYPES)))
    case.layout = draw(st.sampled_from(scheme.layouts)).name
    torch.manual_seed(draw(st.integers(0, 1000)))
    magnitude = 2.0 ** draw(st.integers(-14, 6))
    padding = draw(st.integers(0, 70))
    case.arguments, case.options = producer.example(case.rows, size, case.dtype, DEVICE)
    case.change_rows(lambda rows: in_nan_memory(rows * magnitude, padding))
    for name in producer.optional:
        if draw(st.booleans()):
            case.options.pop(name)
    if "rounding" in names(producer):
        case.extra["rounding"] = draw(st.sampled_from((None, *ROUNDINGS.get(producer.name, ()))))
    if "round_residual" in names(producer):
        case.extra["round_residual"] = draw(st.sampled_from((None, True, False)))
    for name in scheme.rule.needs:
        if name == "zero_point":
            value = torch.tensor([draw(st.integers(-128, 127))], dtype=torch.int32)
        else:
            value = torch.tensor(draw(st.floats(2.0**-20, 2.0**10, width=32)))
        case.extra[name] = value.to(DEVICE)
    if "scale_ub" in scheme.rule.takes:
        if draw(st.booleans()):
            case.extra["scale_ub"] = torch.tensor([draw(st.floats(2.0**-20, 2.0**20, width=32))], device=DEVICE)
        case.extra["min_scale"] = draw(st.none() | st.floats(2.0**-80, 2.0, width=32))
    if draw(st.booleans()):
        smooth = torch.exp2(torch.randn(size)).to(DEVICE, draw(st.sampled_from(DTYPES)))
        case.extra["smooth_scale"] = smooth
    unit = max(scheme.group, scheme.code.per_byte)
    if draw(st.booleans()):
        case.extra["data_width"] = size + unit * draw(st.integers(0, 3))
    case.extra["return_unquantized"] = draw(st.booleans())
    if experts:
        tokens = rows // experts
        counts = draw(st.lists(st.integers(0, tokens), min_size=experts, max_size=experts))
        case.extra["tokens_per_expert"] = torch.tensor(counts, dtype=draw(st.sampled_from(COUNTS)), device=DEVICE)
        case.change_rows(lambda each: each.unflatten(0, (experts, tokens)))
    return case


@few
@given(cases())
def test_equals_the_reference_and_passes_the_check(case):
    got = case.run()
    assert_matches(case, got, case.run_reference())
    report = case.check(got.activation)
    assert report.ok, str(case)
    assert report.worst_ulps <= worst_ulps(case, got.activation)


@few
@given(cases(with_experts=False), st.data())
def test_a_part_of_the_batch_is_the_same(case, data):
    want = case.run()
    first = data.draw(st.integers(0, case.rows))
    last = data.draw(st.integers(first, case.rows))
    case.change_rows(lambda rows: rows[first:last])
    case.rows = last - first
    got = case.run()
    assert_same_bits(got.codes, want.codes[first:last], case)
    if case.scheme.dynamic:
        assert_same_bits(got.activation.scales(), want.activation.scales()[first:last], case)
        if case.scheme.rule.zero_point:
            assert_same_bits(got.activation.zero_point, want.activation.zero_point[first:last], case)
    for mine, theirs in zip(got.side_outputs, want.side_outputs, strict=True):
        assert_same_bits(mine, theirs[first:last], case)


@few
@given(cases(), st.sampled_from((8, 32)), st.integers(1, 3))
def test_any_tiling_gives_what_one_tile_does(case, block_m, parts):
    want = case.run()
    columns = case.extra.get("data_width") or case.hidden_size
    width = max(triton.next_power_of_2(-(-columns // parts)), case.scheme.group, 2)
    with tuning.force(tuning.RowConfig(block_m, width, -(-columns // width), 4)):
        assert_matches(case, case.run(), want)
