"""Every producer with every scheme over [M, N]: cut another way, in another batch, in place."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
from comparing import (
    assert_equal_results,
    assert_matches,
    assert_same_bits,
)
from helpers import (
    DEVICE,
    ONE_EACH,
    PAIRS,
    Case,
    hidden_sizes,
    in_nan_memory,
    is_float,
)

import tq
from tq.kernels import launch, tuning

every_pair = pytest.mark.parametrize(("producer", "scheme"), PAIRS)


one_each = pytest.mark.parametrize(("producer", "scheme"), ONE_EACH)
MUTATING = [(name, scheme) for name, scheme in PAIRS if tq.PRODUCERS[name].mutates]


def make(producer: str, scheme: str, rows: int, **rest) -> Case:
    found = tq.SCHEMES[scheme]
    return Case(tq.PRODUCERS[producer], found, rows, dict(hidden_sizes(found))["ragged"], **rest)


def tilings(case: Case) -> list[tuning.RowConfig]:
    """Rows cut in one tile, in several, with a tile beyond the row, and over several programs where allowed."""
    least = max(case.scheme.group, 32)
    size = max(triton.next_power_of_2(case.hidden_size), least)
    half, quarter = max(size // 2, least), max(size // 4, least)
    tiles = -(-case.hidden_size // quarter)
    found = [(1, size, 1, 4), (2, size, 1, 4), (4, half, 2, 4), (2, quarter, tiles, 4), (8, quarter, tiles + 1, 2)]
    if not launch.needs_whole_row(case.producer, case.scheme):
        found += [(4, least, 1, 1), (8, half, 1, 1), (2, least, 2, 1)]
    return [tuning.RowConfig(*config) for config in found]


@every_pair
def test_every_tiling_gives_the_same_bits(producer, scheme):
    """Of halves of small integers the sum of squares is exact, so its order cannot show."""
    case = make(producer, scheme, 4, layout=tq.SCHEMES[scheme].layouts[-1].name)

    def halves(tensor):
        return (torch.randint(-6, 7, tensor.shape, device=DEVICE) / 2).to(tensor.dtype)

    case.change(halves, is_float)
    want = case.run()
    assert_matches(case, want, case.run_reference())
    for config in tilings(case):
        with tuning.force(config):
            got = case.run()._replace(label=f"{case} with {config}")
        if len(case.producer.moments) < 2:
            assert_equal_results(got, want)
        else:
            assert_matches(case, got, want)


@one_each
def test_a_row_is_the_same_in_every_batch(producer, scheme):
    alone = make(producer, scheme, 1)
    want = alone.run()
    for rows, positions in ((2, (1,)), (17, (0, 8)), (64, (63,))):
        for position in positions:
            batch = make(producer, scheme, rows)
            for value, row in zip(
                [*batch.arguments, *batch.options.values()], [*alone.arguments, *alone.options.values()], strict=True
            ):
                if batch.is_rows(value):
                    value[position] = row[0]
                elif isinstance(value, torch.Tensor):
                    value.copy_(row)
            got = batch.run()
            label = f"{batch}, row {position}"
            assert_same_bits(got.codes[position], want.codes[0], label)
            if batch.scheme.dynamic:
                assert_same_bits(got.activation.scales()[position], want.activation.scales()[0], label)
            for mine, theirs in zip(got.side_outputs, want.side_outputs, strict=True):
                assert_same_bits(mine[position], theirs[0], label)


@pytest.mark.parametrize(("producer", "scheme"), MUTATING)
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_side_output_in_place(producer, scheme, rows):
    """The tensor a side output is written to may be the one that is read."""
    case = make(producer, scheme, rows)
    want = case.run()
    for name in case.producer.mutates:
        source = name.removesuffix("_out")
        place = case.options[source] = case.options[source].clone()
        case.options[name] = place
    got = case.run()
    assert_equal_results(got, want)
    assert got.side_outputs[0] is place


@pytest.mark.parametrize(("producer", "scheme"), MUTATING)
def test_side_output_in_a_view_changes_its_view_alone(producer, scheme):
    case = make(producer, scheme, 5)
    want, size = case.run(), case.hidden_size
    memory = torch.randn(7, 3 * size, dtype=torch.float32, device=DEVICE).to(case.dtype)
    before = memory.clone()
    view = memory[1:6, size : 2 * size]
    for name in case.producer.mutates:
        case.options[name] = view
    got = case.run()
    assert_equal_results(got, want)
    assert got.side_outputs[0] is view
    memory[1:6, size : 2 * size] = before[1:6, size : 2 * size]
    assert_same_bits(memory, before, f"{case}: around the view")


@one_each
def test_inputs_are_left_alone(producer, scheme):
    case = make(producer, scheme, 5)
    options = case.call_options()
    given = [value for value in (*case.arguments, *options.values()) if isinstance(value, torch.Tensor)]
    before = [value.clone() for value in given]
    case.run()
    for value, old in zip(given, before, strict=True):
        assert_same_bits(value, old, str(case))


MODEL_SIZES = (32, 48, 1376, 2880, 5120, 6144, 7168)


@pytest.mark.parametrize(
    ("scheme", "hidden_size"),
    [
        (name, size)
        for name in ("fp8_tensor", "fp8_token", "fp8_group128")
        for size in MODEL_SIZES
        if not size % (tq.SCHEMES[name].group or 1)
    ],
)
def test_hidden_sizes_of_models(scheme, hidden_size):
    """Through the configuration that a GPU would get, and without what lies past the row."""
    found = tq.SCHEMES[scheme]
    producer = tq.PRODUCERS["rms_norm"]
    case = Case(producer, found, 3, hidden_size).change_rows(in_nan_memory)
    whole = launch.needs_whole_row(producer, found)
    with tuning.force(tuning.heuristic(hidden_size, found.group, whole, few=False)):
        got = case.run()
    assert_matches(case, got, case.run_reference())


def test_heuristic_covers_every_row():
    """Whatever the hidden size, a program that must see its row does, no tile is narrower than a group."""
    for hidden_size in [1, 31, 32, 33, 128, 129, 1000, *range(128, 32769, 128)]:
        for group in (0, 32, 128):
            for whole, few, pairs in itertools.product((True, False), repeat=3):
                config = tuning.heuristic(hidden_size, group, whole, few, pairs)
                for value in (config.block_m, config.block_n, config.num_warps):
                    assert value & (value - 1) == 0 and value > 0
                assert config.block_n >= group and 1 <= config.num_warps <= 16
                if whole:
                    assert config.block_n * config.tiles >= hidden_size, (hidden_size, group, config)


def test_strides_that_no_launch_has_seen_are_not_mixed_up():
    """The same shapes with another row stride, one call after the other."""
    x = torch.randn(5, 3 * 256, device=DEVICE).bfloat16()
    want = tq.quantize(x[:, 256:512].clone(), scheme="fp8_group128")
    for view in (x[:, 256:512], x.clone()[:, 256:512], torch.cat([x, x], 1)[:, 256:512]):
        got = tq.quantize(view, scheme="fp8_group128")
        assert_same_bits(got.data, want.data)
        assert_same_bits(got.scale, want.scale)


def test_row_offsets_beyond_32_bits():
    """The last row begins 2^31 elements after the first; the memory between them is asked for and never touched."""
    stride, size = (1 << 30) + 8, 256
    memory = torch.UntypedStorage(2 * (2 * stride + size), device=DEVICE)
    x = torch.empty(0, dtype=torch.bfloat16, device=DEVICE).set_(memory, 0, (3, size), (stride, 1))
    x.copy_(torch.randn(3, size))
    for scheme in ("fp8_token", "fp8_group128"):
        got, want = tq.quantize(x, scheme=scheme), tq.quantize(x.contiguous(), scheme=scheme)
        assert_same_bits(got.data, want.data)
        assert_same_bits(got.scale, want.scale)
