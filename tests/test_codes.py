"""The element codes against float64 oracles, ml_dtypes and a table written by hand. Everything is bit-equal."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from comparing import assert_codes, assert_same_bits
from helpers import DEVICE, FORMATS, float32

import tq
from tq.kernels.device import round_to
from tq.kernels.target import target_of

CODES = {scheme.code.name: scheme.code for scheme in tq.SCHEMES.values()}
IMPLEMENTATIONS = ("encode", "encode_native", "reference_encode")
BLOCK = 1 << 14


class Function(NamedTuple):
    function: Any


@triton.jit
def map_kernel(source, out, N, mapped, BLOCK: tl.constexpr, OUT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = mapped.function(tl.load(source + at, mask=at < N, other=0))
    tl.store(out + tl.program_id(0) * OUT + tl.arange(0, OUT), values)


def on_device(function: Any, source: np.ndarray, dtype: torch.dtype, ratio: float = 1.0) -> torch.Tensor:
    """function(source) by a kernel, as one tensor of `dtype`; `ratio` outputs for each input."""
    values = torch.from_numpy(source).to(DEVICE)
    blocks, size = triton.cdiv(values.numel(), BLOCK), int(BLOCK * ratio)
    out = torch.empty(blocks * size, dtype=dtype, device=DEVICE)
    map_kernel[(blocks,)](values, out, values.numel(), Function(function), BLOCK=BLOCK, OUT=size)
    return out[: int(len(source) * ratio)]


def encode(code: tq.Code, implementation: str, values: np.ndarray) -> torch.Tensor:
    """fp32 values -> bytes."""
    values = np.ascontiguousarray(values, np.float32)
    assert len(values) % code.per_byte == 0
    if implementation == "reference_encode":
        return code.reference_encode(torch.from_numpy(values).to(DEVICE)).view(torch.uint8)
    function = getattr(code, implementation)
    if implementation == "encode_native" and code.name not in target_of(torch.device(DEVICE, 0)).native_codes:
        pytest.skip("this target converts by integer arithmetic")
    return on_device(function, values, torch.uint8, 1 / code.per_byte)


def all_patterns(kind: str) -> np.ndarray:
    """The fp32 values of every 16-bit pattern, NaN of both signs and all payloads included."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    if kind == "bf16":
        return (patterns.astype(np.uint32) << 16).view(np.float32)
    return patterns.view(np.float16).astype(np.float32)


def midpoints_and_neighbours(code: tq.Code) -> np.ndarray:
    """Every midpoint of two neighbouring code values and the one past the largest, with the fp32 on either side."""
    values = FORMATS[code.name].values()
    middle = ((values[1:] + values[:-1]) / 2).tolist()
    middle = np.float32([*middle, values[-1] + (values[-1] - values[-2]) / 2])
    assert (middle.astype(np.float64)[:-1] * 2 == values[1:] + values[:-1]).all()
    around = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    below = [-values[-1] - 0.5] if code.name == "int8" else []  # between -127 and -128
    return np.concatenate([*around, *(-side for side in around), np.float32(2 * below)])


def specials(code: tq.Code) -> np.ndarray:
    """NaN of both signs, infinities, zeros, fp32 subnormals, the ends of the code's range."""
    largest = np.float32(code.max)
    positive = [0.0, 1e-45, 1.1754944e-38, 2.0**-20, 2.0**-10, 2.0**-9, 0.015625, 3.4028235e38, np.inf]
    positive += [largest, np.nextafter(largest, np.float32(np.inf)), np.nextafter(largest, np.float32(0)), 1e30]
    patterns = np.uint32([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]).view(np.float32)
    return np.concatenate([np.float32(positive), -np.float32(positive), patterns])


def random_patterns() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)


