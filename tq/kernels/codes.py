"""Element codes: how one fp32 number becomes a byte and back, on the device and in torch, in one place each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class DeviceCode(NamedTuple):
    """The jit functions of a code, as a kernel takes them."""

    encode: Any  # fp32 tile -> uint8 tile
    decode: Any  # uint8 tile -> fp32 tile
    spacing: Any  # fp32 tile -> distance of neighbouring code values there
    MAX: tl.constexpr


@dataclass(frozen=True, eq=False)
class Code:
    """An element format of 8 bits.

    encode, decode, spacing: jit functions of fp32 or uint8 tiles; `encode` uses integer arithmetic alone and is right
    on every target. encode_native: the same by the hardware's conversion, or None. reference_encode and
    reference_decode: the torch functions both are tested against.
    """

    name: str
    max: float
    torch_dtype: torch.dtype
    encode: Any
    decode: Any
    spacing: Any
    reference_encode: Callable[[torch.Tensor], torch.Tensor]
    reference_decode: Callable[[torch.Tensor], torch.Tensor]
    encode_native: Any = None

    def device(self, native: bool) -> DeviceCode:
        """The functions a kernel for a target takes; `native` says that the hardware's conversion is bit-equal."""
        encode = self.encode_native if native and self.encode_native is not None else self.encode
        return DeviceCode(encode, self.decode, self.spacing, tl.constexpr(self.max))


@triton.jit
def encode_e4m3(value):
    """E4M3 (1-4-3, bias 7, no infinity): nearest-even, |value| > 448 to 448, NaN to 0x7F."""
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Round at bit 20 and move the exponent bias from 127 to 7: 120 << 3 = 960.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # The spacing of fp32 at 2^14 is 2^-9, the one of E4M3 subnormals: the addition rounds to nearest-even.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = sign | tl.where(magnitude >= 0x43E00000, 0x7E, code)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def encode_e4m3_native(value):
    """As `encode_e4m3`, by the conversion instruction of sm_89 and newer."""
    return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def decode_e4m3(code):
    """The fp32 value of an E4M3 byte, exactly; 0x7F and 0xFF are NaN."""
    code = code.to(tl.uint32)
    # Read as fp32 with E4M3's fields in place, the value is 2^-120 of what is meant, subnormals included.
    value = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return tl.where((code & 0x80) != 0, -value, value)


@triton.jit
def spacing_e4m3(value):
    """Distance of the E4M3 values around |value|: 2^(max(floor(log2|value|), -6) - 3)."""
    exponent = tl.maximum((value.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    return ((exponent - 3) << 23).to(tl.float32, bitcast=True)


def reference_encode_e4m3(value: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes of a float tensor. Clamped first (torch's cast does not saturate everywhere); NaN is 0x7F."""
    codes = value.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(value.isnan(), torch.full_like(codes, 0x7F), codes)


def reference_decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of E4M3 bytes."""
    return codes.view(torch.float8_e4m3fn).float()


E4M3 = Code(
    name="e4m3",
    max=448.0,
    torch_dtype=torch.float8_e4m3fn,
    encode=encode_e4m3,
    decode=decode_e4m3,
    spacing=spacing_e4m3,
    reference_encode=reference_encode_e4m3,
    reference_decode=reference_decode_e4m3,
    encode_native=encode_e4m3_native,
)
