"""The second template over [M, N]: what was written, beside what the producer makes."""

from __future__ import annotations

import triton
import triton.language as tl

from tq.kernels.rows import (
    code_places,
    columns_of,
    grouped,
    inside,
    maxima_of,
    produce,
    row_maxima,
    rows_of,
    scale_places,
    smooth,
)
from tq.kernels.rules.base import load_given

# Columns of the report of check_rows_kernel.
REPORT = ("worst_ulps", "wrong_codes", "wrong_scales", "nonfinite_scales", "saturated", "signal", "noise")


@triton.jit
def total(values):
    """Sum per row of [BLOCK_M, groups, group size], fp32 [BLOCK_M, 1]."""
    return tl.sum(tl.sum(values.to(tl.float32), 2), 1, keep_dims=True)


@triton.jit(do_not_specialize=["scale_row_stride", "scale_group_stride", "scale_expert_stride", "M", "padded_M"])
def check_rows_kernel(
    codes,
    scales,
    scale_row_stride,
    scale_group_stride,
    scale_expert_stride,
    zero_points,
    report,
    M,
    padded_M,
    tokens_per_expert,
    expert_offsets,
    scale_offsets,
    producer,
    args,
    scheme,
    layout,
    inputs,
    tiling,
):
    """compare(value(decode(codes), scales), produce(args)): one row of `report` (fp32 [rows, len(REPORT)]) per token.

    A code is wrong where it is not the one of y at the stored scale; a scale, where it or its zero point is not the one
    fitted to y. The worst error is over elements inside the code's range, half a spacing beyond its largest value
    included, in units of the code's spacing there; the others are saturated. A scale of 0 has no such unit. Each token
    is summed by one program in a fixed order, so two runs agree bit for bit. Needs PROGRAMS = 1."""
    row, token, exists, part, expert = rows_of(M, padded_M, tokens_per_expert, expert_offsets, scale_offsets, tiling)
    given = scheme.rule.load(inputs, expert)
    place = (scales, scale_row_stride, scale_group_stride, scale_expert_stride)
    y_tiles = smooth(produce(producer, args, row, exists, tiling), inputs, tiling)
    shared = row_maxima(y_tiles, scheme, tiling)
    none = tl.zeros([tiling.BLOCK_M, 1], tl.float32)
    worst, wrong_codes, wrong_scales, nonfinite, saturated, signal, noise = none, none, none, none, none, none, none
    for t in tl.static_range(tiling.TILES):
        col = columns_of(t, tiling)
        place_codes, byte_mask = code_places(codes, row, exists, t, scheme, tiling)
        stored_codes = grouped(tl.load(place_codes, mask=byte_mask, other=0), scheme, tiling)
        byte_mask = grouped(byte_mask.broadcast_to(place_codes.shape), scheme, tiling)
        mask = (exists & inside(t, col, tiling)).broadcast_to(tiling.BLOCK_M, tiling.BLOCK_N)
        mask = grouped(mask, scheme, tiling)
        y = grouped(y_tiles[t], scheme, tiling)
        maxima = maxima_of(y, shared, scheme)
        fitted = scheme.rule.fit(maxima, given, scheme.code)
        if scheme.GROUP < 0:
            there = exists[:, :, None]
            stored = (tl.zeros([tiling.BLOCK_M, 1, 1], tl.float32) + load_given(scales, inputs, expert),)
            if len(fitted) > 1:
                stored = stored + (fitted[1],)
        else:
            address, there = scale_places(place, token, part, t, scheme, layout, tiling)
            there = there & exists[:, :, None]
            stored = (tl.where(there, scheme.rule.restore(tl.load(address, mask=there, other=0)), 1.0),)
            if len(fitted) > 1:
                stored = stored + (tl.load(zero_points + row[:, :, None], mask=there, other=0).to(tl.float32),)
        if scheme.GROUP > 0 or t == 0:
            differs = stored[0] != fitted[0]
            if len(fitted) > 1:
                differs = differs | (stored[1] != fitted[1])
            wrong_scales += total(there & differs)
            nonfinite += total(there & ((stored[0] != stored[0]) | (tl.abs(stored[0]) == float("inf"))))
        quotient = scheme.rule.scaled(y, stored, maxima, given, scheme.code)
        right = scheme.code.encode(quotient)
        if len(fitted) > 1:
            right = tl.where(mask, right, 0)
        wrong_codes += total(byte_mask & (stored_codes != right))
        spacing = scheme.code.spacing(quotient)
        nearest = scheme.code.decode(right)
        beyond = tl.abs(quotient - nearest) > 0.5 * scheme.code.spacing(nearest)
        saturated += total(mask & beyond)
        error = tl.abs(scheme.rule.value(scheme.code.decode(stored_codes), stored, given) - y)
        known = mask & (error == error)
        signal += total(tl.where(known, y * y, 0.0))
        noise += total(tl.where(known, error * error, 0.0))
        unit = spacing * scheme.rule.value(tl.full(stored[0].shape, 1.0, tl.float32), (stored[0], 0.0), given)
        ulps = tl.where(known & (beyond == 0) & (unit > 0.0), error / unit, 0.0)
        worst = tl.maximum(worst, tl.max(tl.max(ulps, 2), 1, keep_dims=True))
    column = tl.arange(0, 8)[None, :]
    numbers = tl.zeros([tiling.BLOCK_M, 8], tl.float32)
    found = (worst, wrong_codes, wrong_scales, nonfinite, saturated, signal, noise)
    for i in tl.static_range(7):
        numbers = tl.where(column == i, found[i], numbers)
    tl.store(report + (row * 7 + column), numbers, mask=exists & (column < 7))