INPUTS = {
    "bf16": lambda code: all_patterns("bf16"),
    "fp16": lambda code: all_patterns("fp16"),
    "midpoints": midpoints_and_neighbours,
    "specials": specials,
    "random": lambda code: random_patterns(),
}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_encode(name, implementation, inputs):
    code, values = CODES[name], INPUTS[inputs](CODES[name])
    got = encode(code, implementation, values)
    want = FORMATS[name].encode(values)
    scheme = next(scheme for scheme in tq.SCHEMES.values() if scheme.code is code)
    assert_codes(scheme, got, want, 1.0, f"{name} {implementation} of {inputs}")
    if code.per_byte == 2:  # every value in the other half too
        got, want = encode(code, implementation, np.roll(values, 1)), FORMATS[name].encode(np.roll(values, 1))
        assert_codes(scheme, got, want, 1.0, f"{name} {implementation} of {inputs}, shifted")


# Conversions of others; none of them saturates, so that values beyond the range are left to the tables below.
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("name", ML_DTYPES)
@pytest.mark.parametrize("inputs", INPUTS)
def test_the_oracle_against_ml_dtypes(name, inputs):
    values = INPUTS[inputs](CODES[name])
    # Its NaN has a sign, and some formats have none: ours is `nan`, as the hardware's conversion gives.
    values = values[np.abs(values) <= CODES[name].max]
    form = FORMATS[name]._replace(per_byte=1)
    want = values.astype(ML_DTYPES[name]).view(np.uint8)
    assert len(values) > 10 and (form.encode(values) == want).all()
    assert (form.decode(want) == want.view(ML_DTYPES[name]).astype(np.float64)).all()
    assert (form.encode(np.float32([np.nan, -np.nan])) == form.nan).all()


GOLDEN_E4M3 = [
    (0.0, 0x00), (-0.0, 0x80), (1.0, 0x38), (-1.0, 0xB8), (1.125, 0x39), (0.5, 0x30), (2.0, 0x40), (448.0, 0x7E),
    (2.0**-9, 0x01), (-(2.0**-9), 0x81), (7 * 2.0**-9, 0x07), (2.0**-6, 0x08), (-240.0, 0xF7),
    # Ties go to the even code; the last of them carries into the next exponent.
    (2.0**-10, 0x00), (3 * 2.0**-10, 0x02), (5 * 2.0**-10, 0x02), (1.0625, 0x38), (1.1875, 0x3A), (17.0, 0x58),
    (19.0, 0x5A), (272.0, 0x78), (400.0, 0x7C), (31.0, 0x60), (15.5 * 2.0**-10, 0x08),
    # Beside a tie, where a conversion by way of fp16 would fall onto it.
    (1.0625001, 0x39), (-1.0625001, 0xB9), (400.199585, 0x7D), (272.156555, 0x79), (136.002075, 0x71),
    (2.0**-10 * 1.0000001, 0x01), (126.24, 0x70), (7.9, 0x50), (31.7, 0x60),
    # Beyond the range.
    (464.0, 0x7E), (480.0, 0x7E), (-500.0, 0xFE), (1e30, 0x7E), (float("inf"), 0x7E), (-float("inf"), 0xFE),
    (float("nan"), 0x7F), (-float("nan"), 0x7F), (1e-45, 0x00), (-1e-45, 0x80),
]  # fmt: skip


