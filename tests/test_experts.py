"""Several experts in one call: each gets what a call of its own rows alone gets, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import assert_same_bits, bits
from helpers import DEVICE

import tq
from tq.bench.cases import static_inputs

SIZE = 256
COUNTS = (3, 0, 137, 10)
SCHEMES = (
    "fp8_tensor", "fp8_token", "fp8_group128_pow2", "fp8_group128_ue8m0", "int8_tensor_azp", "int8_token_azp", "mxfp8",
    "nvfp4",
)  # fmt: skip
PAIRS = [(scheme, layout.name) for scheme in SCHEMES for layout in tq.SCHEMES[scheme].layouts]
every = pytest.mark.parametrize(("scheme", "layout"), PAIRS)


def inputs_of(scheme: str, each: bool) -> dict[str, torch.Tensor]:
    """What the scheme needs, the same for all experts or one for each."""
    given = static_inputs(scheme, DEVICE)
    if not each:
        return given
    factors = torch.arange(1, len(COUNTS) + 1, device=DEVICE)
    return {name: (tensor * factors).to(tensor.dtype) for name, tensor in given.items()}


def inputs_of_one(inputs: dict[str, torch.Tensor], expert: int) -> dict[str, torch.Tensor]:
    return {name: tensor[expert : expert + 1] if len(tensor) > 1 else tensor for name, tensor in inputs.items()}


def starts(counts: Any, unit: int = 1, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """The first row of each part and the end, each part rounded up to whole units."""
    sizes = [0, *(-(-count // unit) * unit for count in counts)]
    return torch.tensor(sizes, device=DEVICE).cumsum(0).to(dtype)


def assert_same_rows(part: tq.QuantizedActivation, rows: slice, alone: tq.QuantizedActivation) -> None:
    """Codes, scales, zero points and values of the rows are those of the call that had no others."""
    columns = part.data.shape[-1]
    assert_same_bits(part.data.view(torch.uint8).view(-1, columns)[rows], alone.data.view(torch.uint8))
    if tq.SCHEMES[part.scheme].dynamic:
        assert_same_bits(part.scales()[rows], alone.scales())
        if part.zero_point is not None:
            assert_same_bits(part.zero_point[rows], alone.zero_point)
    size = part.orig_shape[-1]
    assert_same_bits(part.dequantize().reshape(-1, size)[rows], alone.dequantize())


@pytest.mark.parametrize("each", [False, True])
@every
def test_one_after_the_other(scheme, layout, each):
    inputs = inputs_of(scheme, each)
    if each and not inputs:
        pytest.skip("nothing is given")
    (found,) = (known for known in tq.SCHEMES[scheme].layouts if known.name == layout)
    tiled = tq.SCHEMES[scheme].dynamic and found.tile_rows > 1
    torch.manual_seed(1)
    x = torch.randn(sum(COUNTS) + 2, 2 * SIZE, device=DEVICE).to(torch.bfloat16)  # the last two are nobody's
    options = {"scheme": scheme, "layout": layout, "expert_offsets": starts(COUNTS), **inputs}
    options["scale_offsets"] = starts(COUNTS, found.tile_rows) if tiled else None
    made, y = tq.silu_mul(x, return_unquantized=True, **options)
    begin = 0
    for expert, count in enumerate(COUNTS):
        rows = slice(begin, begin + count)
        alone, y_alone = tq.silu_mul(
            x[rows], scheme=scheme, layout=layout, return_unquantized=True, **inputs_of_one(inputs, expert)
        )
        assert_same_rows(made, rows, alone)
        assert_same_bits(y[rows], y_alone)
        begin += count
    assert tq.check("silu_mul", x, activation=made, **options).ok


@pytest.mark.parametrize("each", [False, True])
@every
def test_a_place_for_each(scheme, layout, each):
    inputs = inputs_of(scheme, each)
    if each and not inputs:
        pytest.skip("nothing is given")
    torch.manual_seed(2)
    tokens = max(COUNTS)
    x = torch.randn(len(COUNTS), tokens, SIZE, device=DEVICE)
    counts = torch.tensor(COUNTS, device=DEVICE)
    options = {"scheme": scheme, "layout": layout, "tokens_per_expert": counts, **inputs}
    made = tq.quantize(x, **options)
    for expert, count in enumerate(COUNTS):
        alone = tq.quantize(x[expert, :count], scheme=scheme, layout=layout, **inputs_of_one(inputs, expert))
        assert_same_rows(made, slice(expert * tokens, expert * tokens + count), alone)
    assert tq.check("quantize", x, activation=made, **options).ok
    with tq.use_reference():
        again = tq.quantize(x, **options)
    used = torch.arange(tokens, device=DEVICE) < counts.unsqueeze(-1)
    assert_same_bits(made.data.view(torch.uint8)[used], again.data.view(torch.uint8)[used])


@every
def test_the_reference_places_the_scales_alike(scheme, layout):
    if not tq.SCHEMES[scheme].dynamic:
        pytest.skip("no scales")
    (found,) = (known for known in tq.SCHEMES[scheme].layouts if known.name == layout)
    x = torch.randn(sum(COUNTS), SIZE, device=DEVICE)
    options = {"scheme": scheme, "layout": layout, "expert_offsets": starts(COUNTS), **inputs_of(scheme, False)}
    options["scale_offsets"] = starts(COUNTS, found.tile_rows) if found.tile_rows > 1 else None
    made = tq.quantize(x, **options)
    with tq.use_reference():
        want = tq.quantize(x, **options)
    assert_same_bits(made.data.view(torch.uint8), want.data.view(torch.uint8))
    assert_same_bits(bits(made.scale), bits(want.scale))


def test_rows_that_no_expert_has_are_neither_read_nor_written():
    """What lies there is NaN, and a residual written in place stays as it was."""
    x = torch.randn(2, 5, SIZE, device=DEVICE)
    counts = torch.tensor([2, 4], device=DEVICE)
    unused = torch.arange(5, device=DEVICE) >= counts.unsqueeze(-1)
    x[unused] = float("nan")
    residual = torch.full_like(x, 7.0)
    weight = torch.ones(SIZE, device=DEVICE)
    activation, new = tq.rms_norm(
        x, weight, scheme="fp8_token", residual=residual, residual_out=residual, tokens_per_expert=counts
    )
    assert new is residual and (residual[unused] == 7.0).all() and (residual[~unused] != 7.0).any()
    assert activation.scales()[~unused.flatten()].isfinite().all()


ARGUMENTS = [
    ({"tokens_per_expert": torch.tensor([1, 2])}, ValueError, "tokens_per_expert needs activations"),
    ({"tokens_per_expert": torch.tensor([1.0, 2.0])}, ValueError, "tokens_per_expert needs activations"),
    ({"scale_offsets": torch.tensor([0, 4])}, ValueError, "scale_offsets needs expert_offsets"),
    ({"expert_offsets": torch.tensor([0.0, 4.0])}, TypeError, "expert_offsets must be an int32 or int64 tensor"),
    ({"expert_offsets": torch.tensor([0])}, ValueError, "expert_offsets must have an element more"),
    ({"expert_offsets": torch.tensor([[0, 4]])}, ValueError, "expert_offsets must be contiguous with one dimension"),
    ({"expert_offsets": torch.arange(8)[::4]}, ValueError, "expert_offsets must be contiguous"),
    (
        {"expert_offsets": torch.tensor([0, 4]), "scale_offsets": torch.tensor([0, 4])},
        ValueError,
        "scale_offsets must be None",
    ),
    ({"expert_offsets": torch.tensor([0, 4]), "layout": "swizzled_128x4"}, ValueError, "scale_offsets must be given"),
    ({"expert_offsets": torch.tensor([0, 4]), "tokens_per_expert": torch.tensor([4])}, ValueError, "got both"),
]


@pytest.mark.parametrize(("options", "error", "message"), ARGUMENTS)
def test_bad_arguments(options, error, message):
    scheme = "mxfp8" if "layout" in options else "fp8_token"
    options = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    with pytest.raises(error, match=message):
        tq.quantize(torch.randn(4, SIZE, device=DEVICE), scheme=scheme, **options)


def test_a_number_for_each_expert_or_one_for_all():
    x, offsets = torch.randn(4, SIZE, device=DEVICE), torch.tensor([0, 1, 4], device=DEVICE)
    for count in (3, 4):
        with pytest.raises(ValueError, match="scale must have"):
            tq.quantize(x, scheme="fp8_tensor", scale=torch.ones(count, device=DEVICE), expert_offsets=offsets)
    with pytest.raises(ValueError, match="scale must have one element"):
        tq.quantize(x, scheme="fp8_tensor", scale=torch.ones(2, device=DEVICE))


def test_offsets_that_begin_late_or_end_beyond_touch_nothing_else():
    """Offsets cannot be looked at before a launch; rows before the first and past the last are nobody's."""
    x = torch.randn(6, SIZE, device=DEVICE)
    options = {"scheme": "fp8_token", "expert_offsets": torch.tensor([2, 4, 9], device=DEVICE)}
    made, y = tq.quantize(x, return_unquantized=True, **options)
    assert_same_bits(y[2:], x[2:])
    assert_same_bits(made.data[2:], tq.quantize(x[2:], scheme="fp8_token").data)
