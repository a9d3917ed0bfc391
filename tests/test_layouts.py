"""Where the scale of token m and group g lies: by logical index, and in the raw storage that a GEMM reads."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from comparing import assert_same_bits
from helpers import DEVICE, SCHEME_LAYOUTS, float32, quantized_by_oracle, static_options
from helpers import given_of as numbers_of

import tq

# The packed layout has its own test, test_power_of_two.test_words.
GROUPED = [(scheme, layout) for scheme, layout in SCHEME_LAYOUTS if tq.SCHEMES[scheme].group and layout != "packed"]


def align(number: int, unit: int) -> int:
    return -(-number // unit) * unit


class Addresses(NamedTuple):
    """Shape and strides of the scale tensor for M tokens and G groups, elements of its storage, and the element of each
    scale, [M, G]."""

    shape: tuple[int, int]
    stride: tuple[int, int]
    size: int
    places: torch.Tensor


def addresses(layout: str, M: int, G: int) -> Addresses:
    m, g, A, columns = torch.arange(M)[:, None], torch.arange(G)[None], align(M, 4), align(G, 4)
    if layout == "swizzled_128x4":
        rows = align(M, 128)
        places = (m // 128 * (columns // 4) + g // 4) * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + g % 4
        return Addresses((rows, columns), (columns, 1), rows * columns, places)
    if layout == "swizzled_8x4":
        rows = align(M, 8)
        places = (m // 8 * (columns // 4) + g // 4) * 32 + m % 8 * 4 + g % 4
        return Addresses((rows, columns), (columns, 1), rows * columns, places)
    strided = {"row_major": (G, 1, M * G), "column_major": (1, M, M * G), "tma_aligned": (1, A, A * G)}
    token, group, size = strided[layout]
    return Addresses((M, G), (token, group), size, m * token + g * group)


def raw(scale: torch.Tensor) -> torch.Tensor:
    """Everything the scale's storage holds."""
    return torch.empty(0, dtype=scale.dtype, device=scale.device).set_(scale.untyped_storage())


def powers(M: int, G: int) -> torch.Tensor:
    """Neighbours in both directions differ, so that a scale in a wrong place shows."""
    return 2.0 ** ((torch.arange(M)[:, None] * 3 + torch.arange(G)) % 9 - 4)


# All sizes once for every layout; of the other schemes that have it, the two that differ most.
SIZES = [(M, G) for M in (1, 3, 5, 129) for G in (1, 4, 5, 40)]
FEW = [(5, 5), (129, 4)]
FIRST = {layout: scheme for scheme, layout in reversed(GROUPED)}
PLACES = [(*each, *size) for each in GROUPED for size in (SIZES if FIRST[each[1]] == each[0] else FEW)]


@pytest.mark.parametrize(("scheme", "layout", "M", "G"), PLACES)
def test_every_scale_lies_where_its_layout_says(scheme, layout, M, G):
    amax, found, options = powers(M, G), tq.SCHEMES[scheme], static_options(scheme)
    # One element of a group has its amax, at a place of its own.
    x = torch.zeros(M, G, found.group)
    x[:, :, 5 % found.group] = amax
    x = x.view(M, G * found.group).bfloat16()
    activation = tq.quantize(x.to(DEVICE), scheme=scheme, layout=layout, **options)
    wanted = torch.from_numpy(quantized_by_oracle(scheme, float32(x), numbers_of(options)).scales)
    assert len(wanted.unique()) >= min(M * G, 3)
    # An exponent, an E4M3 number or the number itself.
    exponents = found.rule.stored == torch.uint8
    want = (torch.log2(wanted) + 127).to(torch.uint8) if exponents else wanted.to(found.rule.stored)
    assert_same_bits(activation.scales().contiguous().cpu(), wanted, f"{layout} {M} x {G}")
    scale, there = activation.scale, addresses(layout, M, G)
    # A stride of a size of one is never used to find an element, and torch may give it any value.
    for i in range(2):
        assert scale.shape[i] == there.shape[i] and (scale.shape[i] == 1 or scale.stride(i) == there.stride[i])
    assert scale.storage_offset() == 0 and scale.dtype == found.rule.stored
    storage = raw(scale).cpu()
    assert storage.numel() == there.size and len(there.places.unique()) == M * G
    assert_same_bits(storage[there.places], want, f"{layout} {M} x {G}: storage")
    padding = torch.ones(there.size, dtype=torch.bool)
    padding[there.places.flatten()] = False
    assert padding.sum() == there.size - M * G and (storage.view(torch.uint8).view(there.size, -1)[padding] == 0).all()


def test_addresses_of_the_tensor_cores_tiles():
    """Spot values for rows of five groups."""
    places = addresses("swizzled_128x4", 130, 5).places
    spots = {(0, 0): 0, (0, 4): 512, (1, 0): 16, (32, 0): 4, (127, 3): 511, (128, 0): 1024, (129, 4): 1552}
    assert {at: int(places[at]) for at in spots} == spots


@pytest.mark.parametrize(
    ("producer", "scheme", "layout"),
    [(list(tq.PRODUCERS)[i % len(tq.PRODUCERS)], *each) for i, each in enumerate(GROUPED)],
)
def test_a_layout_changes_nothing_but_places(producer, scheme, layout):
    found, group = tq.PRODUCERS[producer], tq.SCHEMES[scheme].group
    for rows in (5, 6):
        arguments, options = found.example(rows, 3 * group, torch.bfloat16, DEVICE)
        options |= static_options(scheme)
        made = [found(*arguments, scheme=scheme, layout=name, **options) for name in (None, layout)]
        first, other = (each[0] if isinstance(each, tuple) else each for each in made)
        assert (first.layout, other.layout) == (tq.SCHEMES[scheme].layouts[0].name, layout)
        assert_same_bits(first.data, other.data)
        assert_same_bits(first.scales().contiguous(), other.scales().contiguous())
        assert_same_bits(first.dequantize(), other.dequantize())
        there = addresses(layout, rows, 3)
        assert other.scale.stride() == there.stride and raw(other.scale).numel() == there.size


@pytest.mark.parametrize(("scheme", "layout"), SCHEME_LAYOUTS)
def test_the_reference_writes_the_same_storage(scheme, layout):
    """Padding included."""
    found = tq.SCHEMES[scheme]
    options = static_options(scheme)
    x = torch.randn(5, 2 * (found.group or 64), device=DEVICE)
    got = tq.quantize(x, scheme=scheme, layout=layout, **options)
    with tq.use_reference():
        want = tq.quantize(x, scheme=scheme, layout=layout, **options)
    if not found.dynamic:
        assert got.scale is options["scale"] and got.layout == layout
        return
    assert got.scale.stride() == want.scale.stride()
    assert_same_bits(got.scale.contiguous(), want.scale.contiguous())
    assert_same_bits(raw(got.scale), raw(want.scale), f"{scheme} {layout}: storage")
