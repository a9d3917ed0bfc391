"""Element codes on the device: fp32 tiles to bytes and back, and the distance of neighbouring code values."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode_float(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr, MAX_CODE: tl.constexpr):
    """Magnitude of a small float's code, uint32: nearest-even, |value| of bits MAX_BITS and more to MAX_CODE."""
    magnitude = value.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    shift: tl.constexpr = 23 - MANTISSA
    half: tl.constexpr = (1 << (shift - 1)) - 1
    rebias: tl.constexpr = (127 - BIAS) << MANTISSA
    # Round at the last kept bit and move the exponent bias.
    normal = ((magnitude + half + ((magnitude >> shift) & 1)) >> shift) - rebias
    # At 2^(24 - BIAS - MANTISSA) fp32 numbers lie as far apart as the code's subnormals: the sum is rounded to
    # nearest-even.
    anchor_bits: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    anchor = tl.full(value.shape, anchor_bits, tl.uint32).to(tl.float32, bitcast=True)
    subnormal = (magnitude.to(tl.float32, bitcast=True) + anchor).to(tl.uint32, bitcast=True) - anchor_bits
    smallest_normal: tl.constexpr = (128 - BIAS) << 23
    code = tl.where(magnitude < smallest_normal, subnormal, normal)
    return tl.where(magnitude >= MAX_BITS, MAX_CODE, code)


@triton.jit
def decode_float(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """fp32 value of the magnitude of a small float's code, exactly, subnormals included."""
    # Read as fp32 with the code's fields in place, the value is 2^(BIAS - 127) of what is meant.
    shift: tl.constexpr = 23 - MANTISSA
    scale_bits: tl.constexpr = (254 - BIAS) << 23
    scale = tl.full(code.shape, scale_bits, tl.uint32).to(tl.float32, bitcast=True)
    return (code.to(tl.uint32) << shift).to(tl.float32, bitcast=True) * scale


@triton.jit
def spacing_float(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """2^(max(floor(log2|value|), 1 - BIAS) - MANTISSA)"""
    exponent = tl.maximum((value.to(tl.int32, bitcast=True) >> 23) & 0xFF, 128 - BIAS)
    return ((exponent - MANTISSA) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sign_bit(value):
    """0x80 where the sign bit of value is set, uint32."""
    return (value.to(tl.uint32, bitcast=True) >> 24) & 0x80


@triton.jit
def is_nan(value):
    """By the bits, so that no compiler assumes it away."""
    return (value.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def encode_e4m3(value):
    """E4M3 (1-4-3, bias 7, no infinity): nearest-even, |value| > 448 to 448, NaN to 0x7F."""
    code = sign_bit(value) | encode_float(value, 3, 7, 0x43E00000, 0x7E)
    return tl.where(is_nan(value), 0x7F, code).to(tl.uint8)


@triton.jit
def encode_e4m3_native(value):
    """As `encode_e4m3`, by the conversion instruction of sm_89 and newer."""
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def decode_e4m3(code):
    """The fp32 value of an E4M3 byte, exactly; 0x7F and 0xFF are NaN."""
    value = decode_float(code & 0x7F, 3, 7)
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return tl.where((code & 0x80) != 0, -value, value)


@triton.jit
def spacing_e4m3(value):
    return spacing_float(value, 3, 7)


@triton.jit
def encode_e5m2(value):
    """E5M2 (1-5-2, bias 15): nearest-even, |value| > 57344 to 57344, infinity too, NaN to 0x7F."""
    code = sign_bit(value) | encode_float(value, 2, 15, 0x47600000, 0x7B)
    return tl.where(is_nan(value), 0x7F, code).to(tl.uint8)


@triton.jit
def encode_e5m2_native(value):
    """As `encode_e5m2`, by the conversion instruction of sm_89 and newer."""
    return value.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def decode_e5m2(code):
    """The fp32 value of an E5M2 byte, exactly."""
    value = decode_float(code & 0x7F, 2, 15)
    value = tl.where((code & 0x7F) > 0x7C, float("nan"), tl.where((code & 0x7F) == 0x7C, float("inf"), value))
    return tl.where((code & 0x80) != 0, -value, value)


@triton.jit
def spacing_e5m2(value):
    return spacing_float(value, 2, 15)


@triton.jit
def encode_e4m3fnuz(value):
    """E4M3FNUZ (1-4-3, bias 8, one zero, no infinity): nearest-even, |value| > 224 to 224, NaN to 0x80."""
    magnitude = encode_float(value, 3, 8, 0x43600000, 0x7E)
    code = tl.where(magnitude == 0, 0, sign_bit(value) | magnitude)
    return tl.where(is_nan(value), 0x80, code).to(tl.uint8)


@triton.jit
def decode_e4m3fnuz(code):
    """The fp32 value of an E4M3FNUZ byte, exactly; 0x80 is NaN."""
    value = decode_float(code & 0x7F, 3, 8)
    value = tl.where(code == 0x80, float("nan"), value)
    return tl.where((code & 0x80) != 0, -value, value)


@triton.jit
def spacing_e4m3fnuz(value):
    return spacing_float(value, 3, 8)


@triton.jit
def encode_integer(value, LOW: tl.constexpr):
    """A byte of two's complement: nearest-even, saturating to [LOW, 127], NaN to 0."""
    value = tl.where(is_nan(value), 0.0, tl.minimum(tl.maximum(value, LOW), 127.0))
    # At 1.5 * 2^23 fp32 numbers are the integers: the sum is rounded to nearest-even and its low byte is the code.
    return (value + 12582912.0).to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit
def encode_int8(value):
    """INT8: nearest-even, saturating to [-128, 127], NaN to 0."""
    return encode_integer(value, -128.0)


@triton.jit
def encode_int8_narrow(value):
    """INT8 of a symmetric range: nearest-even, saturating to [-127, 127], NaN to 0."""
    return encode_integer(value, -127.0)


@triton.jit
def decode_int8(code):
    """The fp32 value of an INT8 byte."""
    return code.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def spacing_int8(value):
    return tl.full(value.shape, 1.0, tl.float32)


@triton.jit
def split_pairs(tile):
    """[..., N] -> the even and the odd elements, [..., N / 2] each."""
    return tl.split(tl.reshape(tile, tile.shape[:-1] + (tile.shape[-1] // 2, 2)))


@triton.jit
def nibble_e2m1(value):
    """E2M1 (1-2-1, bias 1, no infinity, no NaN), uint32: nearest-even, |value| > 6 to 6, NaN to +6."""
    code = (sign_bit(value) >> 4) | encode_float(value, 1, 1, 0x40C00000, 7)
    return tl.where(is_nan(value), 7, code)


@triton.jit
def encode_e2m1(value):
    """Two E2M1 codes a byte, the even element in the low half."""
    low, high = split_pairs(nibble_e2m1(value))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def encode_e2m1_native(value):
    """As `encode_e2m1`, by the conversion instruction of sm_100 and newer."""
    low, high = split_pairs(value)
    return tl.inline_asm_elementwise(
        "{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1; cvt.u32.u8 $0, pair; }",
        "=r,r,r",
        [low, high],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    ).to(tl.uint8)


@triton.jit
def decode_nibble_e2m1(code):
    value = decode_float(code & 7, 1, 1)
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def decode_e2m1(code):
    """The fp32 values of bytes of two E2M1 codes."""
    pairs = tl.join(decode_nibble_e2m1(code & 15), decode_nibble_e2m1(code >> 4))
    return tl.reshape(pairs, code.shape[:-1] + (code.shape[-1] * 2,))


@triton.jit
def spacing_e2m1(value):
    return spacing_float(value, 1, 1)
