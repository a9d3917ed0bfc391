"""Bits of the state kernels on this machine's GPU that have one right answer."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

import tq.state
from perf.state_cases import FORMS, HEADS, SIZE
from tq.state.formats import restore_by_division


@triton.jit
def restore_kernel(differ, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Quotients of a code by BLOCK scales of exponent FIRST that are not the IEEE division's."""
    scale = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + (FIRST << 23)).to(tl.float32, bitcast=True)
    value = tl.full([BLOCK], 1.0, tl.float32) * (tl.program_id(1) + 1).to(tl.float32)
    tl.atomic_add(differ, tl.sum((restore_by_division(value, scale, value) != tl.div_rn(value, scale)).to(tl.int64)))


def check_arithmetic() -> list[dict[str, Any]]:
    """INT8's division for every code and mantissa, from the scale of FLT_MAX to the one of 2^-24; then replays."""
    differ, block = torch.zeros(1, dtype=torch.int64, device="cuda"), 2048
    exponents = (5, 6, 64, 127, 157)  # biased; 127 / FLT_MAX is in the first, 127 / 2^-24 in the last
    for exponent in exponents:
        restore_kernel[((1 << 23) // block, 127)](differ, exponent, block)
    made = 127 * (1 << 23) * len(exponents)
    return [
        {"check": "INT8 codes divided by scales, all mantissas at 5 exponents", "made": made, "differ": int(differ)}
    ]


def check_replay() -> list[dict[str, Any]]:
    """A captured call replayed with other slots, padding among them: equal to a call that is not captured?"""
    rows = []
    for code, granularity in FORMS:
        options = {"code": code, "granularity": granularity}
        state = torch.randn(40, HEADS, SIZE, SIZE, device="cuda")
        slots = torch.arange(1, 9, device="cuda", dtype=torch.int32)
        tq.state.qdq_(state, slots, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tq.state.qdq_(state, slots, **options)
        slots.copy_(torch.tensor([17, -1, 0, 30, 17, 39, 40, 9]))
        state.normal_()
        want = state.clone()
        graph.replay()
        tq.state.qdq_(want, torch.tensor([9, 17, 30, 39], device="cuda"), **options)
        made, differ = state.numel(), int((state.view(torch.int32) != want.view(torch.int32)).sum())
        rows.append({"check": f"replay with other slots, {code} {granularity}", "made": made, "differ": differ})
        wrong = tq.state.check(state, slots, quantized=state, **options).column("nonfinite").sum()
        rows.append({"check": f"check of a rounded state, {code} {granularity}", "made": 1, "differ": int(wrong != 0)})
    return rows
