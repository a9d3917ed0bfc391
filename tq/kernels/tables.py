"""Tables of tuned configurations, one file for each GPU, written by `python -m tq tune`."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tq.kernels.tuning import Key, RowConfig

FOLDER = Path(__file__).parent / "tuned"
MAX_WARPS = 32


@lru_cache
def gpu_of(device: torch.device) -> str | None:
    """nvidia_h200, ...: the GPU behind `device`, as its files are named; None for a CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_name(device).lower().replace(" ", "_")


def find(device: torch.device, key: Key) -> RowConfig | None:
    """The tuned configuration, if this GPU has a table and the table this key."""
    gpu = gpu_of(device)
    return None if gpu is None else table(FOLDER / f"{gpu}.json").get(key)


@lru_cache
def table(path: Path) -> dict[Key, RowConfig]:
    """What a file says, read once; empty where there is none.

    Raises ValueError for an entry that would leave out part of a row: it must never be launched."""
    return dict(map(entry, read(path)["rows"])) if path.exists() else {}


def read(path: Path) -> dict[str, Any]:
    """The document, provenance included."""
    return json.loads(path.read_text(encoding="utf-8"))


def entry(row: dict[str, Any]) -> tuple[Key, RowConfig]:
    """A line of a table, checked."""
    key = Key(*(row[name] for name in Key._fields))
    config = RowConfig(*(row[name] for name in RowConfig._fields))
    powers = config.block_m, config.block_n, config.num_warps
    covers = config.block_n >= key.least and (not key.whole_row or config.block_n * config.tiles >= key.hidden_size)
    if not covers or config.tiles < 1 or any(n < 1 or n & (n - 1) for n in powers) or config.num_warps > MAX_WARPS:
        raise ValueError(
            f"tune: a configuration must have powers of two and cover groups, and rows where they are reduced; got "
            f"{config} for {key}; tune again"
        )
    return key, config
