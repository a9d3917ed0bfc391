"""What is run on a GPU covers what it says; the parts can be sent to processes."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import product

import pytest

import tq
from perf import calls, matrix, verify
from tq.bench import cases, search
from tq.kernels import tables

COMBINATIONS = list(matrix.combinations())
PAIRS = set(product(tq.PRODUCERS, tq.SCHEMES))


def test_every_pair_at_every_size():
    for size in matrix.SIZES:
        found = {(each.producer, each.scheme) for each in COMBINATIONS if each.hidden_size == size}
        assert {pair for pair in PAIRS if size % (tq.SCHEMES[pair[1]].group or 1) == 0} <= found
    assert all(set(each.tokens) >= {0, 1, 7, 33, 128, 129, 4096} for each in COMBINATIONS)


def test_what_is_checked():
    """Every scheme with the identity, two of three with each producer of sums, many with the others; every scheme and
    size in each dtype."""
    checked = [each for each in COMBINATIONS if each.checked]
    pairs = {(each.producer, each.scheme) for each in checked}
    for name, producer in tq.PRODUCERS.items():
        schemes = sum(pair[0] == name for pair in pairs) / len(tq.SCHEMES)
        assert schemes >= (1.0 if name == "quantize" else 0.6 if producer.moments else 0.25)
    for dtype in matrix.DTYPES:
        of_dtype = [each for each in checked if each.dtype == dtype]
        assert {each.scheme for each in of_dtype} == set(tq.SCHEMES)
        assert {each.hidden_size for each in of_dtype} == set(matrix.SIZES)


@pytest.mark.parametrize("dtype", matrix.DTYPES)
def test_every_producer_layout_and_scheme_in_every_dtype_with_most_tokens(dtype):
    found = [each for each in COMBINATIONS if each.dtype == dtype and 8192 in each.tokens]
    assert {each.producer for each in found} == set(tq.PRODUCERS)
    assert {(each.scheme, each.layout) for each in found} == {
        (scheme.name, layout.name) for scheme in tq.SCHEMES.values() for layout in scheme.layouts
    }


def test_parts_are_told_apart_and_can_be_sent():
    parts = verify.parts(matrix.SIZES, "nvidia_h200")
    assert len({part.name for part in parts}) == len(parts)
    assert pickle.loads(pickle.dumps(parts[-1])).run.args == parts[-1].run.args


def test_every_line_of_a_table_is_tried():
    """By a call that looks that line up, with numbers of tokens of both kinds."""
    asked = Counter()
    for each in matrix.in_table("nvidia_h200"):
        case = cases.Case(tq.PRODUCERS[each.producer], each.left_out, each.scheme, 1, each.hidden_size)
        keys = {search.describe(case._replace(rows=rows))[0] for rows in each.tokens}
        assert len(keys) == 1
        asked.update(keys)
    assert asked == Counter(dict.fromkeys(tables.table(tables.FOLDER / "nvidia_h200.json"), 1))


def row_of(**different):
    row = {**COMBINATIONS[0]._asdict(), "producer": "silu_mul", "checked": True, "codes": 10**6, "codes_differ": 12}
    return row | {"scales_differ": 3, "side_outputs_differ": 0, "wrong": 0, "worst_ulps": 0.5} | different


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (row_of(), False),
        (row_of(codes_differ=13), True),
        (row_of(side_outputs_differ=1), True),
        (row_of(wrong=1), True),
        (row_of(worst_ulps=0.51), True),
        (row_of(checked=False, wrong=1), False),
        (row_of(producer="quantize"), True),
        (row_of(producer="quantize", codes_differ=0), True),
        (row_of(producer="quantize", codes_differ=0, scales_differ=0), False),
        ({"check": "anything", "differ": 0}, False),
        ({"check": "anything", "differ": -9}, True),
    ],
)
def test_what_counts_as_wrong(row, expected):
    assert matrix.wrong(row) is expected


def test_digests_must_be_those_of_a_token_alone():
    made = {f"{name} {scheme} {tokens}": "same" for name, scheme in calls.PAIRS for tokens in matrix.TOKENS}
    assert not any(row["differ"] for row in calls.same_digests(made, dict(made)))
    name, scheme = calls.PAIRS[0]
    other = made | {f"{name} {scheme} 33": "other"}
    assert [row["differ"] for row in calls.same_digests(made, other)].count(1) == 1
