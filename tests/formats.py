"""The element formats in float64 arithmetic: values, spacings, and nearest-even encoding. Nothing here knows tq."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class SmallFloat(NamedTuple):
    """A float format, sign bit on top, `per_byte` of them in a byte, the earlier in the lower half.

    largest: code of the largest value that is used. nan: code of a NaN of either sign. one_zero: no code for -0.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: int
    nan: int
    one_zero: bool = False
    per_byte: int = 1

    @property
    def sign(self) -> int:
        """The code's sign bit."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def top(self) -> int:
        """Exponent of the largest value."""
        return int(np.floor(np.log2(self.values()[-1])))

    def values(self) -> np.ndarray:
        """The values of the codes 0 to `largest`, ascending."""
        fields = [divmod(code, 1 << self.mantissa_bits) for code in range(self.largest + 1)]
        unit = 2.0**-self.mantissa_bits
        return np.array(
            [
                mantissa * unit * 2.0 ** (1 - self.bias)
                if exponent == 0
                else (1.0 + mantissa * unit) * 2.0 ** (exponent - self.bias)
                for exponent, mantissa in fields
            ]
        )

    def spacing(self, value: Any) -> np.ndarray:
        """Distance of the format's values in the binade of `value`."""
        value = np.asarray(value, np.float64)
        exponent = np.where(value == 0.0, 1 - self.bias, np.frexp(value)[1] - 1)
        return np.ldexp(1.0, np.maximum(exponent, 1 - self.bias) - self.mantissa_bits)

    def encode(self, value: Any) -> np.ndarray:
        """Bytes of the codes nearest to the values, ties to the even one, saturating."""
        with np.errstate(invalid="ignore"):  # of a signaling NaN
            value = np.asarray(value, np.float64)
        known = np.where(np.isnan(value), 0.0, value)
        values = self.values()
        known = np.clip(known, -values[-1], values[-1])
        # Dividing by a power of two is exact, and rint rounds a tie to even, which is the even code.
        steps = np.rint(np.abs(known) / self.spacing(known)) * self.spacing(known)
        code = np.searchsorted(values, np.minimum(steps, values[-1]))
        code = np.where(np.signbit(known) & ~((code == 0) & self.one_zero), code | self.sign, code)
        code = np.where(np.isnan(value), self.nan, code).astype(np.uint8)
        return code if self.per_byte == 1 else code[..., ::2] | (code[..., 1::2] << 4)

    def elements(self, data: np.ndarray) -> np.ndarray:
        """The codes in the bytes, as integers ascending with the magnitude."""
        data = np.asarray(data, np.uint8).astype(np.int32)
        if self.per_byte == 1:
            return data
        return np.stack((data & 15, data >> 4), -1).reshape(*data.shape[:-1], 2 * data.shape[-1])

    def decode(self, data: np.ndarray) -> np.ndarray:
        """The value of each code in the bytes; NaN for those that have none."""
        code = self.elements(data)
        magnitudes = np.full(self.sign, np.nan)
        magnitudes[: self.largest + 1] = self.values()
        for past in range(self.largest + 1, self.sign):  # values that no encoder gives
            exponent, mantissa = divmod(past, 1 << self.mantissa_bits)
            if self.one_zero:  # every exponent is one of numbers
                magnitudes[past] = (1.0 + mantissa * 2.0**-self.mantissa_bits) * 2.0 ** (exponent - self.bias)
            elif mantissa == 0 and self.nan != past:
                magnitudes[past] = np.inf
        values = np.where(code & self.sign, -1.0, 1.0) * magnitudes[code & (self.sign - 1)]
        return np.where((code == self.nan) & self.one_zero, np.nan, values)


class Integer(NamedTuple):
    """Two's complement of 8 bits; `nan`: code of a NaN."""

    nan: int = 0
    mantissa_bits: int = 0
    per_byte: int = 1
    sign: int = 0x80

    def values(self) -> np.ndarray:
        """The positive values and 0, ascending."""
        return np.arange(128.0)

    def spacing(self, value: Any) -> np.ndarray:
        return np.ones(np.shape(value))

    def encode(self, value: Any) -> np.ndarray:
        """Nearest-even, saturating at -128 and 127."""
        with np.errstate(invalid="ignore"):
            value = np.asarray(value, np.float64)
        known = np.where(np.isnan(value), float(self.nan), value)
        return np.rint(np.clip(known, -128.0, 127.0)).astype(np.int8).view(np.uint8)

    def elements(self, data: np.ndarray) -> np.ndarray:
        """The integers."""
        return np.asarray(data, np.uint8).view(np.int8).astype(np.int32)

    def decode(self, data: np.ndarray) -> np.ndarray:
        return self.elements(data).astype(np.float64)


# The oracle of every code there is: a new code needs its line here.
FORMATS: dict[str, Any] = {
    "e4m3": SmallFloat(exponent_bits=4, mantissa_bits=3, bias=7, largest=0x7E, nan=0x7F),
    "e5m2": SmallFloat(exponent_bits=5, mantissa_bits=2, bias=15, largest=0x7B, nan=0x7F),
    # Its largest value is 240; vLLM uses those up to 224.
    "e4m3fnuz": SmallFloat(exponent_bits=4, mantissa_bits=3, bias=8, largest=0x7E, nan=0x80, one_zero=True),
    "int8": Integer(),
    # No NaN: that of its largest value takes its place.
    "e2m1": SmallFloat(exponent_bits=2, mantissa_bits=1, bias=1, largest=7, nan=7, per_byte=2),
}
