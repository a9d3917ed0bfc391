"""For the tests of tuning: a GPU that is made up, keys and tables."""

from __future__ import annotations

import torch
from helpers import DEVICE

import tq
from tq.bench import provenance, search
from tq.kernels import cut, plan, tables, tuning
from tq.kernels.tuning import RowConfig

GPU, HIDDEN = "made_up_gpu", 256
OTHER = RowConfig(2, 128, 2, 1)
STATIC = {"scale": torch.tensor([0.05], device=DEVICE)}


def norm_arguments(rows=3, dtype=torch.bfloat16):
    x, residual = torch.randn(2, rows, HIDDEN, device=DEVICE).to(dtype)
    return (x, torch.ones(HIDDEN, device=DEVICE, dtype=dtype)), residual


def key_of(name, scheme, rows=3, dtype=torch.bfloat16, hidden_size=HIDDEN, **more):
    producer = tq.PRODUCERS[name]
    arguments, options = producer.example(rows, hidden_size, dtype, DEVICE)
    options |= STATIC if scheme == "fp8_tensor" else {}
    return cut.key_of(plan.prepare(producer, arguments, scheme, {**options, **more}))


def put_table(*rows):
    document = {"gpu": GPU, "runs": [{}]}
    lines = [{**key._asdict(), **config._asdict(), "gain": 1.0, "run": 0} for key, config in rows]
    provenance.write(tables.FOLDER / f"{GPU}.json", document, lines)
    tables.table.cache_clear()


def clock(monkeypatch, time_of):
    """time_of(configuration): microseconds. Returns what was asked for."""
    asked = []

    def device_time_us(calls, *_):
        asked.append(tuning.forced())
        return time_of(tuning.forced()), 0.0

    monkeypatch.setattr(search, "device_time_us", device_time_us)
    return asked
