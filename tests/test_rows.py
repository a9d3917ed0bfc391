"""Every producer with every scheme over [M, N]: against the torch reference, float64, and itself cut another way."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from comparing import (
    CANCELLING,
    assert_codes,
    assert_matches,
    assert_same_bits,
    decoded,
    scale_of_each,
    zero_point_of_each,
)
from formulas import float64
from helpers import (
    CORE,
    DEVICE,
    FLT_MAX,
    FORMATS,
    ORACLES,
    PAIRS,
    SCHEME_LAYOUTS,
    Case,
    Result,
    float32,
    format_of,
    given_of,
    hidden_sizes,
    in_nan_memory,
    inputs_of,
    is_float,
    quantized_by_oracle,
    static_options,
    truth,
    unrounded,
)

import tq
from tq.kernels import launch

every_pair = pytest.mark.parametrize(("producer", "scheme"), PAIRS)

# name: rows, hidden size (of `hidden_sizes`), what is done to every tensor with a row per token.
SHAPES = {
    "aligned": (8, "aligned", None),
    "ragged": (5, "ragged", None),
    "one_row": (1, "ragged", None),
    "one_group": (3, "one_group", None),
    "strided": (5, "ragged", in_nan_memory),
    "leading_dimensions": (6, "ragged", lambda rows: rows.view(2, 3, -1)),
    "strided_leading_dimensions": (6, "aligned", lambda rows: in_nan_memory(rows).unflatten(0, (2, 3))),
    "vector": (1, "ragged", lambda rows: rows[0]),
    "empty": (0, "aligned", None),
    "empty_leading_dimensions": (0, "aligned", lambda rows: rows.view(2, 0, rows.shape[-1])),
}
# dtype of the first argument, of the other arguments, of the tensor options (a residual).
DTYPES = {
    "bf16": (torch.bfloat16, None, None),
    "fp16": (torch.float16, None, None),
    "fp32": (torch.float32, None, None),
    "fp32_weight": (torch.bfloat16, torch.float32, None),
    "bf16_weight": (torch.float16, torch.bfloat16, None),
    "fp32_residual": (torch.bfloat16, None, torch.float32),
    # Without the options that may be left out.
    "bf16_alone": (torch.bfloat16, None, None),
}


def make(producer: str, scheme: str, rows: int, size: str, dtypes: str = "bf16", **rest) -> Case:
    found = tq.SCHEMES[scheme]
    dtype, of_arguments, of_options = DTYPES[dtypes]
    case = Case(tq.PRODUCERS[producer], found, rows, dict(hidden_sizes(found))[size], dtype, **rest)
    if of_arguments:
        case.arguments = (case.arguments[0], *(cast(value, of_arguments) for value in case.arguments[1:]))
    if dtypes == "bf16_alone":
        case.options = {name: value for name, value in case.options.items() if name not in case.producer.optional}
    if of_options:
        case.options = {name: cast(value, of_options) for name, value in case.options.items()}
    return case


def cast(value, dtype):
    return value.to(dtype) if is_float(value) else value


def has_mix(producer: str, dtypes: str) -> bool:
    """Whether the producer has what the mix is about."""
    arguments, options = tq.PRODUCERS[producer].example(1, 256, torch.bfloat16, DEVICE)
    _, of_arguments, of_options = DTYPES[dtypes]
    if dtypes == "bf16_alone":
        return bool(tq.PRODUCERS[producer].optional)
    others = [*(arguments[1:] if of_arguments else ()), *(options.values() if of_options else ())]
    return not (of_arguments or of_options) or any(map(is_float, others))


MIXES = [(producer, dtypes) for producer in tq.PRODUCERS for dtypes in DTYPES if has_mix(producer, dtypes)]


# The first pairs are every producer with a scheme of each granularity.


def reference_cases() -> list[tuple[str, str, str, str, str]]:
    """(producer, dtypes, shape, scheme, layout): every scheme in every layout and every dtype with a producer in turn;
    the core in every shape, and in other dtypes and without what may be left out in the shapes they could get wrong;
    the other pairs in the shapes that a scheme could get wrong."""
    chosen = []
    for i, (scheme, layout) in enumerate(SCHEME_LAYOUTS):
        for j, dtypes in enumerate(("bf16", "fp16", "fp32")):
            chosen.append((list(tq.PRODUCERS)[(i + j) % len(tq.PRODUCERS)], dtypes, "ragged", scheme, layout))
    for producer, scheme in PAIRS:
        layout = tq.SCHEMES[scheme].layouts[-1].name
        for shape in SHAPES if (producer, scheme) in CORE else ("ragged", "strided", "one_group", "empty"):
            chosen.append((producer, "bf16", shape, scheme, layout))
        for dtypes in DTYPES:
            if (producer, scheme) in CORE and (producer, dtypes) in MIXES:
                chosen += [(producer, dtypes, shape, scheme, layout) for shape in ("ragged", "strided", "one_row")]
    return sorted(set(chosen))


@pytest.mark.parametrize(("producer", "dtypes", "shape", "scheme", "layout"), reference_cases())
def test_equals_the_torch_reference(producer, scheme, layout, dtypes, shape):
    rows, size, change = SHAPES[shape]
    case = make(producer, scheme, rows, size, dtypes, layout=layout)
    plain = Case(case.producer, case.scheme, rows, case.hidden_size, case.dtype, layout=layout)
    plain.arguments, plain.options = case.arguments, case.options
    if change is not None:
        case.change_rows(change)
    got, want = case.run(), plain.run_reference()
    activation = got.activation
    leading = tuple(case.arguments[0].shape[:-1])
    assert activation.orig_shape == (*leading, case.hidden_size)
    assert activation.data.shape == (*leading, case.hidden_size // case.scheme.code.per_byte)
    assert activation.data.is_contiguous() and activation.data.dtype == case.scheme.code.torch_dtype
    assert (activation.orig_dtype, activation.scheme, activation.layout) == (case.dtype, scheme, layout)
    for side in got.side_outputs:
        assert side.shape == (*leading, case.hidden_size) and side.is_contiguous()
    flat = dataclasses.replace(activation, data=activation.data.view(rows, activation.data.shape[-1]))
    sides = [side.view(rows, case.hidden_size) for side in got.side_outputs]
    assert_matches(case, Result(got.label, flat, sides), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ORACLES)
def test_the_reference_quantizes_as_the_oracle(scheme, dtype):
    """The torch form of every scheme, over values of many magnitudes and ties, against numpy."""
    found, group = tq.SCHEMES[scheme], tq.SCHEMES[scheme].group or 128
    y = torch.randn(64, 4 * group) * torch.exp2(torch.randint(-12, 12, (64, 4)).repeat_interleave(group, 1).float())
    y[::3] = torch.round(y[::3] * 8) / 8
    # NaN and infinities, alone in a group, beside each other, and as a whole group; a group of zeros.
    y[7, 3], y[8, group + 1], y[9, 0], y[9, 1], y[10, :group], y[11] = *[torch.nan, torch.inf] * 2, torch.nan, 0.0
    y = y.to(dtype).float().to(DEVICE)
    options = static_options(scheme)
    codes, fitted = found.reference(y, inputs_of(options, found.min_scale))
    want = quantized_by_oracle(scheme, float32(y), given_of(options))
    assert_codes(found, codes, want.codes, want.scales, f"reference of {scheme}")
    assert (float32(fitted[0]) == want.scales).all()
    if want.zero_points is not None:
        assert (float32(fitted[1]) == want.zero_points).all()
    # What they stand for is rounded twice at most; beyond FLT_MAX it is infinite.
    values = float64(found.reference_values(codes, fitted, inputs_of(options, found.min_scale)))
    bounded = (np.clip(each, -float(FLT_MAX), float(FLT_MAX)) for each in (values, want.values))
    assert np.allclose(*bounded, rtol=2.0**-22, atol=0.0, equal_nan=True)


@every_pair
def test_the_reference_computes_its_formula(producer, scheme):
    case = make(producer, scheme, 7, "ragged")
    options = {**case.options, **unrounded(case.producer)}
    got = float64(case.producer.reference(*case.arguments, **options).y)
    want = truth(case.producer, case.arguments, case.options)
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()
    if producer not in CANCELLING:
        assert (np.abs(got - want) <= 4e-6 * np.abs(want)).all()


@pytest.mark.parametrize(("producer", "scheme", "dtypes"), [(*p, ("bf16", "fp32")[i % 2]) for i, p in enumerate(PAIRS)])
def test_is_within_half_a_step_of_float64(producer, scheme, dtypes):
    """|decode - y| <= half a spacing of the code at y / scale, with y in float64 rounded nowhere; what is beyond the
    largest value, as far as the scale may leave it there, decodes to that value."""
    case = make(producer, scheme, 16, "ragged", dtypes)
    case.extra = unrounded(case.producer)
    activation = case.run().activation
    y, form = truth(case.producer, case.arguments, case.options), format_of(scheme)
    scale, zero = scale_of_each(case, activation), zero_point_of_each(case, activation)
    values, largest = decoded(case, activation), form.values()[-1]
    quotient = y / scale + zero
    # A zero point is rounded, so that the quotients of a row may span [-128.5, 127.5].
    assert np.abs(quotient).max() <= (largest * ORACLES[scheme].headroom(form) + 1.5 * zero.any()) * (1 + 1e-6)
    # The largest element of a dynamic group may come to lie a rounding above the largest code.
    spacing = form.spacing(np.minimum(np.abs(quotient), largest)) * scale
    beyond = (np.abs(quotient) - largest) * scale if not zero.any() else 0.0
    bound = np.maximum(spacing / 2, beyond) + 1e-5 * np.abs(y)
    assert (np.abs(values - y) <= bound).all(), f"{case}: {(np.abs(values - y) / spacing).max()} spacings"
    assert np.allclose(float64(activation.dequantize(torch.float32)), values, rtol=2.0**-22, atol=0.0)


@every_pair
def test_an_empty_batch_launches_nothing(producer, scheme, monkeypatch):
    monkeypatch.setattr(launch, "quantize_rows_kernel", None)
    case = make(producer, scheme, 0, "aligned")
    got = case.run()
    assert got.codes.shape == (0, case.hidden_size // case.scheme.code.per_byte)
    assert all(side.shape == (0, case.hidden_size) for side in got.side_outputs)
    if case.scheme.dynamic:
        assert got.activation.scales().shape == (0, case.scheme.groups(case.hidden_size))
    assert got.activation.dequantize().shape == (0, case.hidden_size)


def test_dequantize_rounds_once():
    x = torch.randn(4, 256, device=DEVICE).bfloat16()
    activation = tq.quantize(x, scheme="fp8_token")
    codes = FORMATS["e4m3"].decode(activation.data.view(torch.uint8).cpu().numpy())
    want = torch.from_numpy((codes * float64(activation.scales())).astype(np.float32)).to(torch.bfloat16).to(DEVICE)
    assert_same_bits(activation.dequantize(), want)
    assert activation.dequantize(torch.float16).dtype == torch.float16
