"""Element codes: how fp32 numbers become bytes and back, on the device and in torch, in one place each."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tq.kernels.encoders import (
    decode_e2m1,
    decode_e4m3,
    decode_e4m3fnuz,
    decode_e5m2,
    decode_int8,
    encode_e2m1,
    encode_e2m1_native,
    encode_e4m3,
    encode_e4m3_native,
    encode_e4m3fnuz,
    encode_e5m2,
    encode_e5m2_native,
    encode_int8,
    encode_int8_narrow,
    spacing_e2m1,
    spacing_e4m3,
    spacing_e4m3fnuz,
    spacing_e5m2,
    spacing_int8,
)
from tq.kernels.target import Target


class DeviceCode(NamedTuple):
    """The jit functions of a code, as a kernel takes them. PER_BYTE: elements in a byte."""

    encode: Any  # fp32 tile -> uint8 tile, its last size divided by PER_BYTE
    decode: Any  # the inverse
    spacing: Any  # fp32 tile -> distance of neighbouring code values there
    MAX: tl.constexpr
    MAX_BITS: tl.constexpr  # of MAX as fp32
    HALF_BITS: tl.constexpr  # half a unit of the code's mantissa, in fp32's
    PER_BYTE: tl.constexpr


@dataclass(frozen=True, eq=False)
class Code:
    """An element format of 8 or 4 bits; two 4-bit codes share a byte, the earlier element in its low half.

    max: the value that a dynamic scale maps amax to. mantissa_bits: 0 of an integer code. encode, decode, spacing: jit
    functions of tiles; `encode` uses integer arithmetic alone and is right on every target. encode_native: the same by
    the hardware's conversion, or None. reference_encode and reference_decode: the torch functions both are tested
    against.
    """

    name: str
    max: float
    mantissa_bits: int
    torch_dtype: torch.dtype
    encode: Any
    decode: Any
    spacing: Any
    reference_encode: Callable[[torch.Tensor], torch.Tensor]
    reference_decode: Callable[[torch.Tensor], torch.Tensor]
    encode_native: Any = None
    per_byte: int = 1

    @property
    def steps(self) -> float:
        """The most spacings that a value in range is from 0."""
        return 2.0 ** (self.mantissa_bits + 1) if self.mantissa_bits else self.max

    def device(self, target: Target) -> DeviceCode:
        """The functions a kernel for `target` takes: the hardware's conversion where it is bit-equal."""
        native = self.encode_native is not None and self.name in target.native_codes
        encode = self.encode_native if native else self.encode
        max_bits = struct.unpack("<i", struct.pack("<f", self.max))[0]
        constants = map(tl.constexpr, (self.max, max_bits, 1 << (22 - self.mantissa_bits), self.per_byte))
        return DeviceCode(encode, self.decode, self.spacing, *constants)


def reference_encode_by_cast(value: torch.Tensor, dtype: torch.dtype, limit: float, nan: int) -> torch.Tensor:
    """Bytes of a float tensor. Clamped first (torch's cast does not saturate everywhere); NaN is `nan`."""
    codes = value.clamp(-limit, limit).to(dtype).view(torch.uint8)
    return torch.where(value.isnan(), torch.full_like(codes, nan), codes)


def reference_decode_by_cast(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values of bytes."""
    return codes.view(dtype).float()


def reference_encode_int8(value: torch.Tensor, low: float = -128.0) -> torch.Tensor:
    return value.nan_to_num(nan=0.0).clamp(low, 127.0).round().to(torch.int8).view(torch.uint8)


E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def reference_encode_e2m1(value: torch.Tensor) -> torch.Tensor:
    """Counts the midpoints below |value|; one that is met belongs to the even code."""
    magnitude = value.nan_to_num(nan=torch.inf).abs()
    code = torch.zeros_like(value, dtype=torch.uint8)
    for lower in range(7):
        midpoint = (E2M1_VALUES[lower] + E2M1_VALUES[lower + 1]) / 2
        code += magnitude >= midpoint if lower % 2 else magnitude > midpoint
    code |= (value.signbit() & ~value.isnan()).to(torch.uint8) << 3
    return code[..., ::2] | (code[..., 1::2] << 4)


def reference_decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32, device=codes.device)
    return values[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]


def _float8(name: str, code_max: float, mantissa_bits: int, dtype: torch.dtype, nan: int, **functions: Any) -> Code:
    """A code whose torch reference is the cast to a torch dtype."""
    encode = partial(reference_encode_by_cast, dtype=dtype, limit=code_max, nan=nan)
    decode = partial(reference_decode_by_cast, dtype=dtype)
    return Code(name, code_max, mantissa_bits, dtype, reference_encode=encode, reference_decode=decode, **functions)


E4M3 = _float8(
    "e4m3",
    448.0,
    3,
    torch.float8_e4m3fn,
    0x7F,
    encode=encode_e4m3,
    decode=decode_e4m3,
    spacing=spacing_e4m3,
    encode_native=encode_e4m3_native,
)
E5M2 = _float8(
    "e5m2",
    57344.0,
    2,
    torch.float8_e5m2,
    0x7F,
    encode=encode_e5m2,
    decode=decode_e5m2,
    spacing=spacing_e5m2,
    encode_native=encode_e5m2_native,
)
# AMD's MI300. vLLM scales to 224 and clamps there, not at the format's 240.
E4M3FNUZ = _float8(
    "e4m3fnuz",
    224.0,
    3,
    torch.float8_e4m3fnuz,
    0x80,
    encode=encode_e4m3fnuz,
    decode=decode_e4m3fnuz,
    spacing=spacing_e4m3fnuz,
)
INT8 = Code(
    "int8",
    127.0,
    0,
    torch.int8,
    encode=encode_int8,
    decode=decode_int8,
    spacing=spacing_int8,
    reference_encode=reference_encode_int8,
    reference_decode=lambda codes: codes.view(torch.int8).float(),
)
INT8_NARROW = replace(
    INT8,
    name="int8_narrow",
    encode=encode_int8_narrow,
    reference_encode=partial(reference_encode_int8, low=-127.0),
)
E2M1 = Code(
    "e2m1",
    6.0,
    1,
    torch.uint8,
    encode=encode_e2m1,
    decode=decode_e2m1,
    spacing=spacing_e2m1,
    reference_encode=reference_encode_e2m1,
    reference_decode=reference_decode_e2m1,
    encode_native=encode_e2m1_native,
    per_byte=2,
)
