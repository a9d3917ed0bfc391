"""Every measuring script can be started where there is no GPU, as far as its imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py") if not path.stem.startswith("test_"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports(name):
    """In a process of its own: some set the environment of the engines they start."""
    done = subprocess.run([sys.executable, "-c", f"import perf.{name}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
