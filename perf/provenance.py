"""Where the results of a GPU lie, and what they begin with."""

from __future__ import annotations

from pathlib import Path

import torch

from tq.bench.provenance import provenance, write
from tq.kernels.tables import gpu_of

__all__ = ["gpu_folder", "provenance", "write"]


def gpu_folder() -> Path:
    """perf/results/nvidia_h200, ...: the folder of this GPU's results."""
    return Path("perf/results") / str(gpu_of(torch.device("cuda")))
