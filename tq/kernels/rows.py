"""The template kernel over [M, N]: where a producer meets a scheme. Its check is in rows_check.py; there are no others.

A program owns BLOCK_M rows and TILES tiles of BLOCK_N columns, all kept in registers: a row whose length is no power of
two wastes at most part of its last tile, and a producer that reduces its row reads it once. The tiles of a row are a
tuple, unrolled; inside a tile, elements that share a scale are the last axis of [BLOCK_M, groups, group size].
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tq.kernels.device import load_vector, store_rows, store_shared, wait_for_inputs


class Tiling(NamedTuple):
    """How [M, N] is cut: a program has TILES tiles, PROGRAMS programs share a row. Consecutive programs are neighbours
    in memory; with PROGRAMS = 1 a program sees its rows entirely. WIDTH: columns of the codes, those past N zero.
    MEAN_GROUP: see `Bound`; it divides BLOCK_N. EXPERTS: those with offsets, and the next power of two. EARLY: whether
    what all rows share is read with them (see `Producer`)."""

    N: tl.constexpr
    WIDTH: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    TILES: tl.constexpr
    PROGRAMS: tl.constexpr
    MEAN_GROUP: tl.constexpr
    EXPERTS: tl.constexpr
    EXPERTS_PADDED: tl.constexpr
    EARLY: tl.constexpr


@triton.jit
def rows_of(M, padded_M, tokens_per_expert, expert_offsets, scale_offsets, tiling):
    """(row, token, exists, part, expert) of this program. row, token: int64 [BLOCK_M, 1], in the activation and in the
    scales, of which each expert has a `part` where tokens are counted by expert. expert: whose given scales are meant,
    a scalar or [BLOCK_M, 1, 1]. A row times its stride leaves 32 bits."""
    block = tl.program_id(0) // tiling.PROGRAMS
    if tokens_per_expert is not None:
        blocks = tl.cdiv(padded_M, tiling.BLOCK_M)
        expert = (block // blocks).to(tl.int64)
        token = ((block % blocks).to(tl.int64) * tiling.BLOCK_M + tl.arange(0, tiling.BLOCK_M))[:, None]
        exists = (token < tl.load(tokens_per_expert + expert)) & (token < M)
        rows = (token + expert * M, token, exists, expert, expert)
    elif expert_offsets is not None:
        token = (block.to(tl.int64) * tiling.BLOCK_M + tl.arange(0, tiling.BLOCK_M))[:, None]
        experts = tl.arange(0, tiling.EXPERTS_PADDED)[None, :]
        starts = tl.load(scale_offsets + experts, mask=experts < tiling.EXPERTS, other=0x7FFFFFFF)
        expert = tl.maximum(tl.sum((starts <= token).to(tl.int32), 1, keep_dims=True) - 1, 0)
        begin, end = tl.load(expert_offsets + expert), tl.load(expert_offsets + expert + 1)
        row = token - tl.load(scale_offsets + expert) + begin
        exists = (row >= tl.maximum(begin, 0)) & (row < end) & (row < M)  # whatever the offsets say
        rows = (row, token, exists, 0, expert[:, :, None])
    else:
        token = (block.to(tl.int64) * tiling.BLOCK_M + tl.arange(0, tiling.BLOCK_M))[:, None]
        rows = (token, token, token < M, 0, 0)
    return rows


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
def below(t: tl.constexpr, col, END: tl.constexpr, tiling):
    """Which columns of tile t lie below END, bool [1, columns]; a constant where all do, so that no test is
    compiled."""
    columns: tl.constexpr = (t + 1) * tiling.BLOCK_N if tiling.PROGRAMS == 1 else tiling.TILES * tiling.BLOCK_N
    full: tl.constexpr = columns <= END if tiling.PROGRAMS == 1 else END % columns == 0
    if full:
        return tl.full(col.shape, True, tl.int1)
    return col < END


@triton.jit
def inside(t: tl.constexpr, col, tiling):
    """Which columns of tile t exist."""
    return below(t, col, tiling.N, tiling)


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
def produce(producer, args, row, exists, tiling):
    """The producer's rows: a tuple of TILES fp32 tiles, 0 outside. A moment is a mean over the row or over each of its
    groups, and a later one (a variance) may use an earlier one (a mean)."""
    loaded, shared = (), ()
    for t in tl.static_range(tiling.TILES):
        col = columns_of(t, tiling)
        here = inside(t, col, tiling)
        loaded = loaded + (producer.load(args, row, col, exists & here),)
        if producer.shared is not None and tiling.EARLY:
            shared = shared + (producer.shared(args, col, here),)
    if tiling.MEAN_GROUP == 0:
        means = row_means(producer, args, loaded, tiling)
    produced = ()
    for t in tl.static_range(tiling.TILES):
        col = columns_of(t, tiling)
        if tiling.MEAN_GROUP > 0:
            means = group_means(producer, args, loaded[t], tiling)
        here = inside(t, col, tiling)
        given = loaded[t]
        if producer.shared is not None:
            if tiling.EARLY:
                given = (given, shared[t])
            else:
                given = (given, producer.shared(args, col, here))
        produced = produced + (tl.where(here, producer.apply(args, given, means, row, col, exists & here), 0.0),)
    return produced


@triton.jit
def smooth(y, inputs, tiling):
    """y * smooth_scale, where there is one."""
    if inputs.smooth_scale is None:
        smoothed = y
    else:
        smoothed = ()
        for t in tl.static_range(tiling.TILES):
            col = columns_of(t, tiling)
            smoothed = smoothed + (y[t] * load_vector(inputs.smooth_scale, col, inside(t, col, tiling)),)
    return smoothed


@triton.jit
def row_maxima(y, scheme, tiling):
    """The maxima that a whole row shares, each fp32 [BLOCK_M, 1, 1]; zeros where a scale is given or groups have their
    own."""
    maxima = ()
    if scheme.GROUP == 0:
        for i in tl.static_range(len(scheme.rule.peaks)):
            widest = tl.full([tiling.BLOCK_M, tiling.BLOCK_N], float("-inf"), tl.float32)
            for t in tl.static_range(tiling.TILES):
                peak = scheme.rule.peaks[i](y[t])
                if len(scheme.rule.peaks) > 1:  # a zero outside is the least of magnitudes, not of values
                    peak = tl.where(inside(t, columns_of(t, tiling), tiling), peak, float("-inf"))
                widest = peak if t == 0 else tl.maximum(widest, peak)
            maxima = maxima + (tl.max(widest, 1, keep_dims=True)[:, :, None],)
    else:
        maxima = (tl.zeros([tiling.BLOCK_M, 1, 1], tl.float32),)
    return maxima


@triton.jit
def grouped(tile, scheme, tiling):
    """[BLOCK_M, columns or bytes] -> [BLOCK_M, groups, those of a group]."""
    groups: tl.constexpr = tiling.BLOCK_N // scheme.GROUP if scheme.GROUP > 0 else 1
    return tl.reshape(tile, [tiling.BLOCK_M, groups, tile.shape[1] // groups])


@triton.jit
def code_places(codes, row, exists, t: tl.constexpr, scheme, tiling):
    """(address, mask) of the bytes of tile t, [BLOCK_M, bytes]."""
    bytes_: tl.constexpr = tiling.BLOCK_N // scheme.code.PER_BYTE
    at = tl.arange(0, bytes_)[None, :] + first_of(t, bytes_, tiling)
    width: tl.constexpr = tiling.WIDTH // scheme.code.PER_BYTE
    return codes + (row * width + at), exists & below(t, at * scheme.code.PER_BYTE, tiling.WIDTH, tiling)


@triton.jit
def maxima_of(y, shared, scheme):
    """The maxima behind each scale of a grouped tile, [BLOCK_M, groups, 1] each; `shared` by the row or of its
    groups."""
    maxima = shared
    if scheme.GROUP > 0:
        maxima = ()
        for i in tl.static_range(len(scheme.rule.peaks)):
            maxima = maxima + (tl.max(scheme.rule.peaks[i](y), 2, keep_dims=True),)
    return maxima


@triton.jit
def scale_places(scales, token, part, t: tl.constexpr, scheme, layout, tiling):
    """(address, whether it exists) of the scales of tile t, [BLOCK_M, groups, 1]. scales: pointer and strides of token,
    group and part."""
    if scheme.GROUP <= 0:
        group = tl.zeros([1, 1, 1], tl.int32)
    else:
        groups: tl.constexpr = tiling.BLOCK_N // scheme.GROUP
        group = (tl.arange(0, groups) + first_of(t, groups, tiling))[None, :, None]
    return scale_address(scales, token[:, :, None], group, part, layout), group * scheme.GROUP < tiling.N


@triton.jit
def scale_address(scales, token, group, part, layout):
    """Where the scale of a token and a group lies."""
    pointer = scales[0]
    if layout.BYTES:
        pointer = pointer.to(tl.pointer_type(tl.uint8), bitcast=True)
    return pointer + layout.offset(token, group, scales[1], scales[2]) + part * scales[3]


@triton.jit
def clear_missing_groups(scales, token, written, part, scheme, layout, tiling):
    """Zeros for the scales of groups that a row does not have and its layout does; by the first program of a row."""
    groups: tl.constexpr = tiling.N // scheme.GROUP
    if groups < layout.GROUPS:
        group = (tl.arange(0, 4) + groups)[None, :]
        address = scale_address(scales, token, group, part, layout)
        end = tl.where(tl.program_id(0) % tiling.PROGRAMS == 0, layout.GROUPS, 0)
        tl.store(address, tl.zeros([tiling.BLOCK_M, 4], tl.uint8), mask=(group < end) & written)


# One binary serves every number of rows and every scale layout.
@triton.jit(do_not_specialize=["scale_row_stride", "scale_group_stride", "scale_expert_stride", "M", "padded_M"])
def quantize_rows_kernel(
    codes,
    scales,
    scale_row_stride,
    scale_group_stride,
    scale_expert_stride,
    zero_points,
    unquantized,
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
    OVERLAPS: tl.constexpr,
):
    """store(quantize(produce(args), scheme)). Tokens in [M, padded_M) exist for the scales alone and are zero; those an
    expert does not have are left as they are. OVERLAPS: see `wait_for_inputs`."""
    wait_for_inputs(OVERLAPS)
    row, token, exists, part, expert = rows_of(M, padded_M, tokens_per_expert, expert_offsets, scale_offsets, tiling)
    given = scheme.rule.load(inputs, expert)
    if tokens_per_expert is not None:
        if tl.sum(exists.to(tl.int32)) == 0:  # most programs, where few experts are busy
            return
    written = exists if tokens_per_expert is not None else token < padded_M
    place = (scales, scale_row_stride, scale_group_stride, scale_expert_stride)
    y = produce(producer, args, row, exists, tiling)
    if unquantized is not None:
        for t in tl.static_range(tiling.TILES):
            col = columns_of(t, tiling)
            store_rows(unquantized, row, col, y[t], exists & inside(t, col, tiling))
    y = smooth(y, inputs, tiling)
    shared = row_maxima(y, scheme, tiling)
    for t in tl.static_range(tiling.TILES):
        y_groups = grouped(y[t], scheme, tiling)
        maxima = maxima_of(y_groups, shared, scheme)
        fitted = scheme.rule.fit(maxima, given, scheme.code)
        tile_codes = scheme.code.encode(scheme.rule.scaled(y_groups, fitted, maxima, given, scheme.code))
        place_codes, mask = code_places(codes, row, exists, t, scheme, tiling)
        tile_codes = tl.reshape(tile_codes, place_codes.shape)
        if len(fitted) > 1:  # the code of 0 is the zero point
            tile_codes = tl.where(inside(t, columns_of(t, tiling), tiling), tile_codes, 0)
        tl.store(place_codes, tile_codes, mask=mask)
        if scheme.GROUP > 0 or (scheme.GROUP == 0 and t == 0):
            address, there = scale_places(place, token, part, t, scheme, layout, tiling)
            stored = tl.where(exists[:, :, None], scheme.rule.store(fitted[0]), 0)
            if scheme.GROUP > 0:
                store_shared(address, stored, there & written[:, :, None])
            else:
                tl.store(address, stored, mask=written[:, :, None])
            if len(fitted) > 1:
                tl.store(zero_points + row[:, :, None], fitted[1].to(tl.int32), mask=exists[:, :, None])
    if scheme.GROUP > 0:
        clear_missing_groups(place, token, written, part, scheme, layout, tiling)
