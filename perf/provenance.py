"""Where numbers come from: what a reader needs to repeat them."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import triton

import tq


def gpu_folder() -> Path:
    """perf/results/nvidia_h200, ...: the folder of this GPU's results."""
    return Path("perf/results") / torch.cuda.get_device_name().lower().replace(" ", "_")


def provenance(module: str) -> dict[str, Any]:
    """GPU, date, command and versions of a run of `python -m <module>`."""
    try:
        vllm: str | None = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        vllm = None
    shown = [argument for argument in sys.argv[1:] if not argument.startswith("/")]
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["python -m", module, *shown]),
        "versions": {"tq": tq.__version__, "torch": torch.__version__, "triton": triton.__version__, "vllm": vllm},
    }


def write(path: Path, document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """`document` with a list of `rows`, one a line, so that two results can be compared line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(document, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
