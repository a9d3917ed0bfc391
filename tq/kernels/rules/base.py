"""What a scale rule is: from the extremes of what shares a scale to the scale, and from y to what is encoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.kernels.codes import Code
from tq.kernels.device import magnitude

FLT_MAX = torch.finfo(torch.float32).max
# Below this a corrected division could leave the normal range (device.divide).
SMALLEST_MIN_SCALE = 2.0**-80


class ScaleInputs(NamedTuple):
    """What the caller gives, as tensors or None. scale, scale_ub, global_scale_inv: fp32, one element; zero_point:
    int32, one element; smooth_scale: [N]. PER_EXPERT: scale, zero_point and global_scale_inv have one for each."""

    scale: torch.Tensor | None = None
    scale_ub: torch.Tensor | None = None
    zero_point: torch.Tensor | None = None
    smooth_scale: torch.Tensor | None = None
    global_scale_inv: torch.Tensor | None = None
    min_scale: float = 0.0
    PER_EXPERT: tl.constexpr = tl.constexpr(False)


class DeviceRule(NamedTuple):
    """The jit functions of a scale rule, as a kernel takes them."""

    load: Any
    peaks: tuple
    fit: Any
    scaled: Any
    value: Any
    store: Any
    restore: Any


@triton.jit
def load_given(pointer, inputs, expert):
    """The one number there, or that of the expert: a scalar, or [BLOCK_M, 1, 1]."""
    if inputs.PER_EXPERT:
        value = tl.load(pointer + expert)
    else:
        value = tl.load(pointer)
    return value


@triton.jit
def store_fp32(scale):
    """A scale stored as it is."""
    return scale


@triton.jit
def value_symmetric(decoded, fitted, given):
    """decoded * scale"""
    return decoded * fitted[0]


def reference_amax(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """amax over the last axis; NaN does not count."""
    return (y.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1),)


@dataclass(frozen=True, eq=False)
class ScaleRule:
    """How scales are made, applied and stored. `fitted` is (scale,), or (scale, zero point) in fp32.

    load(inputs, expert) -> given: reads `ScaleInputs` first thing in a kernel, so that its latency overlaps the rows'.
    peaks: functions of a tile whose maximum over what shares a scale is wanted; none for a given scale.
    fit(maxima, given, code) -> fitted. scaled(y, fitted, maxima, given, code) -> what is encoded.
    value(decoded, fitted, given) -> what the codes stand for.
    store(scale) -> what the scale tensor holds, of dtype `stored`; restore, its inverse.
    zero_point: whether there is one. needs, takes: names in `ScaleInputs` that must and that may be given.
    least_min_scale: what `min_scale` of a call may be at least.
    The `reference_` functions are the torch form of the same arithmetic, with `ScaleInputs` and `Code` for given and
    code.
    """

    load: Any
    fit: Any
    scaled: Any
    reference_fit: Callable[[tuple[torch.Tensor, ...], ScaleInputs, Code], tuple[torch.Tensor, ...]]
    reference_scaled: Callable[..., torch.Tensor]
    peaks: tuple = (magnitude,)
    reference_peaks: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = reference_amax
    value: Any = value_symmetric
    reference_value: Callable[..., torch.Tensor] = lambda decoded, fitted, inputs: decoded * fitted[0]
    store: Any = store_fp32
    restore: Any = store_fp32
    reference_store: Callable[[torch.Tensor], torch.Tensor] = lambda scale: scale
    reference_restore: Callable[[torch.Tensor], torch.Tensor] = lambda stored: stored
    stored: torch.dtype = torch.float32
    zero_point: bool = False
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ("scale_ub",)
    least_min_scale: float = SMALLEST_MIN_SCALE

    @property
    def device(self) -> DeviceRule:
        """What a kernel takes."""
        return DeviceRule(self.load, self.peaks, self.fit, self.scaled, self.value, self.store, self.restore)
