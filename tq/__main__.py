"""`python -m tq`: check the kernels, explain what is fused in a model, run a real one through vLLM, tune, report."""

from __future__ import annotations

import os
import sys

import torch
import typer

from tq.cli.check import check
from tq.cli.explain import explain
from tq.cli.report import report
from tq.cli.run_vllm import run_vllm
from tq.cli.tune import tune


def main() -> None:
    """The command line."""
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        # The kernels will run interpreted, which triton decides when it is imported, and it is by now: start again.
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, "-m", "tq", *sys.argv[1:]])
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.command()(check)
    app.command()(explain)
    app.command("run-vllm")(run_vllm)
    app.command()(tune)
    app.command()(report)
    app()


if __name__ == "__main__":
    main()
