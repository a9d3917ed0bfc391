"""The check finds what is planted, at its row, and nothing in what is right."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from comparing import assert_same_bits, decoded, scale_of_each, worst_ulps, zero_point_of_each
from formulas import float64
from helpers import (
    DEVICE,
    ONE_EACH,
    ORACLES,
    PAIR_LAYOUTS,
    PAIRS,
    ROUNDINGS,
    Case,
    format_of,
    in_nan_memory,
    static_options,
    truth,
    unrounded,
)
from oracles import INVERSE

import tq
from tq.kernels import check as check_module
from tq.kernels import tuning
from tq.kernels.rows_check import REPORT

ROWS = 7
BAD = 4  # the row that faults are planted in
one_each = pytest.mark.parametrize(("producer", "scheme"), ONE_EACH)
every_pair = pytest.mark.parametrize(("producer", "scheme"), PAIRS)


def make(producer: str, scheme: str, rows: int = ROWS, **options) -> Case:
    found = tq.SCHEMES[scheme]
    return Case(tq.PRODUCERS[producer], found, rows, 3 * found.group or 193, **options)


def with_data(activation: tq.QuantizedActivation, codes: torch.Tensor) -> tq.QuantizedActivation:
    return dataclasses.replace(activation, data=codes.view(activation.data.dtype))


def faults(report: tq.CheckReport) -> dict[str, list[float]]:
    """What each row has of every kind of fault."""
    return {name: report.column(name).tolist() for name in ("wrong_codes", "wrong_scales", "nonfinite_scales")}


def only_in(row: int, number: float) -> list[float]:
    return [number if i == row else 0.0 for i in range(ROWS)]


NOTHING = only_in(0, 0.0)


def least_snr_db(scheme: str) -> float:
    """25 dB for three bits of mantissa without saturation; 6 dB a bit, and what saturation alone may cost."""
    form = format_of(scheme)
    worst = max(2.0 ** -(form.mantissa_bits + 1), 1.0 - 1.0 / ORACLES[scheme].headroom(form))
    return 25.0 - 20.0 * math.log10(worst / 2.0**-4)


@pytest.mark.parametrize(("producer", "scheme", "layout"), PAIR_LAYOUTS)
def test_nothing_in_what_is_right(producer, scheme, layout):
    case = make(producer, scheme, layout=layout, dtype=torch.float32 if layout == "column_major" else torch.bfloat16)
    activation = case.run().activation
    for report in (case.check(), case.check(activation), case.change_rows(in_nan_memory).check(activation)):
        assert report.ok and faults(report) == dict.fromkeys(faults(report), NOTHING)
        # A code is at most half a spacing away; the quotient's rounding, and the decoded product's, come on top.
        assert 0.4 < report.worst_ulps <= worst_ulps(case, activation) and report.column("worst_ulps").min() > 0.1
        assert report.rows.shape == (ROWS, len(REPORT)) and report.snr_db > least_snr_db(scheme)
        # Under its own scale the largest element is the largest code, up to the rounding of the quotient.
        assert report.saturated == 0 or ORACLES[scheme].headroom(format_of(scheme)) > 1.0


@pytest.mark.parametrize("column", [0, -1])
@every_pair
def test_one_flipped_code(producer, scheme, column):
    case = make(producer, scheme)
    activation = case.run().activation
    codes = activation.data.view(torch.uint8).clone()
    codes[BAD, column] ^= 0x01
    report = case.check(with_data(activation, codes))
    assert faults(report) == {"wrong_codes": only_in(BAD, 1.0), "wrong_scales": NOTHING, "nonfinite_scales": NOTHING}
    assert not report.ok and (report.wrong_codes, report.wrong_scales) == (1, 0)
    if report.column("saturated")[BAD] == 0:  # floor scales let the largest elements saturate, which are not measured
        assert report.column("worst_ulps").argmax() == BAD and report.worst_ulps > 0.5


@one_each
def test_a_flipped_sign_shows_in_the_error(producer, scheme):
    case = make(producer, scheme)
    activation = case.run().activation
    codes = activation.data.view(torch.uint8).clone()
    form = format_of(scheme)
    magnitude = np.abs(form.decode(codes[BAD].cpu().numpy()))
    # The largest that does not saturate: what does has no error by which to find it.
    element = int(np.where(magnitude < form.values()[-1], magnitude, 0.0).argmax())
    before = case.check(activation)
    codes[BAD, element // form.per_byte] ^= form.sign << (4 * (element % form.per_byte))
    report = case.check(with_data(activation, codes))
    assert report.column("wrong_codes").tolist() == only_in(BAD, 1.0)
    # At least 2 (2^mantissa_bits) spacings of its binade; an integer's top bit is 128.
    assert report.worst_ulps > (2.0**form.mantissa_bits if form.mantissa_bits else 127.0)
    assert report.snr_db < before.snr_db - 0.5


def with_scale(activation: tq.QuantizedActivation, row: int, group: int, value: float) -> tq.QuantizedActivation:
    """The activation with one scale (that of a static scheme) replaced."""
    scheme = tq.SCHEMES[activation.scheme]
    if not scheme.dynamic:
        return dataclasses.replace(activation, scale=torch.full_like(activation.scale, value))
    (layout,) = (each for each in scheme.layouts if each.name == activation.layout)
    stored = layout.unpack(activation.scale, ROWS, scheme.groups(activation.orig_shape[-1])).clone()
    if stored.dtype == torch.uint8:
        # UE8M0 has one byte for all that is no number, and none for zero: 2^-127 is read as zero.
        value = 0 if value == 0 else 255 if not math.isfinite(value) else int(math.log2(value)) + 127
    elif stored.dtype == torch.float8_e4m3fn and not math.isfinite(value):
        value = math.nan
    stored[row, group] = torch.tensor(value).to(stored.dtype)
    scale = torch.empty_strided(
        activation.scale.shape, activation.scale.stride(), dtype=activation.scale.dtype, device=DEVICE
    )
    if activation.layout in ("packed", "tma_aligned"):
        scale = layout.allocate(ROWS, stored.shape[1], stored.dtype, DEVICE)
    layout.pack(stored, scale)
    return dataclasses.replace(activation, scale=scale)


@pytest.mark.parametrize("group", [0, -1])
@every_pair
def test_a_doubled_scale(producer, scheme, group):
    """Also the one that the caller gave: it is part of what the activation says."""
    case = make(producer, scheme)
    activation = case.run().activation
    wrong = 2.0 * activation.scales()[BAD if case.scheme.dynamic else 0, group]
    report = case.check(with_scale(activation, BAD, group, float(wrong)))
    assert not report.ok and report.nonfinite_scales == 0
    if case.scheme.dynamic:
        assert report.column("wrong_scales").tolist() == only_in(BAD, 1.0)
        group_bytes = activation.data.shape[1] // activation.scales().shape[1]
        # The codes of a rule that multiplies by MAX / amax do not depend on the scale.
        wrong_codes = 0 if ORACLES[scheme] is INVERSE else min(20, group_bytes / 2)
        if producer == "relu2":
            wrong_codes /= 2  # half of its y are 0 under any scale
        assert report.column("wrong_codes")[BAD] >= wrong_codes
        assert report.wrong_codes == report.column("wrong_codes")[BAD]
        # Twice its magnitude: that of the code in units of its spacing.
        worst = 2.0 ** format_of(scheme).mantissa_bits / 2.0
        assert report.column("worst_ulps").argmax() == BAD and report.worst_ulps > max(worst, 0.6)


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 0.0])
@pytest.mark.parametrize(("producer", "scheme"), [pair for pair in ONE_EACH if tq.SCHEMES[pair[1]].dynamic])
def test_a_scale_that_is_no_scale(producer, scheme, value):
    case = make(producer, scheme)
    activation = case.run().activation
    report = case.check(with_scale(activation, BAD, -1, value))
    assert not report.ok and report.column("wrong_scales").tolist() == only_in(BAD, 1.0)
    assert report.column("nonfinite_scales").tolist() == (NOTHING if value == 0.0 else only_in(BAD, 1.0))
    good = [row for row in range(ROWS) if row != BAD]
    assert_same_bits(report.rows[good], case.check(activation).rows[good])


@one_each
def test_rows_that_no_program_wrote(producer, scheme):
    """Poison, as of an output that was only allocated."""
    case = make(producer, scheme)
    activation = case.run().activation
    codes = activation.data.view(torch.uint8).clone()
    codes[BAD] = 0xAB
    report = case.check(with_data(activation, codes))
    wrong = report.column("wrong_codes")[BAD]
    assert wrong > 0.75 * codes.shape[1] and report.wrong_codes == wrong


@every_pair
def test_is_deterministic(producer, scheme):
    """Bit for bit, and a row's numbers do not depend on the others."""
    case = make(producer, scheme)
    first, again = case.check(), case.check()
    assert_same_bits(first.rows, again.rows)
    assert first.rows.isfinite().all()
    part = make(producer, scheme, 3)
    part.arguments, part.options = case.arguments, case.options
    part.change(lambda value: value[:3], case.is_of_rows)
    assert_same_bits(part.check().rows, first.rows[:3])


