"""Scale rules, one family a file."""

from tq.kernels.rules.amax import AMAX_DIVIDING, AMAX_INVERTING, AMAX_MULTIPLYING
from tq.kernels.rules.base import FLT_MAX, SMALLEST_MIN_SCALE, DeviceRule, ScaleInputs, ScaleRule
from tq.kernels.rules.given import STATIC, STATIC_DIVIDING
from tq.kernels.rules.power_of_two import POWER_OF_TWO, UE8M0, UE8M0_FLOOR, UE8M0_ROUND
from tq.kernels.rules.two_level import GLOBAL
from tq.kernels.rules.zero_point import RANGE, STATIC_ZERO_POINT

__all__ = [
    "AMAX_DIVIDING",
    "AMAX_INVERTING",
    "AMAX_MULTIPLYING",
    "FLT_MAX",
    "GLOBAL",
    "POWER_OF_TWO",
    "RANGE",
    "SMALLEST_MIN_SCALE",
    "STATIC",
    "STATIC_DIVIDING",
    "STATIC_ZERO_POINT",
    "UE8M0",
    "UE8M0_FLOOR",
    "UE8M0_ROUND",
    "DeviceRule",
    "ScaleInputs",
    "ScaleRule",
]
