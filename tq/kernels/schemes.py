"""Schemes: an element code, how many elements share a scale, the rule that makes the scale, and its layouts.

What is not ordinary has one answer:

- NaN has no part in a scale and leaves its neighbours as they are. Its code is the format's NaN; of INT8 it is 0 or the
  zero point, of E2M1 the largest value.
- An infinity saturates under a given scale. A dynamic scale takes it for FLT_MAX (half of that with a zero point) or
  for scale_ub; then it is NaN where y is divided by the scale (FP8 per token) and saturates elsewhere. NVFP4's block
  scale saturates at 448, as that of any block beyond the calibrated maximum.
- Zeros have the least scale (`min_scale` of the scheme or the call, 2^-127 of MX, 0 of NVFP4) and codes of 0 with y's
  sign, as far as the code has a -0.
- An amax whose scale would be less, a subnormal one included, has the least scale; y is divided by that.

Given the same y, codes and scales are those of the vLLM op that `quantizer` names, but for

- NaN, which its clamps turn into the largest value, and infinities, which make its dynamic scales infinite;
- a row of zeros in INT8 per token, whose scale is 0 there;
- NVFP4: `_C.scaled_fp4_quant` multiplies by approximate reciprocals (`rcp.approx.ftz`) of 6, of the global scale and
  of each block scale. `nvfp4` uses correctly rounded ones, as vLLM's Python reference does: results that depend on the
  GPU could not be tested. A block scale on a tie of E4M3, or a quotient on a tie of E2M1, may come out one step apart;
- MXFP8, where FlashInfer's kernel treats a subnormal amax in its own way. Its product with 1/448 in place of the
  quotient gives the same exponents.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import triton.language as tl

from tq.kernels.codes import E2M1, E4M3, E4M3FNUZ, E5M2, INT8, Code, DeviceCode
from tq.kernels.layouts import COLUMN_MAJOR, PACKED, ROW_MAJOR, SWIZZLED_8X4, SWIZZLED_128X4, TMA_ALIGNED, Layout
from tq.kernels.rules import (
    AMAX_DIVIDING,
    AMAX_INVERTING,
    AMAX_MULTIPLYING,
    GLOBAL,
    POWER_OF_TWO,
    RANGE,
    SMALLEST_MIN_SCALE,
    STATIC,
    STATIC_DIVIDING,
    STATIC_ZERO_POINT,
    UE8M0,
    UE8M0_FLOOR,
    UE8M0_ROUND,
    DeviceRule,
    ScaleInputs,
    ScaleRule,
)
from tq.kernels.target import Target


class Quantized(NamedTuple):
    """codes: uint8 [M, N / elements a byte]. fitted: fp32 (scales [M, G],) or (scales, zero points)."""

    codes: torch.Tensor
    fitted: tuple[torch.Tensor, ...]


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
    quantizer: the vLLM op that quantizes in the same way and does nothing else.
    """

    name: str
    code: Code
    granularity: Literal["tensor", "token", "group"]
    rule: ScaleRule
    group: int = 0
    min_scale: float = SMALLEST_MIN_SCALE
    layouts: tuple[Layout, ...] = (ROW_MAJOR,)
    quantizer: str = "none"

    def __post_init__(self) -> None:
        if self.granularity not in ("tensor", "token", "group"):
            raise ValueError(
                f"Scheme {self.name}: granularity must be 'tensor', 'token' or 'group', got {self.granularity!r} with "
                f"group={self.group}"
            )
        if not self.min_scale >= self.rule.least_min_scale:
            raise ValueError(
                f"Scheme {self.name}: min_scale must be at least {self.rule.least_min_scale}, got {self.min_scale}; a "
                f"smaller one would not divide exactly"
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
        return DeviceScheme(self.code.device(target), self.rule.device, tl.constexpr(group))

    def reference(self, y: torch.Tensor, inputs: ScaleInputs) -> Quantized:
        """fp32 y [M, N] quantized in torch: the arithmetic the kernels must equal.

        Extremes ignore NaN; a NaN element keeps a NaN code where the code has one (INT8: 0 or the zero point, E2M1:
        +6), and leaves its neighbours as they are."""
        y = y.float()
        if inputs.smooth_scale is not None:
            y = y * inputs.smooth_scale.float()
        size = self.group or y.shape[-1]
        grouped = y.unflatten(-1, (y.shape[-1] // size, size))
        maxima = self.rule.reference_peaks(grouped)
        fitted = self.rule.reference_fit(maxima, inputs, self.code)
        scaled = self.rule.reference_scaled(
            grouped, *(tuple(t.unsqueeze(-1) for t in each) for each in (fitted, maxima)), inputs, self.code
        )
        return Quantized(self.code.reference_encode(scaled).flatten(-2), fitted)

    def reference_values(
        self, codes: torch.Tensor, fitted: tuple[torch.Tensor, ...], inputs: ScaleInputs
    ) -> torch.Tensor:
        """What codes [M, bytes] and `fitted` [M, G] stand for, fp32 [M, N], smooth_scale not undone."""
        decoded = self.code.reference_decode(codes)
        decoded = decoded.unflatten(-1, (-1, self.group or max(decoded.shape[-1], 1)))
        return self.rule.reference_value(decoded, tuple(t.unsqueeze(-1) for t in fitted), inputs).flatten(-2)


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


def vllm_min_scale(code: Code) -> float:
    """vLLM's least FP8 scale, 1 / (MAX * 512), in fp32."""
    return float(np.float32(1.0) / np.float32(code.max * 512.0))


# What the floor of 1e-10 on amax of vLLM's group quantizers comes to, in fp32.
VLLM_GROUP_MIN_SCALE = float(np.float32(1e-10) / np.float32(448.0))
VLLM_INT8_GROUP_MIN_SCALE = float(np.float32(1e-10) / np.float32(127.0))

FP8_TENSOR = register_scheme(Scheme("fp8_tensor", E4M3, "tensor", STATIC, quantizer="_C.static_scaled_fp8_quant"))
FP8_TOKEN = register_scheme(
    Scheme(
        "fp8_token",
        E4M3,
        "token",
        AMAX_DIVIDING,
        min_scale=vllm_min_scale(E4M3),
        quantizer="_C.dynamic_per_token_scaled_fp8_quant",
    )
)
FP8_GROUP128 = register_scheme(
    Scheme(
        "fp8_group128",
        E4M3,
        "group",
        AMAX_MULTIPLYING,
        group=128,
        min_scale=VLLM_GROUP_MIN_SCALE,
        layouts=(ROW_MAJOR, COLUMN_MAJOR, TMA_ALIGNED),
        quantizer="_C.per_token_group_fp8_quant",
    )
)
FP8_GROUP64 = register_scheme(replace(FP8_GROUP128, name="fp8_group64", group=64))
# DeepGEMM's scales on Hopper: fp32, rounded up to a power of two. vLLM keeps amax and then the scale above 1e-10.
FP8_GROUP128_POW2 = register_scheme(
    replace(
        FP8_GROUP128,
        name="fp8_group128_pow2",
        rule=POWER_OF_TWO,
        min_scale=float(np.float32(1e-10)),
        layouts=(TMA_ALIGNED, COLUMN_MAJOR, ROW_MAJOR),
    )
)
# DeepGEMM's scales on Blackwell: the exponents alone, four to a word.
FP8_GROUP128_UE8M0 = register_scheme(
    replace(
        FP8_GROUP128,
        name="fp8_group128_ue8m0",
        rule=UE8M0,
        layouts=(PACKED,),
        quantizer="_C.per_token_group_fp8_quant_packed",
    )
)

# No vLLM op writes E5M2; those above write E4M3FNUZ where the GPU wants it.
for kind, other, known in (("e5m2", E5M2, False), ("fnuz", E4M3FNUZ, True)):
    for scheme, granularity in ((FP8_TENSOR, "tensor"), (FP8_TOKEN, "token"), (FP8_GROUP128, "group128")):
        least = vllm_min_scale(other) if scheme is FP8_TOKEN else scheme.min_scale
        quantizer = scheme.quantizer if known else "none"
        name = f"fp8_{kind}_{granularity}"
        register_scheme(replace(scheme, name=name, code=other, min_scale=least, quantizer=quantizer))

INT8_TENSOR = register_scheme(
    Scheme("int8_tensor", INT8, "tensor", STATIC_DIVIDING, quantizer="_C.static_scaled_int8_quant")
)
INT8_TENSOR_AZP = register_scheme(replace(INT8_TENSOR, name="int8_tensor_azp", rule=STATIC_ZERO_POINT))
INT8_TOKEN = register_scheme(
    Scheme("int8_token", INT8, "token", AMAX_INVERTING, quantizer="_C.dynamic_scaled_int8_quant")
)
INT8_TOKEN_AZP = register_scheme(replace(INT8_TOKEN, name="int8_token_azp", rule=RANGE))
# vLLM's per_token_group_quant_int8 differs from this in half of its codes (perf/notes.md), so it stands for none.
INT8_GROUP128 = register_scheme(
    replace(
        FP8_GROUP128,
        name="int8_group128",
        code=INT8,
        min_scale=VLLM_INT8_GROUP_MIN_SCALE,
        quantizer="none",
    )
)

# OCP microscaling. The scale is the power of two that amax / MAX is rounded up to (cuBLAS, FlashInfer, vLLM's MXFP8),
# that amax has after rounding to the code's mantissa (vLLM's MXFP4), or that amax has (the OCP specification).
MX_LAYOUTS = (SWIZZLED_128X4, ROW_MAJOR, SWIZZLED_8X4)
MXFP8 = register_scheme(
    Scheme(
        "mxfp8",
        E4M3,
        "group",
        UE8M0,
        group=32,
        min_scale=0.0,
        layouts=MX_LAYOUTS,
        quantizer="flashinfer.mxfp8_quantize",
    )
)
MXFP8_ROUND = register_scheme(replace(MXFP8, name="mxfp8_round", rule=UE8M0_ROUND, quantizer="none"))
MXFP8_FLOOR = register_scheme(replace(MXFP8, name="mxfp8_floor", rule=UE8M0_FLOOR, quantizer="none"))
MXFP8_E5M2 = register_scheme(replace(MXFP8, name="mxfp8_e5m2", code=E5M2, quantizer="none"))
MXFP4 = register_scheme(replace(MXFP8, name="mxfp4", code=E2M1, rule=UE8M0_ROUND, quantizer="_C.scaled_mxfp4_quant"))
MXFP4_CEIL = register_scheme(replace(MXFP4, name="mxfp4_ceil", rule=UE8M0, quantizer="none"))
MXFP4_FLOOR = register_scheme(replace(MXFP4, name="mxfp4_floor", rule=UE8M0_FLOOR, quantizer="none"))
NVFP4 = register_scheme(
    Scheme("nvfp4", E2M1, "group", GLOBAL, group=16, min_scale=0.0, layouts=MX_LAYOUTS, quantizer="_C.scaled_fp4_quant")
)
