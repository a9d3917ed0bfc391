"""What the machine that runs a kernel can do, found out once."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from packaging.version import Version

# Triton decides at decoration time whether a function is interpreted, so this is a constant of the process.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes"))


class Target(NamedTuple):
    """name: "sm_90", "gfx942", "interpreter"; native_codes: names of codes whose conversion from fp32 by the hardware
    equals the integer encoder; overlaps: whether a kernel may be launched before the one ahead of it has ended, and
    wait for it by itself (programmatic dependent launch)."""

    name: str
    native_codes: frozenset[str] = frozenset()
    overlaps: bool = False

    def warps(self, of_32: int) -> int:
        """How many warps have as many lanes as `of_32` of 32: CDNA's have 64."""
        return max(of_32 // 2, 1) if self.name.startswith("gfx9") else of_32


def cuda_target(major: int, minor: int, triton_version: str = triton.__version__) -> Target:
    """Facts of an NVIDIA GPU of compute capability `major.minor`.

    sm_90 and newer convert with `cvt.rn.satfinite.{e4m3,e5m2}x2.f32`: nearest-even, saturating, NaN to 0x7F. On sm_89,
    Triton before 3.9 goes through fp16 first and rounds twice (triton-lang/triton#11753). Older GPUs have no
    conversion at all. sm_100 and newer have one for E2M1. Programmatic dependent launch came with sm_90.
    """
    capability = (major, minor)
    native: frozenset[str] = frozenset()
    if capability >= (9, 0) or (capability == (8, 9) and Version(triton_version) >= Version("3.9")):
        native = frozenset(("e4m3", "e5m2"))
    native |= {"e2m1"} if capability >= (10, 0) else set()
    return Target(f"sm_{major}{minor}", native, capability >= (9, 0))


@lru_cache
def target_of(device: torch.device) -> Target:
    """Facts of the GPU behind `device`; of the interpreter for a CPU device."""
    if device.type != "cuda":
        return Target("interpreter")
    if torch.version.hip is not None:
        return Target(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
    return cuda_target(*torch.cuda.get_device_capability(device))
