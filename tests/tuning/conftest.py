"""A GPU without a table, and what kernels are launched with."""

from __future__ import annotations

import pytest
import torch
from tuned import GPU

from tq.bench import search
from tq.kernels import launch, plan, tables, tuning


@pytest.fixture(autouse=True)
def gpu(tmp_path, monkeypatch):
    """A GPU of a name of its own, without a table, and nothing known."""
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(plan, "_plans", plan.Plans())
    monkeypatch.setattr(search, "_decided", {})
    monkeypatch.setattr(tuning, "AUTOTUNE", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a CPU build has none
    tables.table.cache_clear()
    yield
    tables.table.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """Every configuration that a kernel was launched with."""
    seen = []

    def cut_and_note(*given, real=launch.cut):
        made = real(*given)
        tiling, config = made
        assert (tiling.BLOCK_M.value, tiling.TILES.value) == (config.block_m, config.tiles)
        seen.append(config)
        return made

    monkeypatch.setattr(launch, "cut", cut_and_note)
    return seen
