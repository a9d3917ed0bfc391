"""Schemes: an element code, how many elements share a scale, the rule that makes the scale, and its layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl

from tq.kernels.codes import E4M3, Code, DeviceCode
from tq.kernels.device import divide, exact_reciprocal
from tq.kernels.layouts import COLUMN_MAJOR, PACKED, ROW_MAJOR, TMA_ALIGNED, Layout
from tq.kernels.target import Target

FLT_MAX = torch.finfo(torch.float32).max
# Below this a corrected division could leave the normal range (device.divide).
SMALLEST_MIN_SCALE = 2.0**-80


class ScaleInputs(NamedTuple):
    """What a scale rule reads at run time. scale, scale_ub: fp32 tensors of one element, or None."""

    scale: torch.Tensor | None
    scale_ub: torch.Tensor | None
    min_scale: float


class DeviceRule(NamedTuple):
    """The jit functions of a scale rule, as a kernel takes them."""

    load: Any
    fit: Any
    scaled: Any
    store: Any
    restore: Any


@triton.jit
def store_fp32(scale):
    """A scale stored as it is."""
    return scale


@dataclass(frozen=True, eq=False)
class ScaleRule:
    """How scales are made, applied and stored, as jit functions and as torch.

    load(inputs) -> given: reads `ScaleInputs` first thing in a kernel, so that the latency overlaps that of the rows;
    fit(amax, given, MAX) -> scale, for a tile of amax; scaled(y, scale) -> what is encoded. The `reference_` functions
    are the torch form of the same arithmetic: (amax, ScaleInputs, MAX) -> scale and (y, scale) -> what is encoded.
    store(scale) -> what the scale tensor holds, restore the inverse; fp32 by default.
    """

    load: Any
    fit: Any
    scaled: Any
    reference_fit: Callable[[torch.Tensor, ScaleInputs, float], torch.Tensor]
    reference_scaled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    store: Any = store_fp32
    restore: Any = store_fp32
    reference_store: Callable[[torch.Tensor], torch.Tensor] = lambda scale: scale
    reference_restore: Callable[[torch.Tensor], torch.Tensor] = lambda stored: stored


@triton.jit
def load_static(inputs):
    """The given scale."""
    return (tl.load(inputs.scale),)


@triton.jit
def fit_static(amax, given, MAX: tl.constexpr):
    """The given scale, whatever amax is."""
    return tl.zeros(amax.shape, tl.float32) + given[0]


@triton.jit
def scaled_by_reciprocal(y, scale):
    """y * (1 / scale), the reciprocal rounded to fp32 first."""
    return y * exact_reciprocal(scale)


@triton.jit
def load_amax(inputs):
    """The bounds of amax from above and of the scale from below."""
    limit = 3.4028234663852886e38
    if inputs.scale_ub is not None:
        limit = tl.minimum(tl.load(inputs.scale_ub), limit)
    return limit, inputs.min_scale


@triton.jit
def fit_amax(amax, given, MAX: tl.constexpr):
    """max(min(amax, scale_ub, FLT_MAX) / MAX, min_scale), the division IEEE."""
    return tl.maximum(divide(tl.minimum(amax, given[0]), tl.full(amax.shape, MAX, tl.float32), 1.0 / MAX), given[1])


@triton.jit
def scaled_by_division(y, scale):
    """y / scale, IEEE."""
    return divide(y, scale, exact_reciprocal(scale))


@triton.jit
def fit_power_of_two(amax, given, MAX: tl.constexpr):
    """The smallest power of two that is at least `fit_amax`, from its bits: exact where a logarithm is not."""
    bits = fit_amax(amax, given, MAX).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def scaled_by_power_of_two(y, scale):
    """y / scale, exactly: the exponent of the reciprocal is 254 less the one of the scale."""
    return y * (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def store_ue8m0(scale):
    """The biased exponent of a power of two, one byte."""
    return (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8)


@triton.jit
def restore_ue8m0(stored):
    """2^(byte - 127)"""
    return (stored.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


def reference_fit_static(amax: torch.Tensor, inputs: ScaleInputs, code_max: float) -> torch.Tensor:
    if inputs.scale is None:
        raise ValueError("fit_static: scale must be given, got None")
    return inputs.scale.reshape(1, 1).expand_as(amax)


def reference_fit_amax(amax: torch.Tensor, inputs: ScaleInputs, code_max: float) -> torch.Tensor:
    amax = amax.clamp(max=FLT_MAX)
    if inputs.scale_ub is not None:
        amax = torch.minimum(amax, inputs.scale_ub.reshape(()))
    # A tensor divides; a number would be turned into a multiplication by its reciprocal on a GPU.
    return (amax / torch.full_like(amax, code_max)).clamp(min=inputs.min_scale)


def reference_scaled_by_division(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(y.isinf(), torch.nan, y / scale)


def reference_scaled_by_reciprocal(y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return y * (torch.ones_like(scale) / scale)


def reference_fit_power_of_two(amax: torch.Tensor, inputs: ScaleInputs, code_max: float) -> torch.Tensor:
    mantissa, exponent = torch.frexp(reference_fit_amax(amax, inputs, code_max))
    return torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())


def reference_store_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    return (torch.frexp(scale).exponent + 126).to(torch.uint8)


def reference_restore_ue8m0(stored: torch.Tensor) -> torch.Tensor:
    return torch.ldexp(torch.ones(stored.shape, device=stored.device), stored.int() - 127)


# vLLM's static and group quantizers multiply by the reciprocal of the scale, its per-token quantizer divides; on a tie
# of the code the two differ.
STATIC = ScaleRule(load_static, fit_static, scaled_by_reciprocal, reference_fit_static, reference_scaled_by_reciprocal)
AMAX_DIVIDING = ScaleRule(load_amax, fit_amax, scaled_by_division, reference_fit_amax, reference_scaled_by_division)
AMAX_MULTIPLYING = ScaleRule(
    load_amax, fit_amax, scaled_by_reciprocal, reference_fit_amax, reference_scaled_by_reciprocal
)
POWER_OF_TWO = ScaleRule(
    load_amax, fit_power_of_two, scaled_by_power_of_two, reference_fit_power_of_two, lambda y, scale: y / scale
)
UE8M0 = replace(
    POWER_OF_TWO,
    store=store_ue8m0,
    restore=restore_ue8m0,
    reference_store=reference_store_ue8m0,
    reference_restore=reference_restore_ue8m0,
)


class DeviceScheme(NamedTuple):
    """A scheme as a kernel takes it. GROUP: elements a scale covers; 0 is the whole row, -1 the whole tensor."""

    code: DeviceCode
    rule: DeviceRule
    GROUP: tl.constexpr


@dataclass(frozen=True, eq=False)
class Scheme:
    """One quantization format, by name.

    code: the element code. granularity: what shares a scale: the tensor (static scale, given by the caller), each
    token, or each `group` consecutive elements of a token. rule: amax -> scale -> encoded value. min_scale: least
    dynamic scale where the caller and the replaced op name none. layouts: of the scales, the first is the default.
    """

    name: str
    code: Code
    granularity: Literal["tensor", "token", "group"]
    rule: ScaleRule
    group: int = 0
    min_scale: float = SMALLEST_MIN_SCALE
    layouts: tuple[Layout, ...] = (ROW_MAJOR,)

    def __post_init__(self) -> None:
        if self.granularity not in ("tensor", "token", "group"):
            raise ValueError(
                f"Scheme {self.name}: granularity must be 'tensor', 'token' or 'group', got {self.granularity!r} with "
                f"group={self.group}"
            )
        if not self.min_scale >= SMALLEST_MIN_SCALE:
            raise ValueError(
                f"Scheme {self.name}: min_scale must be at least {SMALLEST_MIN_SCALE}, got {self.min_scale}; a smaller "
                f"one would not divide exactly"
            )
        if (self.granularity == "group") != (self.group > 0) or self.group & (self.group - 1):
            raise ValueError(
                f"Scheme {self.name}: group must be a power of two for granularity 'group' and 0 otherwise, "
                f"got group={self.group} with granularity={self.granularity!r}"
            )

    @property
    def dynamic(self) -> bool:
        """Whether the kernel computes the scale."""
        return self.granularity != "tensor"

    def groups(self, hidden_size: int) -> int:
        """Number of scales of one token."""
        return hidden_size // self.group if self.group else 1

    @lru_cache  # noqa: B019 - schemes live as long as the process
    def device(self, target: Target) -> DeviceScheme:
        """The jit functions and constants that a kernel for `target` takes."""
        group = {"tensor": -1, "token": 0, "group": self.group}[self.granularity]
        rule = DeviceRule(self.rule.load, self.rule.fit, self.rule.scaled, self.rule.store, self.rule.restore)
        return DeviceScheme(self.code.device(target), rule, tl.constexpr(group))

    def reference(self, y: torch.Tensor, inputs: ScaleInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes uint8 [M, N], scales fp32 [M, G]) of fp32 y [M, N], in torch: the arithmetic the kernels must equal.

        amax ignores NaN; a NaN element keeps a NaN code and leaves its neighbours as they are.
        """
        size = self.group or y.shape[-1]
        grouped = y.float().unflatten(-1, (y.shape[-1] // size, size))
        amax = grouped.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(-1)
        scales = self.rule.reference_fit(amax, inputs, self.code.max)
        codes = self.code.reference_encode(self.rule.reference_scaled(grouped, scales.unsqueeze(-1)))
        return codes.flatten(-2), scales


SCHEMES: dict[str, Scheme] = {}


def register_scheme(scheme: Scheme) -> Scheme:
    """Adds a scheme to `SCHEMES`; every producer, check, op, test and benchmark has it from then on.

    Raises ValueError where the name is taken.
    """
    if scheme.name in SCHEMES:
        raise ValueError(f"register_scheme: name must be new, got {scheme.name!r} twice; choose another name")
    SCHEMES[scheme.name] = scheme
    return scheme


def find_scheme(op: str, scheme: str) -> Scheme:
    """The registered scheme of a name. Raises ValueError, naming those there are."""
    found = SCHEMES.get(scheme) if isinstance(scheme, str) else None
    if found is None:
        raise ValueError(f"{op}: scheme must be one of {', '.join(SCHEMES)}; got {scheme!r}")
    return found


# vLLM's least FP8 scale, 1 / (448 * 512), and what its group quantizer's floor of 1e-10 on amax comes to, in fp32.
VLLM_MIN_SCALE = float(torch.tensor(1.0) / (448.0 * 512.0))
VLLM_GROUP_MIN_SCALE = float(torch.tensor(1e-10) / 448.0)

FP8_TENSOR = register_scheme(Scheme("fp8_tensor", E4M3, "tensor", STATIC))
FP8_TOKEN = register_scheme(Scheme("fp8_token", E4M3, "token", AMAX_DIVIDING, min_scale=VLLM_MIN_SCALE))
FP8_GROUP128 = register_scheme(
    Scheme(
        "fp8_group128",
        E4M3,
        "group",
        AMAX_MULTIPLYING,
        group=128,
        min_scale=VLLM_GROUP_MIN_SCALE,
        layouts=(ROW_MAJOR, COLUMN_MAJOR, TMA_ALIGNED),
    )
)
FP8_GROUP64 = register_scheme(replace(FP8_GROUP128, name="fp8_group64", group=64))
# DeepGEMM's scales on Hopper: fp32, rounded up to a power of two. vLLM keeps amax and then the scale above 1e-10.
FP8_GROUP128_POW2 = register_scheme(
    replace(
        FP8_GROUP128,
        name="fp8_group128_pow2",
        rule=POWER_OF_TWO,
        min_scale=float(torch.tensor(1e-10)),
        layouts=(TMA_ALIGNED, COLUMN_MAJOR, ROW_MAJOR),
    )
)
# DeepGEMM's scales on Blackwell: the exponents alone, four to a word.
FP8_GROUP128_UE8M0 = register_scheme(replace(FP8_GROUP128, name="fp8_group128_ue8m0", rule=UE8M0, layouts=(PACKED,)))
