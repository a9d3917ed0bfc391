"""Scales that are powers of two: exact at every power and next to it, stored as fp32 or as UE8M0 bytes in words."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import DEVICE

import tq

SCHEMES = ["fp8_group128_pow2", "fp8_group128_ue8m0"]


def power_of_two_above(value: float) -> float:
    """The smallest power of two >= value > 0."""
    mantissa, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def rows_with_amax(amax: np.ndarray) -> torch.Tensor:
    """fp32 [len(amax), 128]: amax once in each row, and something small with it."""
    x = np.zeros((len(amax), 128), np.float32)
    x[:, 5], x[:, 77] = amax, -amax / 3
    return torch.from_numpy(x).to(DEVICE)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_at_powers_and_next_to_them(scheme):
    powers = np.float32(448) * np.exp2(np.arange(-30, 100, dtype=np.float32))
    amax = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))])
    activation = tq.quantize(rows_with_amax(amax), scheme=scheme)
    # The division by 448 is rounded to fp32 first, as every quantizer with such scales does.
    wanted = [power_of_two_above(float(a / np.float32(448))) for a in amax]
    assert activation.scales().flatten().tolist() == wanted
    # Rounded up: nothing is beyond the range, and the largest code uses at least half of it.
    codes = activation.data.float().abs().amax(1)
    assert (codes <= 448).all() and (codes >= 224).all()
    assert tq.check("quantize", rows_with_amax(amax), scheme=scheme, activation=activation).saturated == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_part_of_a_binade(scheme):
    """2^15 mantissas in order: the scale steps once, at a quotient that is a power of two."""
    mantissas = np.arange(0, 1 << 23, 256, dtype=np.uint32)
    amax = (mantissas | 0x3F800000).view(np.float32)
    scales = tq.quantize(rows_with_amax(amax), scheme=scheme).scales().flatten().cpu().double().numpy()
    wanted = np.array([power_of_two_above(float(a / np.float32(448))) for a in amax])
    assert (scales == wanted).all() and len(set(scales)) == 2


def test_least_scales():
    """vLLM keeps amax above 1e-10; with fp32 scales it also keeps the scale there."""
    zero = torch.zeros(3, 128, device=DEVICE)
    pow2, ue8m0 = (tq.quantize(zero, scheme=scheme) for scheme in SCHEMES)
    assert pow2.scales().flatten().tolist() == [2.0**-33] * 3
    assert ue8m0.scales().flatten().tolist() == [power_of_two_above(1e-10 / 448)] * 3
    assert (pow2.data.view(torch.uint8) == 0).all() and (ue8m0.data.view(torch.uint8) == 0).all()


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 129])
@pytest.mark.parametrize("groups", [1, 4, 5, 7])
def test_words(rows, groups):
    """Byte j of word w is the exponent of group 4w + j; padding rows and missing groups are zero, by address."""
    row, group = torch.arange(rows)[:, None], torch.arange(groups)
    exponents = (row * 3 + group) % 9 - 4
    x = (448.0 * torch.exp2(exponents.float())).repeat_interleave(128, 1).to(DEVICE)
    scale = tq.quantize(x, scheme="fp8_group128_ue8m0").scale
    aligned, words = -(-rows // 4) * 4, -(-groups // 4)
    assert scale.dtype == torch.int32 and scale.shape == (rows, words) and scale.stride() == (1, aligned)
    storage = torch.empty(0, dtype=torch.uint8, device=scale.device).set_(scale.untyped_storage())
    wanted = torch.zeros(words * aligned * 4, dtype=torch.uint8)
    for m in range(rows):
        for g in range(groups):
            wanted[(g // 4 * aligned + m) * 4 + g % 4] = int(exponents[m, g]) + 127
    assert torch.equal(storage[: len(wanted)].cpu(), wanted)


@pytest.mark.parametrize("producer", tq.PRODUCERS)
def test_both_forms_hold_the_same(producer):
    arguments, options = tq.PRODUCERS[producer].example(7, 640, torch.bfloat16, DEVICE)
    made = [tq.PRODUCERS[producer](*arguments, scheme=scheme, min_scale=1e-9, **options) for scheme in SCHEMES]
    first, second = (each[0] if isinstance(each, tuple) else each for each in made)
    assert torch.equal(first.scales(), second.scales())
    assert torch.equal(first.data.view(torch.uint8), second.data.view(torch.uint8))
    assert torch.equal(first.dequantize(), second.dequantize())
    bits = first.scale.contiguous().view(torch.int32)
    assert (bits & ~0x7F800000 == 0).all(), "a scale is no power of two"
