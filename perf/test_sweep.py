"""A row of the sweep says how fast each peer was, what of its results differs, and what it raised."""

from __future__ import annotations

import pytest

import tq
from perf import sweep
from tq.bench import cases, peers


@pytest.fixture
def measured(monkeypatch):
    """The row of a call of 3 tokens for a given peer, by a clock that is made up, without a GPU."""
    prepare = cases.Case.prepare
    monkeypatch.setattr(cases.Case, "prepare", lambda self, dtype, device: prepare(self, dtype, "cpu"))
    monkeypatch.setattr(sweep, "device_time_us", lambda calls: ([call() for call in calls] and 2.0, 0.1))

    def row(peer):
        monkeypatch.setitem(peers.PEERS, "other", peer)
        case = cases.Case(tq.PRODUCERS["rms_norm"], (), "fp8_token", 3, 256)
        return sweep.measure(case, ["tq", "other"])

    return row


def test_what_differs_is_counted(measured):
    def off_by_one(prepared):
        ours = peers.tq_peer(prepared._replace(codes=prepared.codes.clone(), scales=prepared.scales.clone()))
        codes, scales, _ = ours.outputs()

        def call():
            ours.call()
            codes[1, 7] ^= 1
            scales[:2] *= 2.0

        return peers.Peer(call, ours.outputs)

    row = measured(off_by_one)
    assert row["tq"] == row["other"] == 2.0 and row["other_spread"] == 0.1
    found = {name: row[f"other_{name}_differ"] for name in ("codes", "scales", "residual")}
    assert found == {"codes": 1, "scales": 2, "residual": 0}


def test_what_fails_is_named_and_what_is_missing_is_not(measured):
    def failing(prepared):
        raise RuntimeError("no such kernel")

    row = measured(failing)
    assert row["other"] is None and row["other_error"] == "RuntimeError: no such kernel" and row["tq"] == 2.0
    assert measured(lambda prepared: None)["other"] is None
    assert row["bytes"] == 3 * 256 * (3 * 2 + 1) + 256 * 2 + 3 * 4  # x, residual in and out; codes; weight; scales


def test_hidden_sizes_may_be_chosen():
    """For every producer, where they are whole groups of the scheme."""
    found = {(case.producer.name, case.scheme, case.hidden_size) for case in cases.cases((1,), (2880, 7168))}
    for name in tq.PRODUCERS:
        assert {size for *pair, size in found if pair == [name, "fp8_token"]} == {2880, 7168}
        assert {size for *pair, size in found if pair == [name, "fp8_group128"]} == {7168}
