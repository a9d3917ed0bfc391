"""`tq.quantize` under static inputs of 1, and against the oracle of its scheme."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from comparing import assert_codes
from formulas import float64
from helpers import DEVICE, float32, format_of, given_of, quantized_by_oracle

import tq
from tq.bench.cases import static_inputs


class Made(NamedTuple):
    """codes: one integer for each element, a sign bit on top; an INT8 number itself. scales: [M, G]."""

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray
    values: np.ndarray
    data: torch.Tensor


def unit_inputs(scheme: str, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The static inputs of a scheme, every scale `scale`, the zero point 3."""
    return {
        name: tensor if name == "zero_point" else torch.full_like(tensor, scale)
        for name, tensor in static_inputs(scheme, DEVICE).items()
    }


def quantize(x: torch.Tensor, scheme: str, **options) -> Made:
    """x under unit static inputs."""
    activation = tq.quantize(x.to(DEVICE), scheme=scheme, **{**unit_inputs(scheme), **options})
    data = activation.data.view(torch.uint8)
    zero = 0.0 if activation.zero_point is None else float64(activation.zero_point)
    codes = format_of(scheme).elements(data.cpu().numpy())
    zero_points = np.broadcast_to(zero, (len(x), 1))
    return Made(codes, float32(activation.scales()), zero_points, float64(activation.dequantize(torch.float32)), data)


def compare_with_oracle(x: torch.Tensor, scheme: str, **options) -> Made:
    """What the device makes, which must be the oracle's to the bit."""
    made = quantize(x, scheme, **options)
    min_scale = options.pop("min_scale", None)
    given = given_of({**unit_inputs(scheme), **options})
    want = quantized_by_oracle(scheme, float32(x), given, min_scale)
    label = f"{scheme} {given} min_scale={min_scale}"
    assert_codes(tq.SCHEMES[scheme], made.data, want.codes, made.scales, label)
    assert (made.scales == want.scales).all() and np.isfinite(made.scales).all(), label
    if want.zero_points is not None:
        assert (made.zero_points[: len(want.zero_points)] == want.zero_points).all(), label
    return made


def nan_code(scheme: str, zero_point: float = 0.0) -> int:
    """What a NaN becomes."""
    form = format_of(scheme)
    return int(np.clip(zero_point, -128, 127)) if tq.SCHEMES[scheme].code.name == "int8" else form.nan


def code_of(scheme: str, value: float) -> int:
    """The code of a value under scale 1 and zero point 3, if the scheme has one."""
    form = format_of(scheme)
    value = value + 3 if tq.SCHEMES[scheme].rule.zero_point else value
    return int(form.elements(form.encode(np.array([value, 0.0])))[0])
