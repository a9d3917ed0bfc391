"""`python -m tq explain`: which boundaries of a model would be fused, and why the others would not."""

from __future__ import annotations

import json
import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def explain(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder, or its config.json. No weights are read.")],
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
) -> None:
    """Say for each boundary of a model whether tq fuses it, with which scheme and kernel, or the reason why not.

    vLLM chooses the kernels for this machine: on one without a GPU they are those of its CPU build.
    """
    import torch

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    from tq.contract.explain import explain as explained

    try:
        with redirect_stdout(sys.stderr):
            report = explained(model)
    except Exception as error:
        typer.echo(f"explain: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps({"fused": report.fused, **asdict(report)}, indent=1))
    else:
        typer.echo(report)
