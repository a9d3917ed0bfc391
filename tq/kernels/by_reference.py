"""A call by torch alone: the reference of the producer and that of the scheme, put where the kernel would write."""

from __future__ import annotations

import torch

from tq.kernels.plan import Prepared
from tq.kernels.rules import ScaleInputs


def run_reference(prepared: Prepared) -> None:
    """The outputs by torch alone."""
    plan = prepared.plan
    options = {k: v for k, v in prepared.options.items() if k not in plan.producer.mutates}
    made = plan.producer.reference(*prepared.arguments, **options, precision=torch.float32)
    exists = prepared.experts.exist(plan.rows)
    if exists is None:
        exists = torch.ones(plan.rows, dtype=torch.bool, device=plan.device)
    codes, fitted = plan.scheme.reference(made.y, of_each_row(prepared))
    codes = torch.nn.functional.pad(codes, (0, plan.codes_shape[-1] - codes.shape[-1]))
    put(prepared.codes, codes, exists)
    if prepared.scales is not None:
        stored = plan.scheme.rule.reference_store(fitted[0])
        if plan.with_offsets:
            placed = stored.new_zeros(plan.scale_rows, stored.shape[-1])
            placed[prepared.experts.scale_rows(plan.rows)[exists]] = stored[exists]
            plan.layout.pack(placed, prepared.scales)
        elif not plan.parts:
            plan.layout.pack(stored, prepared.scales)
        else:
            groups = plan.layout.padded_groups(stored.shape[-1])
            padded = torch.nn.functional.pad(stored, (0, groups - stored.shape[-1]))
            used = exists.unsqueeze(-1).expand_as(padded).to(padded.dtype)
            each = (tensor.unflatten(0, (plan.parts, plan.tokens)) for tensor in (padded, used))
            for scales, *of_expert in zip(prepared.scales, *each, strict=True):
                size = plan.tokens, stored.shape[-1], scales.dtype, scales.device
                packed, written = (plan.layout.allocate(*size) for _ in of_expert)
                for tensor, out in zip(of_expert, (packed, written), strict=True):
                    plan.layout.pack(tensor, out)
                scales.copy_(torch.where(written != 0, packed, scales))
    if prepared.zero_points is not None:
        put(prepared.zero_points, fitted[1].int(), exists)
    for side, value in zip(prepared.bound.side_outputs, made.side_outputs, strict=True):
        put(side, value, exists)
    if prepared.unquantized is not None:
        put(prepared.unquantized, made.y, exists)


def of_each_row(prepared: Prepared) -> ScaleInputs:
    """The inputs with the given numbers of each row's expert, where experts have their own."""
    inputs = prepared.inputs
    if not prepared.plan.per_expert.value:
        return inputs
    expert = prepared.experts.of_rows(prepared.plan.rows)
    given = {name: getattr(inputs, name).reshape(-1)[expert] for name in prepared.plan.scheme.rule.needs}
    return inputs._replace(**given)


def put(out: torch.Tensor, value: torch.Tensor, exists: torch.Tensor) -> None:
    """out = value in the rows that exist."""
    rows = exists.view(*out.shape[:-1], 1)
    out.copy_(torch.where(rows, value.to(out.dtype).view(out.shape), out))
