"""Bugs that were reported of kernels like these, as tests: those of places and shapes. The kind of a bug, not its
witness alone; test_field_cases_values.py has those of values, test_field_cases_calls.py those of calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from comparing import assert_codes, assert_equal_results, assert_same_bits
from helpers import (
    DEVICE,
    FORMATS,
    ONE_EACH,
    SCHEME_LAYOUTS,
    Case,
    float32,
    format_of,
    given_of,
    in_nan_memory,
    quantized_by_oracle,
    static_options,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import tq
from tq.kernels import launch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
E4M3 = FORMATS["e4m3"]
SWIZZLED = [(scheme, layout) for scheme, layout in SCHEME_LAYOUTS if layout.startswith("swizzled")]


def raw(scale: torch.Tensor) -> np.ndarray:
    """Every byte of the storage."""
    return torch.empty(0, dtype=torch.uint8, device=scale.device).set_(scale.untyped_storage()).cpu().numpy()


def tile_offset(layout: str, m: np.ndarray, g: np.ndarray, G: int) -> np.ndarray:
    """Byte of the scale of token m and group g among G, from the documented order of the tensor cores' tiles."""
    across = -(-G // 4)
    if layout == "swizzled_8x4":
        return (m // 8 * across + g // 4) * 32 + m % 8 * 4 + g % 4
    return (m // 128 * across + g // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + g % 4


@pytest.mark.parametrize(("scheme", "layout"), SWIZZLED)
def test_o09_padding_of_scales_is_written(scheme, layout):
    """Whatever was in the memory: the poisoned torch.empty of conftest.py; the fake says the padded shape."""
    group = tq.SCHEMES[scheme].group
    for M, G in ((1, 1), (33, 3), (128, 180), (129, 5)):
        x, options = torch.randn(M, G * group, device=DEVICE).bfloat16() + 3.0, static_options(scheme)
        scale = tq.quantize(x, scheme=scheme, layout=layout, **options).scale
        storage = raw(scale)
        places = tile_offset(layout, np.arange(M)[:, None], np.arange(G)[None], G)
        padding = np.delete(storage, places.reshape(-1))
        assert len(padding) == scale.numel() - M * G and (padding == 0).all() and (storage[places] != 0).all()
        with FakeTensorMode() as mode:
            given = {name: mode.from_tensor(tensor) for name, tensor in options.items()}
            fake = torch.ops.tq.quantize(mode.from_tensor(x), scheme=scheme, layout=layout, **given)
        tile = 8 if layout == "swizzled_8x4" else 128
        assert fake[1].shape == scale.shape == (-(-M // tile) * tile, -(-G // 4) * 4)


@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8", "mxfp4", "mxfp8_e5m2"])
def test_o10_the_address_of_every_scale(scheme, layout):
    """By address: a round trip with the same wrong map would pass."""
    m, g = np.arange(130)[:, None], np.arange(5)[None]
    largest = format_of(scheme).values()[-1]
    amax = largest * 2.0 ** ((3 * m + g) % 7 - 3)
    x = torch.from_numpy(amax).repeat_interleave(tq.SCHEMES[scheme].group, 1).bfloat16().to(DEVICE)
    ones = {"global_scale_inv": torch.ones(1, device=DEVICE)} if scheme == "nvfp4" else {}
    stored = raw(tq.quantize(x, scheme=scheme, layout=layout, **ones).scale)
    scales = amax / largest
    want = E4M3.encode(scales) if scheme == "nvfp4" else (np.log2(scales) + 127).astype(np.uint8)
    assert (stored[tile_offset(layout, m, g, 5)] == want).all()
    if layout == "swizzled_128x4":
        spots = {(0, 0): 0, (0, 4): 512, (1, 0): 16, (32, 0): 4, (127, 3): 511, (128, 0): 1024, (129, 4): 1552}
        for (row, group), byte in spots.items():
            assert stored[byte] == want[row, group]


@pytest.mark.parametrize("layout", ["column_major", "tma_aligned", "packed"])
def test_o12_strided_scales_by_index_and_by_storage(layout):
    scheme = "fp8_group128_ue8m0" if layout == "packed" else "fp8_group128_pow2"
    for M, G in ((1, 1), (3, 5), (129, 40)):
        exponents = (np.arange(M)[:, None] * 3 + np.arange(G)) % 9 - 4
        x = torch.from_numpy(448.0 * np.exp2(exponents)).repeat_interleave(128, 1).bfloat16().to(DEVICE)
        activation = tq.quantize(x, scheme=scheme, layout=layout)
        assert (np.log2(float32(activation.scales())) == exponents).all()
        aligned = M if layout == "column_major" else -(-M // 4) * 4
        m, g = np.arange(M)[:, None], np.arange(G)[None]
        if layout == "packed":
            words = -(-G // 4)
            wanted = np.zeros(words * aligned * 4, np.uint8)
            wanted[(g // 4 * aligned + m) * 4 + g % 4] = exponents + 127
            assert activation.scale.dtype == torch.int32 and activation.scale.shape == (M, words)
            assert (raw(activation.scale)[: len(wanted)] == wanted).all()
        else:
            wanted = np.zeros(aligned * G, np.float32)
            wanted[g * aligned + m] = np.exp2(exponents)
            assert (raw(activation.scale).view(np.float32) == wanted).all()
        assert M == 1 or G == 1 or activation.scale.stride() == (1, aligned)


@pytest.mark.parametrize(("producer", "scheme"), ONE_EACH)
def test_o13_strided_and_three_dimensional_inputs(producer, scheme):
    """Views of a wider tensor give what their copies do; what one stride cannot walk is refused."""
    found, size = tq.SCHEMES[scheme], max(2 * tq.SCHEMES[scheme].group, 96)
    case = Case(tq.PRODUCERS[producer], found, 10, size)
    want = case.run()
    case.change_rows(lambda rows: torch.cat([rows + 1, rows, rows - 1], 1)[:, rows.shape[1] : 2 * rows.shape[1]])
    assert_equal_results(case.run(), want)
    case.change_rows(lambda rows: rows.unflatten(0, (2, 5)))
    got = case.run()
    assert got.activation.orig_shape == (2, 5, size) and got.activation.data.is_contiguous()
    assert_same_bits(got.codes.flatten(0, 1), want.codes)
    x, *rest = case.arguments
    width = x.shape[-1]
    for wrong in (
        torch.ones(2, 8, width, dtype=x.dtype, device=DEVICE)[:, :5],
        torch.ones(width, 7, dtype=x.dtype, device=DEVICE).t(),
        torch.ones(7, 2 * width, dtype=x.dtype, device=DEVICE)[:, ::2],
    ):
        with pytest.raises(ValueError, match=r"stride.*contiguous\(\)"):
            case.producer(wrong, *rest, scheme=scheme, **static_options(scheme))


def test_o14_offsets_beyond_32_bits():
    """Rows 2^31 elements apart, read and written; the memory between them is asked for and never touched."""
    stride, size = (1 << 30) + 8, 256

    def far(values: torch.Tensor) -> torch.Tensor:
        memory = torch.UntypedStorage(2 * (2 * stride + values.shape[1]), device=DEVICE)
        view = torch.empty(0, dtype=torch.bfloat16, device=DEVICE).set_(memory, 0, values.shape, (stride, 1))
        return view.copy_(values)

    gate_up = torch.randn(3, 2 * size, device=DEVICE).bfloat16()
    for scheme in ("fp8_group128", "mxfp4", "int8_token_azp"):
        got, want = (tq.silu_mul(x, scheme=scheme, **static_options(scheme)) for x in (far(gate_up), gate_up))
        assert_same_bits(got.data.view(torch.uint8), want.data.view(torch.uint8))
        assert_same_bits(got.scales(), want.scales())
    x, residual = torch.randn(2, 3, size, device=DEVICE).bfloat16()
    weight, place = torch.ones(size, dtype=torch.bfloat16, device=DEVICE), far(residual)
    got, total = tq.rms_norm(x, weight, residual=place, residual_out=place, scheme="fp8_token")
    want, wanted = tq.rms_norm(x, weight, residual=residual, scheme="fp8_token")
    assert total is place
    assert_same_bits(total.contiguous(), wanted)
    assert_same_bits(got.data.view(torch.uint8), want.data.view(torch.uint8))


@needs_gpu
@pytest.mark.gpu
def test_o14_more_than_2_to_the_31_elements():
    x = torch.zeros(61682, 2 * 17408, dtype=torch.bfloat16, device="cuda")
    x[0], x[-1] = torch.randn(2, 2 * 17408, device="cuda").bfloat16()
    for scheme in ("fp8_token", "fp8_group128", "mxfp4"):
        got = tq.silu_mul(x, scheme=scheme)
        for row in (0, -1):
            alone = tq.silu_mul(x[row][None], scheme=scheme)
            assert_same_bits(got.data[row].view(torch.uint8), alone.data[0].view(torch.uint8))
        assert (got.data[1:-1].view(torch.uint8) == 0).all()


@pytest.mark.parametrize(("producer", "scheme"), ONE_EACH)
def test_o15_no_rows(producer, scheme, monkeypatch):
    """No launch, and the dtypes, shapes and strides of any other call, in the fake too."""
    monkeypatch.setattr(launch, "quantize_rows_kernel", None)
    found = tq.SCHEMES[scheme]
    for layout in found.layouts:
        for shape in ((0,), (2, 0)):
            case = Case(tq.PRODUCERS[producer], found, 0, 256, layout=layout.name)
            case.change_rows(lambda rows, shape=shape: rows.reshape(*shape, rows.shape[-1]))
            activation, *sides = (got := case.run()).activation, *got.side_outputs
            assert activation.data.shape == (*shape, 256 // found.code.per_byte)
            assert activation.data.dtype == found.code.torch_dtype and all(s.shape == (*shape, 256) for s in sides)
            assert activation.dequantize().shape == (*shape, 256)
            if found.dynamic:
                G = found.groups(256)
                columns = {"packed": -(-G // 4)}.get(layout.name, G)
                columns = -(-G // 4) * 4 if layout.name.startswith("swizzled") else columns
                assert activation.scale.shape == (0, columns) and activation.scales().shape == (0, G)
            options = {name: value for name, value in case.call_options().items() if value is not None}
            with FakeTensorMode(allow_non_fake_inputs=True):
                op = getattr(torch.ops.tq, producer)
                made = [activation.data, *([activation.scale] if found.dynamic else [])]
                for fake, real in zip(op(*case.arguments, scheme=scheme, **options), made, strict=False):
                    assert (fake.shape, fake.stride()) == (real.shape, real.stride())


@pytest.mark.parametrize("scheme", ["fp8_token", "fp8_group128", "mxfp8", "nvfp4", "int8_token_azp"])
def test_o16_hidden_sizes_that_are_not_nice(scheme):
    """Multiples of the group, with NaN behind every row, are the oracle's; the others are refused before a launch."""
    found, options = tq.SCHEMES[scheme], static_options(scheme)
    unit = max(found.group, found.code.per_byte)
    for size in (32, 48, 100, 128, 1376, 2112, 2880, 5120, 6144, 7168, 12288, 16384, 28672):
        if size > 7168 and scheme not in ("fp8_token", "fp8_group128"):
            continue  # several seconds each when interpreted, for groups that are small
        x = in_nan_memory(torch.randn(2, size, device=DEVICE).bfloat16())
        if size % unit:
            with pytest.raises(ValueError, match=rf"multiple of {unit} for {scheme}, got {size}"):
                tq.quantize(x, scheme=scheme, **options)
            continue
        got, want = tq.quantize(x, scheme=scheme, **options), quantized_by_oracle(scheme, float32(x), given_of(options))
        assert_codes(found, got.data.view(torch.uint8), want.codes, want.scales, f"{scheme} {size}")
        assert (float32(got.scales()) == want.scales).all()
