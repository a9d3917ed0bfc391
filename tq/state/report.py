"""The error of a rounded state, per request and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tq.kernels.device import round_to
from tq.state.bind import bind_format, bind_slots, bind_states, check_shape, run
from tq.state.cache import NOWHERE, as_block, as_groups, begin, elements_of, find_head
from tq.state.formats import fit, round_groups
from tq.state.qdq import check_code

REPORT = ("worst_ulps", "wrong", "nonfinite", "signal", "noise")


@triton.jit
def total(tile):
    """The sum of a tile."""
    return tl.sum(tl.sum(tile.to(tl.float32), 1), 0)


@triton.jit
def check_kernel(state, quantized, report, format, cut):
    """One row of `report` (fp32 [B, heads, len(REPORT)]) by one program, zeros for a request without a state."""
    request, head, part = begin(cut)
    read, present = find_head(state, request, head, cut)
    at, inside = elements_of(part, present, cut)
    dtype: tl.constexpr = state.data.dtype.element_ty
    before = tl.load(read + at, mask=inside, other=0.0).to(tl.float32)
    groups = as_groups(before, cut)
    scale, back = fit(groups, format)
    right = round_to(as_block(round_groups(groups, scale, back, format), cut), dtype)
    after = right
    if quantized.data is not None:
        other, _ = find_head(quantized, request, head, cut)
        after = tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    differs = after.to(tl.uint32, bitcast=True) != right.to(tl.uint32, bitcast=True)
    wrong = total(inside & differs & ((after == after) | (right == right)))
    error = tl.abs(after - before)
    known = inside & (error < float("inf"))
    ulps = as_groups(tl.where(known, error, 0.0), cut) * scale / format.code.spacing(groups * scale)
    worst = tl.max(tl.max(as_block(ulps, cut), 1), 0)
    signal = total(tl.where(known, before * before, 0.0))
    noise = total(tl.where(known, error * error, 0.0))
    nonfinite = total(inside & (known == 0))
    place = report + (request * cut.HEADS + head) * 5
    tl.store(place, worst)
    tl.store(place + 1, wrong)
    tl.store(place + 2, nonfinite)
    tl.store(place + 3, signal)
    tl.store(place + 4, noise)


@dataclass(frozen=True)
class StateReport:
    """What a check found: `rows` fp32 [B, heads, len(REPORT)]; a request without a state has zeros."""

    rows: torch.Tensor

    def column(self, name: str) -> torch.Tensor:
        """[B, heads] of "worst_ulps" (largest error in units of the code's spacing there), "wrong" (elements other than
        the rounded state's), "nonfinite" (elements whose error is no number), "signal" and "noise" (sums of squares of
        the state and of its error)."""
        return self.rows[..., REPORT.index(name)]

    @property
    def snr_db(self) -> torch.Tensor:
        """10 log10(signal / noise), [B, heads]; infinite where nothing was lost."""
        ratio = self.column("signal").double() / self.column("noise").double()
        return torch.where(self.column("noise") == 0.0, torch.inf, 10.0 * torch.log10(ratio))

    @property
    def worst_ulps(self) -> float:
        """Over all requests and heads; a state rounded once, in fp32, has at most 0.5."""
        return float(self.column("worst_ulps").max()) if self.rows.numel() else 0.0

    @property
    def ok(self) -> bool:
        """Every element is the rounded state's, and a number."""
        return not bool(self.column("wrong").any() or self.column("nonfinite").any())


def check(
    state: torch.Tensor,
    slots: torch.Tensor,
    *,
    quantized: torch.Tensor | None = None,
    code: str = "int8",
    granularity: str = "head",
    layout: str = "value_first",
    null_slot: int | None = 0,
    has_initial_state: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
) -> StateReport:
    """error = qdq(state[slots]) - state[slots], per request and head, recomputed on the device; changes nothing.

    quantized: the cache after an earlier `qdq_` of what `state` holds, of the same shape, dtype and slots; its error is
    reported and its elements are compared bit for bit (any NaN is like any other). None: what `qdq_` would write.
    Arguments, formats and errors are those of `qdq_`. Deterministic; allocates a row of numbers for each head.
    """
    op = "state.check"
    check_code(op, code)
    place = bind_states(op, "state", state)
    cache = bind_slots(op, place, slots, null_slot, has_initial_state, num_accepted_tokens)
    launch = bind_format(op, cache, code, granularity, layout, whole=True)
    after = NOWHERE
    if quantized is not None:
        after = bind_states(op, "quantized", quantized, state.device)
        check_shape(op, "quantized", quantized, tuple(state.shape))
        if quantized.dtype != state.dtype:
            raise TypeError(f"{op}: quantized must be {state.dtype} as the state is, got {quantized.dtype}")
        after = after._replace(slots=cache.slots)
    report = torch.empty(slots.shape[0], state.shape[1], len(REPORT), dtype=torch.float32, device=state.device)
    run(check_kernel, slots.shape[0], launch, state.device, cache, after, report)
    return StateReport(report)
