"""The template kernels over [M, N]: where a producer meets a scheme. There are no others.

A program owns BLOCK_M rows and TILES tiles of BLOCK_N columns, all kept in registers: a row whose length is no power of
two wastes at most part of its last tile, and a producer that reduces its row reads it once. The tiles of a row are a
tuple, unrolled; inside a tile, elements that share a scale are the last axis of [BLOCK_M, groups, group size].
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tq.kernels.device import magnitude


class Tiling(NamedTuple):
    """How [M, N] is cut: a program has TILES tiles, PROGRAMS programs share a row. Consecutive programs are neighbours
    in memory; with PROGRAMS = 1 a program sees its rows entirely. MEAN_GROUP: see `Bound`; it divides BLOCK_N."""

    N: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    TILES: tl.constexpr
    PROGRAMS: tl.constexpr
    MEAN_GROUP: tl.constexpr


@triton.jit
def rows_of(tiling):
    """Rows of this program, int64 [BLOCK_M, 1]: a row times its stride leaves 32 bits."""
    block = tl.program_id(0) // tiling.PROGRAMS
    return (block.to(tl.int64) * tiling.BLOCK_M + tl.arange(0, tiling.BLOCK_M))[:, None]


@triton.jit
def first_of(t: tl.constexpr, unit: tl.constexpr, tiling):
    """Index of the first of the `unit`s (columns or groups in a tile) of tile t."""
    if tiling.PROGRAMS == 1:
        return t * unit
    return (tl.program_id(0) % tiling.PROGRAMS) * (tiling.TILES * unit) + t * unit


@triton.jit
def columns_of(t: tl.constexpr, tiling):
    """Columns of tile t of this program, int32 [1, BLOCK_N]."""
    return tl.arange(0, tiling.BLOCK_N)[None, :] + first_of(t, tiling.BLOCK_N, tiling)


@triton.jit
def inside(t: tl.constexpr, col, tiling):
    """Which columns of tile t exist, bool [1, BLOCK_N]; a constant where all do, so that no test is compiled."""
    columns: tl.constexpr = (t + 1) * tiling.BLOCK_N if tiling.PROGRAMS == 1 else tiling.TILES * tiling.BLOCK_N
    full: tl.constexpr = columns <= tiling.N if tiling.PROGRAMS == 1 else tiling.N % columns == 0
    if full:
        return tl.full([1, tiling.BLOCK_N], True, tl.int1)
    return col < tiling.N


@triton.jit
def row_means(producer, args, loaded, tiling):
    """The means over a whole row, fp32 [BLOCK_M, 1] each."""
    means = ()
    for i in tl.static_range(len(producer.moments)):
        total = tl.zeros([tiling.BLOCK_M, tiling.BLOCK_N], tl.float32)
        for t in tl.static_range(tiling.TILES):
            more = producer.moments[i](args, loaded[t], means, total)
            total = tl.where(inside(t, columns_of(t, tiling), tiling), more, total)
        row_total = tl.sum(total, 1, keep_dims=True)
        means = means + (tl.div_rn(row_total, tl.full(row_total.shape, tiling.N, tl.float32)),)
    return means


@triton.jit
def group_means(producer, args, loaded, tiling):
    """The means over the groups of one tile, fp32 [BLOCK_M, BLOCK_N] each: every element has its group's. A group lies
    inside the row or outside it, so nothing needs a test."""
    groups: tl.constexpr = tiling.BLOCK_N // tiling.MEAN_GROUP
    means = ()
    for i in tl.static_range(len(producer.moments)):
        total = producer.moments[i](args, loaded, means, tl.zeros([tiling.BLOCK_M, tiling.BLOCK_N], tl.float32))
        total = tl.reshape(total, [tiling.BLOCK_M, groups, tiling.MEAN_GROUP])
        # The size is a power of two: its reciprocal is exact.
        mean = tl.sum(total, 2, keep_dims=True) * (1.0 / tiling.MEAN_GROUP)
        mean = tl.broadcast_to(mean, [tiling.BLOCK_M, groups, tiling.MEAN_GROUP])
        means = means + (tl.reshape(mean, [tiling.BLOCK_M, tiling.BLOCK_N]),)
    return means


@triton.jit
def produce(producer, args, row, M, tiling):
    """The producer's rows: a tuple of TILES fp32 tiles, 0 outside. A moment is a mean over the row or over each of its
    groups, and a later one (a variance) may use an earlier one (a mean)."""
    loaded = ()
    for t in tl.static_range(tiling.TILES):
        col = columns_of(t, tiling)
        loaded = loaded + (producer.load(args, row, col, (row < M) & inside(t, col, tiling)),)
    if tiling.MEAN_GROUP == 0:
        means = row_means(producer, args, loaded, tiling)
    produced = ()
    for t in tl.static_range(tiling.TILES):
        col = columns_of(t, tiling)
        if tiling.MEAN_GROUP > 0:
            means = group_means(producer, args, loaded[t], tiling)
        exists = inside(t, col, tiling)
        produced = produced + (
            tl.where(exists, producer.apply(args, loaded[t], means, row, col, (row < M) & exists), 0.0),
        )
    return produced


@triton.jit
def fit_row(y, scheme, given, tiling):
    """The scale a whole row shares, fp32 [BLOCK_M, 1, 1]; unused zeros where groups have their own."""
    amax = tl.zeros([tiling.BLOCK_M, 1], tl.float32)
    if scheme.GROUP == 0:
        widest = magnitude(y[0])
        for t in tl.static_range(1, tiling.TILES):
            widest = tl.maximum(widest, magnitude(y[t]))
        amax = tl.max(widest, 1, keep_dims=True)
    if scheme.GROUP <= 0:
        amax = scheme.rule.fit(amax, given, scheme.code.MAX)
    return amax[:, :, None]


@triton.jit
def grouped(tile, scheme, tiling):
    """[BLOCK_M, BLOCK_N] -> [BLOCK_M, groups, group size]."""
    size: tl.constexpr = scheme.GROUP if scheme.GROUP > 0 else tiling.BLOCK_N
    return tl.reshape(tile, [tiling.BLOCK_M, tiling.BLOCK_N // size, size])


@triton.jit
def fit_groups(y, row_scale, scheme, given):
    """The scales of a grouped tile, fp32 [BLOCK_M, groups, 1]."""
    if scheme.GROUP <= 0:
        return row_scale
    return scheme.rule.fit(tl.max(magnitude(y), 2, keep_dims=True), given, scheme.code.MAX)


@triton.jit
def scale_pointer(scales, layout):
    """Where offsets of the layout count from."""
    if layout.BYTES:
        pointer = scales.to(tl.pointer_type(tl.uint8), bitcast=True)
    else:
        pointer = scales
    return pointer


@triton.jit
def scale_places(scales, row_stride, group_stride, row, t: tl.constexpr, scheme, layout, tiling):
    """(address, whether it exists) of the scales of tile t, [BLOCK_M, groups, 1]."""
    if scheme.GROUP <= 0:
        group = tl.zeros([1, 1, 1], tl.int32)
    else:
        groups: tl.constexpr = tiling.BLOCK_N // scheme.GROUP
        group = (tl.arange(0, groups) + first_of(t, groups, tiling))[None, :, None]
    address = scale_pointer(scales, layout) + layout.offset(row[:, :, None], group, row_stride, group_stride)
    return address, group * scheme.GROUP < tiling.N


@triton.jit
def clear_missing_groups(scales, row_stride, group_stride, row, padded_M, scheme, layout, tiling):
    """Zeros for the scales of groups that a row does not have and its layout does; by the first program of a row."""
    groups: tl.constexpr = tiling.N // scheme.GROUP
    if groups < layout.GROUPS:
        group = (tl.arange(0, 4) + groups)[None, :]
        address = scale_pointer(scales, layout) + layout.offset(row, group, row_stride, group_stride)
        end = tl.where(tl.program_id(0) % tiling.PROGRAMS == 0, padded_M, 0)
        missing = (group < layout.GROUPS) & (row < end)
        tl.store(address, tl.zeros([tiling.BLOCK_M, 4], tl.uint8), mask=missing)


# One binary serves every number of rows and every scale layout.
@triton.jit(do_not_specialize=["scale_row_stride", "scale_group_stride", "M", "padded_M"])
def quantize_rows_kernel(
    codes, scales, scale_row_stride, scale_group_stride, M, padded_M, producer, args, scheme, layout, inputs, tiling
):
    """store(quantize(produce(args), scheme)). Rows in [M, padded_M) exist for the scales alone and are zero."""
    given = scheme.rule.load(inputs)
    row = rows_of(tiling)
    y = produce(producer, args, row, M, tiling)
    row_scale = fit_row(y, scheme, given, tiling)
    for t in tl.static_range(tiling.TILES):
        y_groups = grouped(y[t], scheme, tiling)
        scale = fit_groups(y_groups, row_scale, scheme, given)
        tile_codes = scheme.code.encode(scheme.rule.scaled(y_groups, scale))
        col = columns_of(t, tiling)
        tile_codes = tl.reshape(tile_codes, [tiling.BLOCK_M, tiling.BLOCK_N])
        tl.store(codes + (row * tiling.N + col), tile_codes, mask=(row < M) & inside(t, col, tiling))
        if scheme.GROUP > 0 or (scheme.GROUP == 0 and t == 0):
            address, exists = scale_places(scales, scale_row_stride, scale_group_stride, row, t, scheme, layout, tiling)
            stored = tl.where(row[:, :, None] < M, scheme.rule.store(scale), 0)
            tl.store(address, stored, mask=exists & (row[:, :, None] < padded_M))
    if scheme.GROUP > 0:
        clear_missing_groups(scales, scale_row_stride, scale_group_stride, row, padded_M, scheme, layout, tiling)


# Columns of the report of check_rows_kernel.
REPORT = ("worst_ulps", "wrong_codes", "wrong_scales", "nonfinite_scales", "saturated", "signal", "noise")


@triton.jit
def total(values):
    """Sum per row of [BLOCK_M, groups, group size], fp32 [BLOCK_M, 1]."""
    return tl.sum(tl.sum(values.to(tl.float32), 2), 1, keep_dims=True)


@triton.jit(do_not_specialize=["scale_row_stride", "scale_group_stride", "M"])
def check_rows_kernel(
    codes, scales, scale_row_stride, scale_group_stride, report, M, producer, args, scheme, layout, inputs, tiling
):
    """compare(decode(codes) * scales, produce(args)): one row of `report` (fp32 [M, len(REPORT)]) per token.

    A code is wrong where it is not the one of y at the stored scale; a scale, where it is not the one fitted to y. The
    worst error is over elements inside the code's range, half a spacing beyond its largest value included, in units of
    the code's spacing there; the others are saturated. Each token is summed by
    one program in a fixed order, so two runs agree bit for bit. Needs PROGRAMS = 1.
    """
    given = scheme.rule.load(inputs)
    row = rows_of(tiling)
    y_tiles = produce(producer, args, row, M, tiling)
    row_scale = fit_row(y_tiles, scheme, given, tiling)
    none = tl.zeros([tiling.BLOCK_M, 1], tl.float32)
    worst, wrong_codes, wrong_scales, nonfinite, saturated, signal, noise = none, none, none, none, none, none, none
    for t in tl.static_range(tiling.TILES):
        col = columns_of(t, tiling)
        mask = (row < M) & inside(t, col, tiling)
        stored_codes = grouped(tl.load(codes + (row * tiling.N + col), mask=mask, other=0), scheme, tiling)
        mask = grouped(mask.broadcast_to(tiling.BLOCK_M, tiling.BLOCK_N), scheme, tiling)
        y = grouped(y_tiles[t], scheme, tiling)
        fitted = fit_groups(y, row_scale, scheme, given)
        address, exists = scale_places(scales, scale_row_stride, scale_group_stride, row, t, scheme, layout, tiling)
        exists = exists & (row[:, :, None] < M)
        stored = scheme.rule.restore(tl.load(address, mask=exists, other=0))
        stored = tl.where(exists, stored, 1.0)
        if scheme.GROUP > 0 or t == 0:
            wrong_scales += total(exists & (stored != fitted))
            nonfinite += total(exists & ((stored != stored) | (tl.abs(stored) == float("inf"))))
        quotient = scheme.rule.scaled(y, stored)
        wrong_codes += total(mask & (stored_codes != scheme.code.encode(quotient)))
        spacing = scheme.code.spacing(quotient)
        beyond = tl.abs(quotient) > scheme.code.MAX + 0.5 * spacing
        saturated += total(mask & beyond)
        error = tl.abs(scheme.code.decode(stored_codes) * stored - y)
        known = mask & (error == error)
        signal += total(tl.where(known, y * y, 0.0))
        noise += total(tl.where(known, error * error, 0.0))
        ulps = tl.where(known & (beyond == 0), error / (spacing * stored), 0.0)
        worst = tl.maximum(worst, tl.max(tl.max(ulps, 2), 1, keep_dims=True))
    place = report + row * 7
    keep = row < M
    tl.store(place, worst, mask=keep)
    tl.store(place + 1, wrong_codes, mask=keep)
    tl.store(place + 2, wrong_scales, mask=keep)
    tl.store(place + 3, nonfinite, mask=keep)
    tl.store(place + 4, saturated, mask=keep)
    tl.store(place + 5, signal, mask=keep)
    tl.store(place + 6, noise, mask=keep)
