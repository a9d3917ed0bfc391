"""The host time of a call, by a clock that is made up: of tq, and of an op with what it must allocate."""

from __future__ import annotations

import tq
from perf import host
from tq.bench import cases, peers


def test_a_row_has_both(monkeypatch):
    monkeypatch.setattr(host, "ROUNDS", 4)
    monkeypatch.setattr(host, "CALLS", 2)
    ticks = iter(range(1000))
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(ticks) * 1e-6)
    calls = []

    def theirs(prepared):
        return peers.Peer(lambda: calls.append(prepared), lambda: None)

    monkeypatch.setitem(peers.PEERS, "vllm", theirs)
    row = host.measure(cases.Case(tq.PRODUCERS["rms_norm"], (), "fp8_token", 4, 256), "cpu")
    # A round of two calls takes one tick; the op and its allocations are measured apart.
    assert (row["tq"], row["vllm"]) == (0.5, 1.0) and len(calls) == 8
    monkeypatch.setitem(peers.PEERS, "vllm", lambda prepared: None)
    row = host.measure(cases.Case(tq.PRODUCERS["quantize"], (), "mxfp8", 4, 256), "cpu")
    assert (row["tq"], row["vllm"], row["producer"]) == (0.5, None, "quantize")
