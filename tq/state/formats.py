"""Formats of a rounded state: an element code with ModelOpt's scale arithmetic, and what shares a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tq.kernels.codes import E4M3, INT8, INT8_NARROW, Code, DeviceCode
from tq.kernels.device import divide, exact_reciprocal
from tq.kernels.target import INTERPRETED, Target


class Granularity(NamedTuple):
    """Key and value channels that share one scale; 0 is all of the head."""

    keys: int
    values: int


# A tile is all keys of 64 value channels; a group is some value channels of one key channel.
GRANULARITIES = {
    "head": Granularity(0, 0),
    "value_channel": Granularity(0, 1),
    "key_channel": Granularity(1, 0),
    "tile": Granularity(0, 64),
    "group16": Granularity(1, 16),
    "group32": Granularity(1, 32),
    "group64": Granularity(1, 64),
}


class DeviceFormat(NamedTuple):
    """A format as a kernel takes it; with None in it, states are left as they are. INTEGERS: its codes are int8, and
    the target multiplies matrices of them."""

    code: DeviceCode | None
    scale: Any
    restore: Any
    pack: Any = None
    unpack: Any = None
    round: Any = None
    INTEGERS: tl.constexpr = tl.constexpr(False)


AS_IT_IS = DeviceFormat(None, None, None)


@dataclass(frozen=True, eq=False)
class Format:
    """An element code with jit functions of tiles: scale(amax, MAX) -> what the state is multiplied by, and
    restore(value of a code, scale, element) -> value of the state, with the sign of the element even if it is zero.

    pack(value) -> byte and unpack(byte) -> value are the code's own for values that a scale has brought into range;
    None: its encoder. unpack_native: the same as unpack, where the target has the conversion. round(value) -> value of
    the code; None: by the byte. integers: the bytes are the values, in two's complement.
    """

    name: str
    code: Code
    scale: Any
    restore: Any
    pack: Any = None
    unpack: Any = None
    unpack_native: Any = None
    round: Any = None
    integers: bool = False

    def device(self, target: Target) -> DeviceFormat:
        code = self.code.device(target)
        native = self.unpack_native is not None and self.code.name in target.native_codes
        unpack = self.unpack_native if native else self.unpack
        bytewise = self.pack or code.encode, unpack or code.decode
        integers = self.integers and (target.name == "interpreter" or target.name.startswith("sm_"))
        return DeviceFormat(code, self.scale, self.restore, *bytewise, self.round, tl.constexpr(integers))


@triton.jit
def invert(x):
    """1 / x, IEEE."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def scale_by_reciprocal(amax, MAX: tl.constexpr):
    """MAX * (1 / amax), the reciprocal rounded to fp32 first, as torch divides a number by a tensor."""
    return invert(amax) * MAX


@triton.jit
def scale_by_division(amax, MAX: tl.constexpr):
    """MAX / amax, IEEE."""
    return tl.div_rn(tl.full(amax.shape, MAX, tl.float32), amax)


@triton.jit
def restore_by_reciprocal(value, scale, element):
    """value * (1 / scale), the reciprocal rounded to fp32 first; for codes with a sign of their own."""
    return value * invert(scale)


@triton.jit
def restore_by_division(value, scale, element):
    """value / scale, IEEE. A quarter of it is divided, so that nothing overflows before the quotient does."""
    scale = scale * 4.0
    bits = (divide(value, scale, exact_reciprocal(scale)) * 4.0).to(tl.uint32, bitcast=True)
    sign = element.to(tl.uint32, bitcast=True) & 0x80000000
    return ((bits & 0x7FFFFFFF) | sign).to(tl.float32, bitcast=True)


@triton.jit
def pack_int8(value):
    """The byte of the nearest integer, ties to even, of a value within 127.4; any byte for NaN."""
    return (value + 12582912.0).to(tl.uint32, bitcast=True).to(tl.uint8)