GOLDEN_E5M2 = [
    (0.0, 0x00), (-0.0, 0x80), (1.0, 0x3C), (-1.25, 0xBD), (57344.0, 0x7B), (2.0**-16, 0x01), (2.0**-14, 0x04),
    (1.125, 0x3C), (1.375, 0x3E), (1.3750001, 0x3E), (1.1250001, 0x3D), (2.0**-17, 0x00), (3 * 2.0**-17, 0x02),
    (61440.0, 0x7B), (65536.0, 0x7B), (-1e30, 0xFB), (float("inf"), 0x7B), (float("nan"), 0x7F), (-float("nan"), 0x7F),
]  # fmt: skip
GOLDEN_FNUZ = [
    (0.0, 0x00), (-0.0, 0x00), (1.0, 0x40), (-1.0, 0xC0), (224.0, 0x7E), (-224.0, 0xFE), (240.0, 0x7E), (1e9, 0x7E),
    (2.0**-10, 0x01), (-(2.0**-10), 0x81), (2.0**-11, 0x00), (-(2.0**-11), 0x00), (-1e-30, 0x00), (1.0625, 0x40),
    (float("inf"), 0x7E), (-float("inf"), 0xFE), (float("nan"), 0x80), (-float("nan"), 0x80),
]  # fmt: skip
GOLDEN_INT8 = [
    (0.0, 0), (-0.0, 0), (0.5, 0), (-0.5, 0), (1.5, 2), (-1.5, 0xFE), (2.5, 2), (126.5, 126), (127.5, 127), (1e9, 127),
    (-127.5, 0x80), (-128.0, 0x80), (-128.5, 0x80), (-1e9, 0x80), (0.50000006, 1), (-0.50000006, 0xFF),
    (float("inf"), 127), (-float("inf"), 0x80), (float("nan"), 0), (-float("nan"), 0),
]  # fmt: skip
# Pairs share a byte, the first in its low half.
GOLDEN_E2M1 = [
    (0.25, 0x0), (0.75, 0x2), (1.25, 0x2), (1.75, 0x4), (2.5, 0x4), (3.5, 0x6), (5.0, 0x6), (2.500004, 0x5),
    (0.2500001, 0x1), (1.2500001, 0x3), (5.00001, 0x7), (-0.25, 0x8), (-5.0, 0xE), (6.0, 0x7), (-7.0, 0xF),
    (float("inf"), 0x7), (-float("inf"), 0xF), (float("nan"), 0x7), (-float("nan"), 0x7), (-0.0, 0x8),
]  # fmt: skip
GOLDEN = {"e4m3": GOLDEN_E4M3, "e5m2": GOLDEN_E5M2, "e4m3fnuz": GOLDEN_FNUZ, "int8": GOLDEN_INT8, "e2m1": GOLDEN_E2M1}


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "oracle"])
def test_golden_table(name, implementation):
    table = GOLDEN[name] if len(GOLDEN[name]) % 2 == 0 else [*GOLDEN[name], (0.0, 0)]
    values, want = np.float32([value for value, _ in table]), np.uint8([code for _, code in table])
    if CODES[name].per_byte == 2:
        want = want[::2] | (want[1::2] << 4)
    if implementation == "oracle":
        got = torch.from_numpy(FORMATS[name].encode(values))
    else:
        got = encode(CODES[name], implementation, values)
    scheme = next(scheme for scheme in tq.SCHEMES.values() if scheme.code.name == name)
    assert_codes(scheme, got, want, 1.0, f"golden table, {implementation}")


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("implementation", ["decode", "reference_decode"])
def test_decode(name, implementation):
    codes = np.arange(256, dtype=np.uint8)
    if implementation == "decode":
        got = on_device(CODES[name].decode, codes, torch.float32, CODES[name].per_byte)
    else:
        got = CODES[name].reference_decode(torch.from_numpy(codes).to(DEVICE))
    got, want = float32(got), FORMATS[name].decode(codes).astype(np.float32)
    assert (np.isnan(got) == np.isnan(want)).all()
    known = ~np.isnan(want)
    assert (got.view(np.uint32)[known] == want.view(np.uint32)[known]).all()


@pytest.mark.parametrize("name", CODES)
def test_every_code_survives_a_round_trip(name):
    codes, code = np.arange(256, dtype=np.uint8), CODES[name]
    values = FORMATS[name].decode(codes).reshape(256, -1)
    codes = codes[(np.abs(values) <= code.max + (name == "int8")).all(1)]  # neither NaN nor beyond what is used
    values = float32(on_device(code.decode, codes, torch.float32, code.per_byte))
    assert len(codes) >= 247 and (encode(code, "encode", values).cpu().numpy() == codes).all()


