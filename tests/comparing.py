"""Exact comparisons: bits, codes, results; and what a code stands for, by formats.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from formats import FORMATS
from formulas import float64
from helpers import Case, Result
from oracles import format_of

import tq

# Producers whose y has one right value in fp32. The order of a sum and the last bit of an exponential are free.
EXACT_PRODUCERS = {"quantize"}
# Formulas that end in a difference: where its terms are near each other, fp32 has few right digits, of the terms' size.
CANCELLING = ("gelu", "gelu_mul", "layer_norm", "qk_norm_rope")
LOST = 2.0**-19  # of the largest y: what such a difference may be off by


def scale_of_each(case: Case, activation: tq.QuantizedActivation) -> np.ndarray:
    """What a step of 1 in the code stands for, for every element, float64 [M, N]."""
    unit = float64(activation.scales())
    if activation.global_scale_inv is not None:
        unit = unit / float64(activation.global_scale_inv)
    groups = case.scheme.groups(case.hidden_size)
    return np.broadcast_to(unit, (case.rows, groups)).repeat(case.hidden_size // groups, 1)


def zero_point_of_each(case: Case, activation: tq.QuantizedActivation) -> np.ndarray:
    """Zero points, [M, 1] or [1, 1]; 0 where there are none."""
    return np.zeros((1, 1)) if activation.zero_point is None else float64(activation.zero_point).reshape(-1, 1)


def decoded(case: Case, activation: tq.QuantizedActivation) -> np.ndarray:
    """What the codes stand for, in float64, by formats.py."""
    codes = format_of(case.scheme.name).decode(activation.data.view(torch.uint8).cpu().numpy())
    return (codes - zero_point_of_each(case, activation)) * scale_of_each(case, activation)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that NaN equals itself and -0 differs from 0."""
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(as_integers[tensor.dtype.itemsize])


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, label: Any = "") -> None:
    """Same shape, dtype and bits; a failure names the first coordinate and both values."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{label}: {got.dtype} {tuple(got.shape)}"
    wrong = (bits(got) != bits(want)).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        values = f"{got[first]} in place of {want[first]}"
        raise AssertionError(f"{label}: {len(wrong)} of {got.numel()} differ, first at {first}: {values}")


def assert_codes(scheme: tq.Scheme, got: torch.Tensor, want: Any, scale: Any, label: Any, allowed: int = 0) -> None:
    """Same bytes, but for at most `allowed` that are one step away; a failure names codes, values and scale."""
    got, want = got.cpu().numpy(), want.cpu().numpy() if isinstance(want, torch.Tensor) else np.asarray(want)
    assert got.shape == want.shape, f"{label}: shape {got.shape} in place of {want.shape}"
    wrong = np.argwhere(got != want)
    form = FORMATS[scheme.code.name]
    # Magnitudes are ascending in code order, so a step is a difference of one.
    steps = np.abs(form.elements(got) - form.elements(want))
    if np.count_nonzero(steps) > allowed or steps.max(initial=0) > 1:
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{label}: {np.count_nonzero(steps)} of {steps.size} codes differ, {allowed} may; by {steps.max()}; byte "
            f"{at} is {got[at]:#04x} ({form.decode(got[at].reshape(1))}) in "
            f"place of {want[at]:#04x} ({form.decode(want[at].reshape(1))}); scale {scale}"
        )


def assert_equal_results(got: Result, want: Result) -> None:
    """Same codes, scales and side outputs, bit for bit."""
    assert_same_bits(got.codes, want.codes, f"{got.label}: codes")
    assert_same_bits(got.activation.scale, want.activation.scale, f"{got.label}: scales")
    if want.activation.zero_point is not None:
        assert_same_bits(got.activation.zero_point, want.activation.zero_point, f"{got.label}: zero points")
    for mine, theirs in zip(got.side_outputs, want.side_outputs, strict=True):
        assert_same_bits(mine, theirs, f"{got.label}: side output")


def assert_matches(case: Case, got: Result, want: Result) -> None:
    """Bit-equal; of a producer with a reduction or an exponential y may differ in its last fp32 bit, so scales may too
    and one code in 10,000 by one step. Side outputs are bit-equal always.
    """
    if case.producer.name in EXACT_PRODUCERS:
        return assert_equal_results(got, want)
    scheme, allowed = case.scheme, -(-got.codes.numel() // 10_000)
    codes, noise = got.codes, 0.0
    if case.producer.name in CANCELLING:
        mine, theirs = (each.activation.dequantize(torch.float32) for each in (got, want))
        noise = LOST * float(theirs.nan_to_num().abs().max()) if theirs.numel() else 0.0
        near = ((mine - theirs).abs() <= noise).unflatten(-1, (-1, scheme.code.per_byte)).all(-1)
        near = torch.nn.functional.pad(near, (0, codes.shape[-1] - near.shape[-1]))
        codes = torch.where(near, want.codes, codes)
    assert_codes(scheme, codes, want.codes, want.activation.scale, f"{got.label}: codes", allowed)
    scales, expected = float64(got.activation.scales()), float64(want.activation.scales())
    assert scales.shape == expected.shape, f"{got.label}: scales {scales.shape} in place of {expected.shape}"
    far = np.abs(scales - expected) > 2.0**-21 * np.abs(expected)
    # Rows that an expert does not have hold what was there before.
    written = np.isfinite(expected) if "tokens_per_expert" in case.extra else True
    assert (np.isfinite(scales) == written).all() and not far.any(), f"{got.label}: {scales[far]}, not {expected[far]}"
    if want.activation.zero_point is not None:
        assert_same_bits(got.activation.zero_point, want.activation.zero_point, f"{got.label}: zero points")
    sides = list(zip(got.side_outputs, want.side_outputs, strict=True))
    if case.extra.get("return_unquantized"):
        assert_close_unquantized(*sides.pop(), got.label, noise)
    for mine, theirs in sides:
        assert_same_bits(mine, theirs, f"{got.label}: side output")


def assert_close_unquantized(got: torch.Tensor, want: torch.Tensor, label: str, noise: float) -> None:
    """y, which may differ in its last fp32 bits, in one rounding of 16 bits in 1000, and anywhere by `noise`."""
    unit = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-21}[want.dtype]
    got, want = np.nan_to_num(float64(got)), np.nan_to_num(float64(want))
    assert (np.abs(got - want) <= unit * np.abs(want) + max(noise, 2.0**-24)).all(), f"{label}: y"
    if unit > 2.0**-20:
        assert (np.abs(got - want) > noise).sum() <= -(-got.size // 1000), f"{label}: y"


def worst_ulps(case: Case, activation: tq.QuantizedActivation) -> float:
    """Half a spacing, and the fp32 roundings of a quotient as large as the code and its zero point allow."""
    steps = format_of(case.scheme.name).values()[-1] if case.scheme.code.name == "int8" else case.scheme.code.steps
    return 0.5 + max(1e-5, (steps + np.abs(zero_point_of_each(case, activation)).max(initial=0.0)) * 2.0**-22)