@triton.jit
def round_int8(value):
    """The nearest integer, ties to even, of a value within 2^22; NaN of NaN. The sums say how they are rounded, so that
    a product is rounded before it comes here, even where a step lets others be contracted with sums."""
    if not INTERPRETED and tl.target_info.cuda_capability_geq(8, 0):
        value = tl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, 0f4B400000; add.rn.f32 $0, $0, 0fCB400000;",
            "=f,f",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        if not INTERPRETED:  # changes nothing, and stands between the product and the sum
            value = tl.minimum(value, 4194304.0, propagate_nan=tl.PropagateNan.ALL)
        value = (value + 12582912.0) - 12582912.0
    return value


@triton.jit
def unpack_int8(byte):
    """The value of a byte of two's complement. With its sign bit flipped, it is the low byte of 2^23 + 128 + value."""
    if not INTERPRETED and tl.target_info.cuda_capability_geq(8, 0):
        # Of four bytes in a word each is put in place by one instruction, with no shift before it.
        value = tl.inline_asm_elementwise(
            """{
            .reg .b32 word, first, second, third, fourth;
            xor.b32 word, $4, 0x80808080;
            prmt.b32 first, word, 0x4B000000, 0x7650;
            prmt.b32 second, word, 0x4B000000, 0x7651;
            prmt.b32 third, word, 0x4B000000, 0x7652;
            prmt.b32 fourth, word, 0x4B000000, 0x7653;
            add.f32 $0, first, 0fCB000080;
            add.f32 $1, second, 0fCB000080;
            add.f32 $2, third, 0fCB000080;
            add.f32 $3, fourth, 0fCB000080;
            }""",
            "=f,=f,=f,=f,r",
            [byte],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        value = ((byte ^ 0x80).to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    return value


@triton.jit
def unpack_e4m3_native(byte):
    """The value of an E4M3 byte, by the conversion instruction of sm_89 and newer."""
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


INT8_BYTES = {
    "round": round_int8,
    "pack": pack_int8,
    "unpack": unpack_int8,
    "integers": True,
}
# ModelOpt scales by 127 / amax in the narrow range and in the full one; there -128 is a code that no value reaches.
FORMATS = {
    each.name: each
    for each in (
        Format("int8", INT8, scale_by_division, restore_by_division, **INT8_BYTES),
        Format("int8_narrow", INT8_NARROW, scale_by_division, restore_by_division, **INT8_BYTES),
        Format("fp8_e4m3", E4M3, scale_by_reciprocal, restore_by_reciprocal, unpack_native=unpack_e4m3_native),
    )
}


@triton.jit
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(tile, AXIS: tl.constexpr):
    """max |x| along an axis, which is kept; NaN if any is."""
    if INTERPRETED:  # whose maximum skips NaN; as integers, every NaN is above infinity
        bits = tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        return tl.max(bits, AXIS, keep_dims=True).to(tl.float32, bitcast=True)
    return tl.reduce(tl.abs(tile), AXIS, larger, keep_dims=True)


@triton.jit
def largest_of_groups(groups):
    """max |x| of [groups, rows of a group, groups, columns of a group], in [groups, 1, groups, 1]; NaN if any is."""
    return largest_magnitude(largest_magnitude(groups, 3), 1)


@triton.jit
def fit(tile, format):
    """(scale to encode with, scale to decode with) of [groups, rows of a group, groups, columns of a group], kept in
    [groups, 1, groups, 1].

    They are 0 and 1 where amax <= 2^-24, and 0 and NaN where an element is NaN or infinite.
    """
    amax = largest_of_groups(tile)
    usable = (amax > 5.9604644775390625e-08) & (amax < float("inf"))
    scale = format.scale(tl.where(usable, amax, 1.0), format.code.MAX)
    otherwise = tl.where(amax < 1.0, 1.0, float("nan"))
    return tl.where(usable, scale, 0.0), tl.where(usable, scale, otherwise)


@triton.jit
def round_groups(tile, scale, back, format):
    """decode(encode(tile * scale)) / back"""
    if format.round is not None:
        value = format.round(tile * scale)
    else:
        value = format.unpack(format.pack(tile * scale))
    return format.restore(value, back, tile)
