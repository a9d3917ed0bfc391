"""How the turns of engines are ordered, and what is made of what they measured."""

from __future__ import annotations

import threading
import time

import pytest

from perf import engine_turns
from perf.engine_time import covered
from perf.engine_turns import Findings, Order, compared, leave, measure, spread


def test_no_engine_is_more_than_a_turn_ahead(tmp_path):
    (tmp_path / "engines").write_text("3")
    taken, deadline = [], time.time() + 30

    def engine(name, turns):
        order = Order(tmp_path, name)
        order.ready(deadline)
        for _ in range(turns):
            with order.turn(deadline):
                taken.append(name)
        leave(tmp_path, name)

    # The second leaves early, the third never comes and somebody else says so.
    threads = [threading.Thread(target=engine, args=each) for each in (("a", 6), ("b", 3))]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert taken == []
    leave(tmp_path, "c")
    for thread in threads:
        thread.join()
    assert sorted(taken) == ["a"] * 6 + ["b"] * 3
    for end in range(1, 7):
        assert abs(taken[:end].count("a") - taken[:end].count("b")) <= 1
    assert time.time() < deadline - 10


def test_an_engine_that_hangs_holds_nobody_past_the_deadline(tmp_path):
    (tmp_path / "engines").write_text("1")
    order = Order(tmp_path, "a")
    order.ready(time.time())
    (tmp_path / "hangs.turns").touch()
    deadline = time.time() + 0.2
    for _ in range(2):
        with order.turn(deadline):
            pass
    assert time.time() >= deadline


class Engine:
    """Takes its steps in no time; its rate is that of the side that is on."""

    def __init__(self):
        self.on, self.batches = "stock", []


def test_each_side_has_a_turn_of_each_batch(tmp_path, monkeypatch):
    (tmp_path / "engines").write_text("1")
    llm = Engine()

    def generate(llm, batch, new_tokens):
        llm.batches.append((llm.on, batch))
        faster = 2 if llm.on == "tq" else 1
        return engine_turns.Generated(batch / faster, [1, 2], [300.0 / faster] * 3)

    monkeypatch.setattr(engine_turns, "generate", generate)
    sides = {f"eager_{side}": lambda side=side: setattr(llm, "on", side) for side in ("stock", "tq")}
    findings = Findings(tmp_path / "found.json")
    measure(llm, sides, Order(tmp_path, "found"), findings, time.time() + 60, "eager")
    turns = llm.batches[6:]  # after those that warm up
    assert all(turns.count((side, batch)) == engine_turns.ROUNDS for side in ("stock", "tq") for batch in (1, 64, 256))
    firsts = [turns[i] for i in range(0, len(turns), 2)]
    assert sum(side == "tq" for side, _ in firsts) in (len(firsts) // 2, len(firsts) // 2 + 1)
    rows = [*findings.rows, {"busy": "eager_tq", "batch": 64, "gpu_us": 90.0, "kernels": {}}]
    rows.append({"busy": "eager_stock", "batch": 64, "gpu_us": 99.0, "kernels": {}})
    found = {(row["engine"], row["batch"]): row for row in compared(rows) if "engine" in row}
    row = found["eager_tq", 64]
    assert row["over_stock"] == row["step_over_stock"] == [2, 2, 2] and row["step_us"] == [150, 150, 150]
    assert (row["gpu_us"], row["gpu_share"], row["held_by"], row["gpu_over_stock"]) == (90, 0.6, "GPU", 1.1)
    stock = found["eager_stock", 64]
    assert stock["held_by"] == "host" and "over_stock" not in stock
    assert "gpu_us" not in found["eager_tq", 256] and len(compared(rows)) == 8


@pytest.mark.parametrize(("values", "expected"), [([4.0], [4, 4, 4]), ([1.0, 2.0, 3.0, 4.0, 5.0], [2, 3, 4])])
def test_spread_is_of_what_was_measured(values, expected):
    assert spread(values) == expected


def test_time_in_which_several_kernels_run_counts_once():
    spans = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0), (9.0, 10.0)]
    assert covered(spans) == 5.0 and covered(spans, 2.0) == 7.0 and covered(spans, 3.0) == 10.0