@one_each
def test_a_row_in_several_tiles(producer, scheme):
    """A fault in the last one is found, and the numbers are those of one tile but for the order of their sums."""
    case = make(producer, scheme)
    whole, activation = case.check(), case.run().activation
    codes = activation.data.view(torch.uint8).clone()
    codes[BAD, -1] ^= 0x01
    with tuning.force(tuning.RowConfig(8, 128, -(-case.hidden_size // 128), 4)):
        parts, found = case.check(activation), case.check(with_data(activation, codes))
    assert torch.allclose(parts.rows, whole.rows, rtol=1e-4, atol=1e-6)
    assert found.column("wrong_codes").tolist() == only_in(BAD, 1.0) and found.column("worst_ulps").argmax() == BAD


@every_pair
def test_its_numbers_are_those_of_float64(producer, scheme):
    case = make(producer, scheme)
    case.extra = unrounded(case.producer)
    activation, report = case.run().activation, case.check()
    y, form = truth(case.producer, case.arguments, case.options), format_of(scheme)
    scale, largest = scale_of_each(case, activation), form.values()[-1]
    quotient = np.abs(y / scale + zero_point_of_each(case, activation))
    error = np.abs(decoded(case, activation) - y)
    # An integer code has one more value below.
    beyond = quotient > largest + form.spacing(largest) / 2 + (largest == 127)
    ulps = np.where(beyond, 0.0, error / (form.spacing(np.minimum(quotient, largest)) * scale)).max(1)
    assert (float64(report.column("saturated")) == beyond.sum(1)).all()
    assert np.allclose(float64(report.column("worst_ulps")), ulps, atol=1e-4)
    assert np.allclose(float64(report.column("signal")), (y * y).sum(1), rtol=1e-5)
    assert np.allclose(float64(report.column("noise")), (error * error).sum(1), rtol=1e-4)
    assert report.snr_db == pytest.approx(10 * math.log10((y * y).sum() / (error * error).sum()), abs=1e-3)


def test_saturated_elements_are_counted_and_not_errors():
    x = torch.ones(ROWS, 64, device=DEVICE)
    x[BAD, :3] = torch.tensor([500.0, -1e6, 448.0])
    report = tq.check("quantize", x, scheme="fp8_tensor", scale=torch.ones(1, device=DEVICE))
    assert report.ok and report.saturated == 2 and report.column("saturated").tolist() == only_in(BAD, 2.0)
    assert report.worst_ulps <= 0.5


@pytest.mark.parametrize("scheme", tq.SCHEMES)
def test_nan_is_right_where_it_is_a_nan(scheme):
    case = make("quantize", scheme)
    case.arguments[0][BAD, 8] = float("nan")
    activation = case.run().activation
    assert case.check(activation).ok
    codes = activation.data.view(torch.uint8).clone()
    codes[BAD, 8 // case.scheme.code.per_byte] ^= 0x01
    assert case.check(with_data(activation, codes)).column("wrong_codes").tolist() == only_in(BAD, 1.0)


@pytest.mark.parametrize("scheme", tq.SCHEMES)
def test_of_exact_values_there_is_no_noise(scheme):
    """Powers of two under a scale of a power of two; the ratio is infinite, and of no rows too."""
    options = {name: torch.ones_like(tensor) for name, tensor in static_options(scheme).items()}
    largest = format_of(scheme).values()[-1] - options.get("zero_point", torch.zeros(1)).item()
    x = torch.full((ROWS, 256), largest, device=DEVICE)
    report = tq.check("quantize", x, scheme=scheme, **options)
    assert report.ok and report.worst_ulps == 0 and report.snr_db == math.inf
    empty = tq.check("quantize", x[:0], scheme=scheme, **options)
    assert empty.ok and empty.worst_ulps == 0 and empty.rows.shape == (0, len(REPORT))


@one_each
def test_takes_the_producer_itself_and_its_options(producer, scheme):
    case = make(producer, scheme)
    options = case.call_options()
    by_name = tq.check(producer, *case.arguments, scheme=scheme, **options)
    assert_same_bits(case.check().rows, by_name.rows)
    if "rounding" in unrounded(case.producer) and tq.SCHEMES[scheme].code.per_byte == 1:  # 4 bits may see no difference
        # The activation was rounded; taken as unrounded, some of its codes are wrong.
        case = make(producer, scheme, rows=64, extra={"rounding": "none"})
        rounded = {**case.call_options(), "rounding": ROUNDINGS[producer][1]}
        activation = case.producer(*case.arguments, scheme=scheme, **rounded)
        activation = activation[0] if isinstance(activation, tuple) else activation
        assert case.check(activation).wrong_codes > 0


@one_each
def test_changes_nothing(producer, scheme):
    case = make(producer, scheme)
    activation = case.run().activation
    given = [each for each in (*case.arguments, *case.call_options().values()) if isinstance(each, torch.Tensor)]
    given += [activation.data.view(torch.uint8), activation.scale]
    before = [each.clone() for each in given]
    case.check(activation)
    for mine, old in zip(given, before, strict=True):
        assert_same_bits(mine, old)


@pytest.mark.parametrize("producer", tq.PRODUCERS)
def test_inside_use_reference_the_kernel_checks_the_reference(producer, monkeypatch):
    case = make(producer, "fp8_token")
    with tq.use_reference():
        report = case.check()
    assert report.wrong_codes <= 1 and report.column("nonfinite_scales").tolist() == NOTHING
    monkeypatch.setattr(check_module, "run", lambda prepared: prepared.codes.zero_())
    assert case.check().wrong_codes > 1000
