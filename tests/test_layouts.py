"""Where the scale of token m and group g lies: by logical index, and in the raw storage that a GEMM reads."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from helpers import DEVICE, SCHEME_LAYOUTS, assert_same_bits

import tq

# The packed layout has its own test, test_power_of_two.test_words.
STRIDED = {"row_major", "column_major", "tma_aligned"}
GROUPED = [(scheme, layout) for scheme, layout in SCHEME_LAYOUTS if tq.SCHEMES[scheme].group and layout in STRIDED]


class Addresses(NamedTuple):
    """Distance of two tokens and of two groups in elements, and elements of the storage, for M tokens and G groups."""

    token: int
    group: int
    size: int


def addresses(layout: str, M: int, G: int) -> Addresses:
    aligned = -(-M // 4) * 4
    return {
        "row_major": Addresses(G, 1, M * G),
        "column_major": Addresses(1, M, M * G),
        "tma_aligned": Addresses(1, aligned, aligned * G),
    }[layout]


def raw(scale: torch.Tensor) -> torch.Tensor:
    """Everything the scale's storage holds."""
    return torch.empty(0, dtype=scale.dtype, device=scale.device).set_(scale.untyped_storage())


def powers(M: int, G: int) -> torch.Tensor:
    """Neighbours in both directions differ, so that a scale in a wrong place shows."""
    return 2.0 ** ((torch.arange(M)[:, None] * 3 + torch.arange(G)) % 9 - 4)


# All sizes of the first scheme with groups; of the others, which have its layouts, the two that differ most.
SIZES = [(M, G) for M in (1, 3, 5, 129) for G in (1, 4, 5, 40)]
FEW = [(5, 5), (129, 4)]
PLACES = [(*each, *size) for each in GROUPED for size in (SIZES if each[0] == GROUPED[0][0] else FEW)]


@pytest.mark.parametrize(("scheme", "layout", "M", "G"), PLACES)
def test_every_scale_lies_where_its_layout_says(scheme, layout, M, G):
    amax, group = powers(M, G), tq.SCHEMES[scheme].group
    # One element of a group has its amax, at a place of its own.
    x = torch.zeros(M, G, group)
    x[:, :, 5 % group] = amax
    x = x.view(M, G * group).bfloat16().to(DEVICE)
    scale = tq.quantize(x, scheme=scheme, layout=layout).scale
    want = amax / 448.0
    if scheme.endswith("_pow2"):
        want = torch.exp2(torch.ceil(torch.log2(want)))
    want = want.to(DEVICE)
    assert_same_bits(scale.contiguous(), want, f"{layout} {M} x {G}")
    token, step, size = addresses(layout, M, G)
    # A stride of a size of one is never used to find an element, and torch may give it any value.
    assert (M == 1 or scale.stride(0) == token) and (G == 1 or scale.stride(1) == step)
    assert scale.storage_offset() == 0 and scale.shape == (M, G) and scale.dtype == torch.float32
    storage = raw(scale)
    assert storage.numel() == size
    places = torch.arange(M)[:, None] * token + torch.arange(G) * step
    assert_same_bits(storage[places.flatten()].view(M, G), want, f"{layout} {M} x {G}: storage")
    padding = torch.ones(size, dtype=torch.bool)
    padding[places.flatten()] = False
    assert padding.sum() == size - M * G and (storage[padding.to(DEVICE)] == 0).all()


@pytest.mark.parametrize("producer", tq.PRODUCERS)
@pytest.mark.parametrize(("scheme", "layout"), GROUPED)
def test_a_layout_changes_nothing_but_places(producer, scheme, layout):
    found, group = tq.PRODUCERS[producer], tq.SCHEMES[scheme].group
    for rows in (5, 6):
        arguments, options = found.example(rows, 3 * group, torch.bfloat16, DEVICE)
        made = [found(*arguments, scheme=scheme, layout=name, **options) for name in (None, layout)]
        first, other = (each[0] if isinstance(each, tuple) else each for each in made)
        assert (first.layout, other.layout) == (tq.SCHEMES[scheme].layouts[0].name, layout)
        assert_same_bits(first.data, other.data)
        assert_same_bits(first.scale.contiguous(), other.scale.contiguous())
        assert_same_bits(first.dequantize(), other.dequantize())
        token, step, size = addresses(layout, rows, 3)
        assert other.scale.stride() == (token, step) and raw(other.scale).numel() == size


@pytest.mark.parametrize(("scheme", "layout"), SCHEME_LAYOUTS)
def test_the_reference_writes_the_same_storage(scheme, layout):
    """Padding included."""
    found = tq.SCHEMES[scheme]
    if not found.dynamic:
        given = torch.ones(1, device=DEVICE)
        activation = tq.quantize(torch.ones(2, 128, device=DEVICE), scheme=scheme, scale=given, layout=layout)
        assert activation.scale is given and activation.layout == layout
        return
    x = torch.randn(5, 2 * (found.group or 64), device=DEVICE)
    got = tq.quantize(x, scheme=scheme, layout=layout).scale
    with tq.use_reference():
        want = tq.quantize(x, scheme=scheme, layout=layout).scale
    assert got.stride() == want.stride()
    assert_same_bits(got.contiguous(), want.contiguous())
    assert_same_bits(raw(got), raw(want), f"{scheme} {layout}: storage")
