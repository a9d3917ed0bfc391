"""Every fp32 mantissa of amax through each scale rule, at several exponents, against formulas of oracles.py.

The torch references take all 2^23 mantissas, the kernels a spread of them. The formulas are in float64, exact but where
a rule divides: its fp32 division is numpy's.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import DEVICE, DYNAMIC_SCHEMES, Given, float32, format_of, given_of, inputs_of, static_options
from oracles import ORACLES

import tq

# One scheme for each rule and code; the granularity changes nothing.
RULES = {}
for _name in DYNAMIC_SCHEMES:
    RULES.setdefault((tq.SCHEMES[_name].rule, tq.SCHEMES[_name].code), _name)
every_rule = pytest.mark.parametrize("scheme", RULES.values())
CHUNK = 1 << 20
# Biased exponents: the largest, one, around a scale of 1, a subnormal amax and the smallest normal one.
EXPONENTS = (0, 1, 64, 127, 135, 254)


def options_of(scheme: str) -> tuple[dict[str, torch.Tensor], Given]:
    options = static_options(scheme)
    return options, given_of(options)._replace(min_scale=tq.SCHEMES[scheme].min_scale)


def wanted(scheme: str, amax: np.ndarray, given: Given) -> list[np.ndarray]:
    """Scales, and zero points if there are any, of groups of one element."""
    with np.errstate(all="ignore"):
        fitted = ORACLES[scheme].fit(amax[:, None], format_of(scheme), given)
    return [each for each in fitted[:2] if each is not None]


def test_the_reference_for_every_mantissa():
    """At an exponent for each scheme; 2^23 values each."""
    for i, scheme in enumerate(RULES.values()):
        found, exponent = tq.SCHEMES[scheme], EXPONENTS[1 + i % (len(EXPONENTS) - 1)]
        options, given = options_of(scheme)
        inputs = inputs_of(options, found.min_scale)
        for first in range(0, 1 << 23, CHUNK):
            bits = np.arange(first, first + CHUNK, dtype=np.uint32) | np.uint32(exponent << 23)
            amax = bits.view(np.float32)
            y = torch.from_numpy(amax)
            # Groups of one element, so that the largest value and the smallest are the same.
            maxima = found.rule.reference_peaks(y[:, None])
            got = found.rule.reference_fit(maxima, inputs, found.code)
            for mine, theirs in zip(got, wanted(scheme, amax, given), strict=True):
                differ = np.flatnonzero(mine.numpy() != theirs)
                assert len(differ) == 0, f"{scheme}: of {amax[differ[0]]} {mine[differ[0]]}, not {theirs[differ[0]]}"


def interesting(scheme: str) -> np.ndarray:
    """amax in every binade, and where the rule steps: powers of two times the largest code value, the ends of rounding
    to the mantissa, and their neighbours."""
    form = format_of(scheme)
    largest, step = form.values()[-1], 2.0 - 2.0 ** -(form.mantissa_bits + 1)
    powers = np.exp2(np.arange(-100.0, 100.0))
    points = np.concatenate([powers, powers * step, powers * largest, powers * 1.75, powers * 1.5]).astype(np.float32)
    spread = (np.arange(1 << 10, dtype=np.uint32) * 4191 + 1) % (1 << 23)
    everywhere = [(spread | np.uint32(exponent << 23)).view(np.float32) for exponent in EXPONENTS]
    return np.concatenate(
        [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf)), *everywhere]
    )


@every_rule
def test_the_kernel_where_the_rule_steps(scheme):
    """amax once in a group, with something smaller of the other sign beside it."""
    found, amax = tq.SCHEMES[scheme], interesting(scheme)
    options, given = options_of(scheme)
    size = found.group or 32
    x = np.zeros((len(amax), size), np.float32)
    x[:, 3], x[:, 7] = amax, -amax / np.float32(3)
    activation = tq.quantize(torch.from_numpy(x).to(DEVICE), scheme=scheme, **options)
    with np.errstate(all="ignore"):
        fitted = ORACLES[scheme].fit(x[:, None], format_of(scheme), given)
    scales = float32(activation.scales())
    wrong = np.flatnonzero((scales != fitted.scales).any(1))
    assert len(wrong) == 0, f"{scheme}: of {amax[wrong[0]]} {scales[wrong[0]]}, not {fitted.scales[wrong[0]]}"
    if fitted.zero_points is not None:
        assert (activation.zero_point.cpu().numpy() == fitted.zero_points).all()
    assert len(np.unique(scales)) > 100 or scheme == "nvfp4"


def test_rules_of_powers_of_two_by_hand():
    """(amax, exponent of the scale) where the three roundings part."""
    table = {
        "mxfp8": [(448.0, 0), (448.0001, 1), (447.0, 0), (224.1, 0), (1.0, -8), (1e-45, -127), (3.4028235e38, 120)],
        "mxfp8_round": [(448.0, 0), (495.9, 0), (496.0, 1), (511.0, 1), (512.0, 1), (256.0, 0), (255.0, 0), (3.0, -7)],
        "mxfp8_floor": [(448.0, 0), (511.9, 0), (512.0, 1), (256.0, 0), (255.9, -1)],
        "mxfp4": [(6.0, 0), (6.5, 0), (6.999, 0), (7.0, 1), (8.0, 1), (4.0, 0), (3.5, 0), (3.49, -1)],
        "mxfp4_ceil": [(6.0, 0), (6.5, 1), (6.0000005, 1), (3.0, -1), (12.0, 1)],
        "mxfp4_floor": [(6.0, 0), (7.9, 0), (8.0, 1), (4.0, 0), (3.9, -1)],
        "mxfp8_e5m2": [(57344.0, 0), (57345.0, 1), (28672.0, -1), (1.0, -15)],
        "fp8_group128_ue8m0": [(448.0, 0), (448.0001, 1), (56.0, -3), (3584.0, 3)],
    }
    for scheme, rows in table.items():
        group = tq.SCHEMES[scheme].group
        x = torch.zeros(len(rows), group)
        x[:, 1] = torch.tensor([amax for amax, _ in rows])
        for reference in (False, True):
            if reference:
                with tq.use_reference():
                    scales = tq.quantize(x.to(DEVICE), scheme=scheme).scales()
            else:
                scales = tq.quantize(x.to(DEVICE), scheme=scheme).scales()
            assert torch.log2(scales.double()).flatten().tolist() == [e for _, e in rows], (scheme, reference)
