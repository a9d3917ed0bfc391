"""The schemes in numpy: one row each in `ORACLES`. Nothing here computes with tq's kernels or references.

A scale and a quotient are fp32 numbers, each operation rounded once; from the quotient on it is float64 and exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from formats import FORMATS

import tq

FLT_MAX = np.finfo(np.float32).max
ONE = np.float32(1)
E4M3 = FORMATS["e4m3"]


class Given(NamedTuple):
    """What a call gives, as numbers."""

    scale: float = 1.0
    zero_point: int = 0
    global_scale_inv: float = 1.0
    scale_ub: float | None = None
    min_scale: float = 0.0


class Fitted(NamedTuple):
    """scales, zero_points: [M, G]. unit: what a quotient of 1 stands for, in float64, where that is not the scale."""

    scales: np.ndarray
    zero_points: np.ndarray | None = None
    unit: np.ndarray | None = None


class Oracle(NamedTuple):
    """fit(y [M, G, group], format, given) -> Fitted, its arrays [M, G]. quotient(y, fitted, format, given) -> what is
    encoded, the fitted arrays [M, G, 1]. headroom(format): how far |y| / scale may lie above the largest code value, as
    a factor. infinity: what an infinite y becomes, "largest" or "nan"."""

    fit: Callable[..., Fitted]
    quotient: Callable[..., np.ndarray]
    headroom: Callable[[Any], float] = lambda form: 1.0
    infinity: str = "largest"


def largest(form: Any) -> np.float32:
    return np.float32(form.values()[-1])


def amax_of(y: np.ndarray, given: Given) -> np.ndarray:
    """The largest magnitude but for NaN, at most scale_ub and FLT_MAX."""
    amax = np.nan_to_num(np.abs(y), nan=0.0, posinf=np.inf).max(-1, initial=0.0)
    return np.minimum(amax, FLT_MAX if given.scale_ub is None else np.float32(given.scale_ub))


def fit_given(y: np.ndarray, form: Any, given: Given) -> Fitted:
    scales = np.full(y.shape[:-1], given.scale, np.float32)
    return Fitted(scales, np.full(y.shape[:-1], given.zero_point, np.float32))


def fit_amax(y: np.ndarray, form: Any, given: Given) -> Fitted:
    return Fitted(np.maximum(amax_of(y, given) / largest(form), np.float32(given.min_scale)))


def fit_range(y: np.ndarray, form: Any, given: Given) -> Fitted:
    """(max - min) / 255, so that the 256 codes span the row; a narrow row far from 0 gets a wider one."""
    limit = np.float32(FLT_MAX / 2 if given.scale_ub is None else min(given.scale_ub, FLT_MAX / 2))
    high = np.clip(np.where(np.isnan(y), -np.inf, y).max(-1), -limit, limit)
    low = np.clip(np.where(np.isnan(y), np.inf, y).min(-1), -limit, limit)
    high, low = np.where(high < low, 0, (high, low)).astype(np.float32)  # nothing but NaN
    widest = np.maximum(np.abs(high), np.abs(low)) * np.float32(2.0**-16)
    scales = np.maximum(np.maximum((high - low) / np.float32(255), widest), np.float32(given.min_scale))
    return Fitted(scales, np.rint(np.float32(-128) - low / scales))


def power_of_two_above(value: Any) -> np.ndarray:
    """The smallest power of two >= value, in float64; 0 of 0."""
    mantissa, exponent = np.frexp(np.asarray(value, np.float64))
    return np.where(mantissa == 0.0, 0.0, np.ldexp(1.0, exponent - (mantissa == 0.5)))


def fit_power(choose: Callable[[np.ndarray, Any], np.ndarray]) -> Callable[..., Fitted]:
    """A fit of powers of two in [2^-127, 2^127], `choose`(amax, format) the one before the bounds."""

    def fit(y: np.ndarray, form: Any, given: Given) -> Fitted:
        power = choose(amax_of(y, given).astype(np.float64), form)
        least = max(float(power_of_two_above(np.float32(given.min_scale))), 2.0**-127)
        return Fitted(np.clip(power, least, 2.0**127).astype(np.float32))

    return fit


def ceil_power(amax: np.ndarray, form: Any) -> np.ndarray:
    return power_of_two_above(amax / form.values()[-1])


def floor_power(amax: np.ndarray, form: Any) -> np.ndarray:
    """2^(floor(log2(amax)) - exponent of the largest value)"""
    mantissa, exponent = np.frexp(amax)
    return np.where(mantissa == 0.0, 0.0, np.ldexp(1.0, exponent - 1 - form.top))


def round_power(amax: np.ndarray, form: Any) -> np.ndarray:
    """floor_power of amax rounded to the format's mantissa, half up."""
    mantissa, _ = np.frexp(amax)
    up = mantissa * 2.0 >= 2.0 - 2.0 ** -(form.mantissa_bits + 1)
    return floor_power(amax, form) * np.where(up, 2.0, 1.0)


def fit_two_level(y: np.ndarray, form: Any, given: Given) -> Fitted:
    """E4M3(global_scale_inv * amax / 6), the product with the fp32 number nearest to 1/6."""
    amax = np.nan_to_num(np.abs(y), nan=0.0, posinf=np.inf).max(-1, initial=0.0).astype(np.float32)
    factor = np.float32(given.global_scale_inv)
    scales = E4M3.decode(E4M3.encode(factor * (amax * np.float32(1.0 / 6.0)))).astype(np.float32)
    return Fitted(scales, unit=np.float64(scales) * np.float64(ONE / factor))


def times_reciprocal(y: np.ndarray, fitted: Fitted, form: Any, given: Given) -> np.ndarray:
    return y * (ONE / fitted.scales)


