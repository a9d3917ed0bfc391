"""What is compiled ahead by other processes is what is needed later."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
import typer
from typer.testing import CliRunner

from tq.bench import ahead, cases, timing
from tq.cli import check as command
from tq.kernels import check as check_module
from tq.kernels import launch


def sleep(seconds):
    time.sleep(seconds)
    return seconds


def fail(message):
    raise ValueError(message)


def test_results_come_as_they_are_ready_and_nothing_is_left():
    assert sorted(ahead.in_processes(abs, [-1, 2, -3], count=2)) == [1, 2, 3]
    with pytest.raises(ValueError, match="what went wrong"):
        list(ahead.in_processes(fail, ["what went wrong"], count=1))
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        list(ahead.in_processes(sleep, [300.0], limit_s=0.1, count=1))
    for _ in ahead.in_processes(sleep, [0.0, 300.0], count=2):
        break
    assert time.monotonic() - began < 60 and not multiprocessing.active_children()


class Noting:
    """Stands where a kernel stands, and notes what the kernel would be compiled for."""

    def __init__(self, kernel, seen):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid):
        def launched(*arguments, **options):
            of_kernel = self.kernel.fn.__name__, described(arguments), *options.items()
            self.seen.append(of_kernel)
            return self.kernel[grid](*arguments, **options)

        return launched


def described(value):
    """Type and alignment of a tensor, and a number by its type, unless it is a constant: as Triton does."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, tuple):
        return tuple(map(described, value))
    return type(value) if type(value) in (int, float) else value


def test_a_check_finds_all_its_kernels_compiled(monkeypatch):
    """On a GPU: the calls and their checks run in other processes, which then compile what is timed in this one."""
    seen: list = []
    ahead_of_it: list = []
    arguments, prepare = cases.Case.arguments, cases.Case.prepare
    sizes = {128: "", 64: "", 384: ""}
    monkeypatch.setattr(cases, "SIZES", dict.fromkeys(cases.SIZES, sizes))
    monkeypatch.setattr(cases.Case, "arguments", lambda self, dtype, device: arguments(self, dtype, "cpu"))
    monkeypatch.setattr(cases.Case, "prepare", lambda self, dtype, device: prepare(self, dtype, "cpu"))
    monkeypatch.setattr(launch, "quantize_rows_kernel", Noting(launch.quantize_rows_kernel, seen))
    monkeypatch.setattr(check_module, "check_rows_kernel", Noting(check_module.check_rows_kernel, seen))

    def here(run, todo):
        for each in reversed(todo):
            yield run(each)
        ahead_of_it.extend(seen)
        seen.clear()

    monkeypatch.setattr(command, "in_processes", here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "MEASURED_TOKENS", 5)
    monkeypatch.setattr(timing, "device_time_us", lambda calls, *_: ([call() for call in calls] and 2.0, 0.1))
    monkeypatch.setattr(timing, "measured_bandwidth", lambda: 1e9)
    app = typer.Typer()
    app.command()(command.check)
    chosen = ["--producers", "quantize,rms_norm", "--schemes", "fp8_token,nvfp4"]
    for more in [], ["--every-size"]:
        seen.clear(), ahead_of_it.clear()
        result = CliRunner().invoke(app, ["--no-model", "--tokens", "3", *chosen, *more])
        assert result.exit_code == 0, (result.output, result.exception)
        checks = [kernel for kernel in ahead_of_it if kernel[0] == "check_rows_kernel"]
        assert len(checks) == 3 * 2 * (3 if more else 1) and len(set(seen)) == 3 * 2
        assert set(seen) <= set(ahead_of_it)
