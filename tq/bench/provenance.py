"""Where numbers come from: what a reader needs to repeat them."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import triton

import tq


def version_of(package: str) -> str | None:
    """The version installed, if it is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def provenance(module: str) -> dict[str, Any]:
    """GPU, date, command and versions of a run of `python -m <module>`."""
    peers = {name.partition("-")[0]: version_of(name) for name in ("vllm", "helion", "flashinfer-python")}
    shown = [argument for argument in sys.argv[1:] if not argument.startswith("/")]
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": " ".join(["python -m", module, *shown]),
        "versions": {"tq": tq.__version__, "torch": torch.__version__, "triton": triton.__version__, **peers},
    }


def clocks() -> dict[str, int]:
    """Clocks of this GPU as nvidia-smi sees them now, MHz; empty where it is not to be had."""
    names = "sm", "mem"
    gpu = f"GPU-{torch.cuda.get_device_properties().uuid}" if torch.cuda.is_available() else "0"
    query = ",".join(f"clocks.{name}" for name in names)
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        return dict(zip(names, map(int, said.split(",")), strict=True))
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def write(path: Path, document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """`document` with a list of `rows`, one a line, so that two results can be compared line by line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(document, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