@pytest.mark.parametrize("name", CODES)
def test_spacing(name):
    """From the distances of the code values themselves, up to the largest."""
    code, values = CODES[name], FORMATS[name].values()
    points = np.concatenate([all_patterns("bf16"), midpoints_and_neighbours(code), specials(code)])
    points = points[np.abs(points) < code.max]
    got = on_device(code.spacing, points, torch.float32)
    below = np.searchsorted(values, np.abs(points).astype(np.float64), side="right") - 1
    assert len(points) > 30_000 and (float32(got) == np.diff(values)[below]).all()


@triton.jit
def round_to_bf16(value):
    return round_to(value, tl.bfloat16)


@triton.jit
def round_to_fp16(value):
    return round_to(value, tl.float16)


@pytest.mark.parametrize(
    ("rounding", "dtype", "unit"),
    [(round_to_bf16, torch.bfloat16, 1 << 16), (round_to_fp16, torch.float16, 1 << 13)],
)
def test_rounding_to_a_dtype(rounding, dtype, unit):
    """Nearest-even, in fp32 registers: random patterns, ties between two values of the dtype, and their neighbours."""
    ties = (np.arange(1 << 16, dtype=np.uint64) * 65521 * unit + unit // 2) & 0xFFFFFFFF
    ties = np.concatenate([ties, ties + 1, ties - 1]).astype(np.uint32).view(np.float32)
    values = np.concatenate([random_patterns(), ties, specials(CODES["e4m3"])])
    got = float32(on_device(rounding, values, torch.float32))
    want = torch.from_numpy(values).to(dtype).float().numpy()
    assert (np.isnan(got) == np.isnan(values)).all()
    known = ~np.isnan(values)
    assert (got.view(np.uint32)[known] == want.view(np.uint32)[known]).all()


@pytest.mark.parametrize("name", CODES)
def test_format_of_a_code(name):
    code = CODES[name]
    assert code.max == FORMATS[name].values()[-1] and code.torch_dtype.itemsize == 1


def test_rounding_has_no_bias():
    """The signed mean error of uniform values is zero within the error of sampling."""
    values = np.random.default_rng(3).uniform(-448, 448, 1 << 20).astype(np.float32)
    codes = encode(tq.SCHEMES["fp8_tensor"].code, "encode", values)
    towards_zero = (FORMATS["e4m3"].decode(codes.cpu().numpy()) - values) * np.sign(values)
    assert abs(towards_zero.mean()) < 5 * towards_zero.std() / np.sqrt(len(values))


# Schemes under which 16-bit inputs are quantized as they are.
PLAIN = {"e4m3": "fp8_tensor", "e5m2": "fp8_e5m2_tensor", "e4m3fnuz": "fp8_fnuz_tensor", "int8": "int8_tensor"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PLAIN)
def test_every_16_bit_input_through_the_template(name, dtype):
    """The same through loads, the scale and the stores of a whole launch; scale 1 changes nothing."""
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    x = torch.from_numpy(patterns).view(dtype).view(256, 256).to(DEVICE)
    got = tq.quantize(x, scheme=PLAIN[name], scale=torch.ones(1, device=DEVICE)).data.view(torch.uint8)
    want = FORMATS[name].encode(all_patterns("bf16" if dtype == torch.bfloat16 else "fp16")).reshape(256, 256)
    assert_codes(tq.SCHEMES[PLAIN[name]], got, want, 1.0, f"quantize of every {dtype}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_is_read_and_written_as_it_is(dtype):
    """Subnormal ones included: y comes back as x, and the residual of a norm as the sum of x and -0."""
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.int16)
    x = torch.from_numpy(patterns).view(dtype).view(64, 1024).to(DEVICE)
    known, scale = ~x.isnan(), {"scheme": "fp8_tensor", "scale": torch.ones(1, device=DEVICE)}
    _, y = tq.quantize(x, return_unquantized=True, **scale)
    _, total = tq.rms_norm(x, torch.ones_like(x[0]), residual=torch.full_like(x, -0.0), **scale)
    for got in (y, total):
        assert torch.equal(got.isnan(), x.isnan()) and known.sum() > 60_000
        assert_same_bits(got[known], x[known])
