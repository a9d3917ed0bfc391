"""The dequantization check: the second template over the same producer and scheme."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from triton import next_power_of_2

from tq.activation import QuantizedActivation
from tq.kernels import tuning
from tq.kernels.cut import cut, tiling_of
from tq.kernels.inputs import check_numbers
from tq.kernels.launch import check_device, compile_options, run, scale_strides
from tq.kernels.plan import Prepared, prepare
from tq.kernels.producer import PRODUCERS, Producer
from tq.kernels.rows import Tiling
from tq.kernels.rows_check import REPORT, check_rows_kernel
from tq.kernels.target import INTERPRETED, Target

# A check encodes by integers, whatever the call did: its own arithmetic, and none of the hardware's conversions, of
# which ptxas 12.8 and 12.9 compare codes before they are made (see perf/notes.md).
BY_INTEGERS = Target("any")


@dataclass(frozen=True)
class CheckReport:
    """What a check found, one row per token in `rows` (fp32 [M, len(REPORT)]); the properties are over all tokens.

    A finite y rounded once gives worst_ulps <= 0.5, up to the rounding of the division.
    """

    rows: torch.Tensor

    def column(self, name: str) -> torch.Tensor:
        """One number per token: "worst_ulps", "wrong_codes", "wrong_scales", "nonfinite_scales", "saturated", "signal",
        "noise"."""
        return self.rows[:, REPORT.index(name)]

    def _total(self, name: str) -> int:
        return int(self.column(name).double().sum())

    @property
    def worst_ulps(self) -> float:
        """Largest |decode(code) * scale - y| in units of the code's spacing there, over elements in the code's
        range."""
        return float(self.column("worst_ulps").max()) if len(self.rows) else 0.0

    @property
    def wrong_codes(self) -> int:
        """Codes other than the code of y at the stored scale."""
        return self._total("wrong_codes")

    @property
    def wrong_scales(self) -> int:
        """Scales other than the one fitted to y."""
        return self._total("wrong_scales")

    @property
    def nonfinite_scales(self) -> int:
        """Scales that are NaN or infinite."""
        return self._total("nonfinite_scales")

    @property
    def saturated(self) -> int:
        """Elements more than half a spacing beyond the largest code value."""
        return self._total("saturated")

    @property
    def snr_db(self) -> float:
        """10 log10(sum y^2 / sum error^2)."""
        signal, noise = (float(self.column(name).double().sum()) for name in ("signal", "noise"))
        return math.inf if noise == 0.0 else 10.0 * math.log10(max(signal / noise, 1e-300))

    @property
    def ok(self) -> bool:
        """No wrong code, no wrong and no non-finite scale."""
        return not (self.wrong_codes or self.wrong_scales or self.nonfinite_scales)


def check(
    producer: str | Producer,
    *arguments: Any,
    scheme: str,
    activation: QuantizedActivation | None = None,
    **options: Any,
) -> CheckReport:
    """Compares decode(data) * scale with what the producer makes of `arguments`, recomputed on the device.

    activation: what an earlier call with the same arguments returned; None runs the producer first. Arguments, options
    and errors are those of the producer; give the residual as it was before a call that wrote it in place. The result
    is deterministic, per token, and allocates one row of numbers for each.
    """
    if isinstance(producer, str):
        if producer not in PRODUCERS:
            raise ValueError(f"check: producer must be one of {', '.join(PRODUCERS)}; got {producer!r}")
        producer = PRODUCERS[producer]
    for name in producer.mutates:
        if options.get(name) is not None:
            raise ValueError(f"check: {name} must be None, got a tensor; the check changes nothing of yours")
    prepared = prepare(producer, arguments, scheme, options)
    plan = prepared.plan
    check_device("check", plan.device)
    report = torch.zeros(plan.rows, len(REPORT), dtype=torch.float32, device=plan.device)
    if activation is None:
        run(prepared)
        codes, scales, zero_points = prepared.codes, prepared.scales, prepared.zero_points
    else:
        codes, scales, zero_points = check_activation(activation, prepared)
    if scales is None:
        scales = prepared.inputs.scale
    if plan.rows:
        tiling, config = cut_for_check(prepared)
        blocks = -(-plan.scale_rows // tiling.BLOCK_M.value) * max(plan.parts, 1)
        check_rows_kernel[(blocks,)](
            codes,
            scales,
            *scale_strides(plan, scales),
            zero_points,
            report,
            plan.tokens,
            plan.scale_rows,
            *prepared.experts,
            producer.device,
            prepared.bound.args,
            plan.scheme.device(BY_INTEGERS),
            plan.layout.device(plan.scheme.groups(plan.hidden_size)),
            prepared.inputs,
            tiling,
            **compile_options(plan.device, config),
        )
    return CheckReport(report)


def cut_for_check(prepared: Prepared) -> tuple[Tiling, tuning.RowConfig]:
    """How a check is cut: as the call where sums are made, which must be added in its order and register layout;
    elsewhere one tile for the row, which compiles in half the time."""
    plan = prepared.plan
    if plan.producer.moments or INTERPRETED.value or tuning.forced() is not None:
        return cut(prepared, whole_row=True)
    block_n = max(next_power_of_2(plan.data_width), plan.scheme.group)
    config = tuning.RowConfig(1, block_n, 1, min(max(block_n // 512, 1), 16))
    experts = plan.experts if plan.with_offsets else 0
    return tiling_of(plan.hidden_size, plan.data_width, config, 0, experts), config


def check_activation(
    activation: QuantizedActivation, prepared: Prepared
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scales and zero points of `activation`, which must fit what a call would have made."""
    scheme, codes, scales = prepared.plan.scheme, prepared.codes, prepared.scales
    if activation.scheme != scheme.name:
        raise ValueError(f"check: activation must be of scheme {scheme.name}, got {activation.scheme}")
    if activation.data.shape != codes.shape or not activation.data.is_contiguous():
        raise ValueError(
            f"check: data must be contiguous of shape {tuple(codes.shape)}, got {tuple(activation.data.shape)}"
        )
    found = activation.scale
    if scales is None:
        given = prepared.inputs.scale
        count = 1 if given is None else given.numel()
        check_numbers("check", "scale of the activation", found, codes.device, torch.float32, count)
    elif found.shape != scales.shape:
        raise ValueError(f"check: scale must have shape {tuple(scales.shape)}, got {tuple(found.shape)}")
    elif found.dtype != scales.dtype:
        found = found.view(scales.dtype)
    return activation.data.view(torch.uint8), found, activation.zero_point
