"""What a peer is, and what one is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tq.kernels.plan import Prepared
from tq.kernels.rules import ScaleInputs


class Peer(NamedTuple):
    """call: does the work once. outputs: what it wrote, as (codes uint8 [M, N], scales or None, residual or None)."""

    call: Callable[[], Any]
    outputs: Callable[[], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


class Job(NamedTuple):
    """What ops of others are called with: x, the other arguments and the residual of the producer, and the outputs,
    allocated beforehand. scales: None where they are given. The residual is a copy, in which ops work in place."""

    x: torch.Tensor
    rest: list[Any]
    residual: torch.Tensor | None
    out: torch.Tensor
    scales: torch.Tensor | None
    zero_points: torch.Tensor | None
    inputs: ScaleInputs
    group: int

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """As those of a `Peer`."""
        return self.out.view(torch.uint8), self.scales, self.residual


def job_of(prepared: Prepared) -> Job:
    """The call with outputs of its own."""
    plan = prepared.plan
    out = torch.empty(plan.shape, dtype=plan.scheme.code.torch_dtype, device=plan.device)
    scales = prepared.scales
    if scales is not None:
        scales = torch.empty_strided(scales.shape, scales.stride(), dtype=scales.dtype, device=plan.device)
    zero_points = None if prepared.zero_points is None else torch.empty_like(prepared.zero_points)
    residual = prepared.options.get("residual")
    residual = None if residual is None else residual.clone()
    x, *rest = prepared.arguments
    return Job(x, rest, residual, out, scales, zero_points, prepared.inputs, plan.scheme.group)