def divided(y: np.ndarray, fitted: Fitted, form: Any, given: Given) -> np.ndarray:
    return y / fitted.scales


def divided_infinity_nan(y: np.ndarray, fitted: Fitted, form: Any, given: Given) -> np.ndarray:
    return np.where(np.isinf(y), np.float32(np.nan), y / fitted.scales)


def times_inverse(y: np.ndarray, fitted: Fitted, form: Any, given: Given) -> np.ndarray:
    """y * (127 / amax), which is not y * (1 / scale)."""
    least = np.float32(given.min_scale) * largest(form)
    return y * (largest(form) / np.maximum(amax_of(y, given), least)[..., None])


def exact(y: np.ndarray, fitted: Fitted, form: Any, given: Given) -> np.ndarray:
    return np.float64(y) / np.float64(fitted.scales)


def with_zero_point(y: np.ndarray, fitted: Fitted, form: Any, given: Given) -> np.ndarray:
    quotient = np.rint(y * (ONE / fitted.scales))
    return np.where(np.isnan(quotient), 0.0, quotient).astype(np.float64) + fitted.zero_points


def two_level(y: np.ndarray, fitted: Fitted, form: Any, given: Given) -> np.ndarray:
    factor = fitted.scales * (ONE / np.float32(given.global_scale_inv))
    return y * np.where(fitted.scales > 0, ONE / factor, np.float32(0))


STATIC = Oracle(fit_given, times_reciprocal)
STATIC_DIVIDED = Oracle(fit_given, divided)
STATIC_ZERO_POINT = Oracle(fit_given, with_zero_point)
TOKEN = Oracle(fit_amax, divided_infinity_nan, infinity="nan")
GROUP = Oracle(fit_amax, times_reciprocal)
INVERSE = Oracle(fit_amax, times_inverse)
RANGE = Oracle(fit_range, with_zero_point)
CEIL = Oracle(fit_power(ceil_power), exact)
ROUND = Oracle(
    fit_power(round_power), exact, lambda form: (2.0 - 2.0 ** -(form.mantissa_bits + 1)) * 2.0**form.top / largest(form)
)
FLOOR = Oracle(fit_power(floor_power), exact, lambda form: 2.0 * 2.0**form.top / largest(form))
# A block scale is an E4M3 number, up to half a unit of 2^-3 below what is wanted.
TWO_LEVEL = Oracle(fit_two_level, two_level, lambda form: 1.0 + 2.0**-4)
# A scheme that is not here is compared with its own reference.
ORACLES = {
    "fp8_tensor": STATIC,
    "fp8_token": TOKEN,
    "fp8_group128": GROUP,
    "fp8_group64": GROUP,
    "fp8_group128_pow2": CEIL,
    "fp8_group128_ue8m0": CEIL,
    "fp8_e5m2_tensor": STATIC,
    "fp8_e5m2_token": TOKEN,
    "fp8_e5m2_group128": GROUP,
    "fp8_fnuz_tensor": STATIC,
    "fp8_fnuz_token": TOKEN,
    "fp8_fnuz_group128": GROUP,
    "int8_tensor": STATIC_DIVIDED,
    "int8_tensor_azp": STATIC_ZERO_POINT,
    "int8_token": INVERSE,
    "int8_token_azp": RANGE,
    "int8_group128": GROUP,
    "mxfp8": CEIL,
    "mxfp8_round": ROUND,
    "mxfp8_floor": FLOOR,
    "mxfp8_e5m2": CEIL,
    "mxfp4": ROUND,
    "mxfp4_ceil": CEIL,
    "mxfp4_floor": FLOOR,
    "nvfp4": TWO_LEVEL,
}
DYNAMIC_SCHEMES = [name for name in ORACLES if tq.SCHEMES[name].dynamic]


def format_of(scheme: str) -> Any:
    return FORMATS[tq.SCHEMES[scheme].code.name]


class Wanted(NamedTuple):
    """codes: bytes [M, N / elements a byte]. scales, zero_points: [M, G], [1, 1] of a static scheme. values: what the
    codes stand for, float64 [M, N]."""

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    values: np.ndarray


def quantized_by_oracle(scheme: str, y: Any, given: Given = Given(), min_scale: float | None = None) -> Wanted:  # noqa: B008
    """fp32 y [M, N] quantized. min_scale: None is the scheme's own."""
    y, found, form, oracle = np.asarray(y, np.float32), tq.SCHEMES[scheme], format_of(scheme), ORACLES[scheme]
    given = given._replace(min_scale=found.min_scale if min_scale is None else min_scale)
    grouped = y.reshape(len(y), -1, found.group or y.shape[-1])
    with np.errstate(all="ignore"):
        fitted = oracle.fit(grouped, form, given)
        wide = Fitted(*(None if each is None else each[..., None] for each in fitted))
        codes = form.encode(oracle.quotient(grouped, wide, form, given))
        unit = np.float64(wide.scales) if wide.unit is None else wide.unit
        values = (form.decode(codes) - (0.0 if wide.zero_points is None else wide.zero_points)) * unit
    static = slice(None) if found.dynamic else slice(1)
    zero_points = fitted.zero_points if found.rule.zero_point else None
    return Wanted(
        codes.reshape(len(y), -1),
        fitted.scales[static],
        None if zero_points is None else zero_points[static],
        values.reshape(y.shape),
    )


def as_stored(scheme: str, scale: Any) -> np.ndarray:
    """A least scale as the scheme keeps it: rounded up to a power of two where its scales are such."""
    scale = np.asarray(scale, np.float32)
    if ORACLES[scheme].quotient is not exact:
        return scale
    return np.maximum(power_of_two_above(scale), 2.0**-127).astype(np.float32)
