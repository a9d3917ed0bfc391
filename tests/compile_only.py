"""Compiles the template kernels for a named GPU without having one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

MAX_SHARED_MEMORY = 232448


class CompileOnlyDriver:
    """What `triton.compile` asks of a driver, answered for `target`; nothing can be launched with it."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target
        properties = {"max_shared_mem": MAX_SHARED_MEMORY, "multiprocessor_count": 132}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_for(target: GPUTarget, kernel: Any, *args: Any, **options: Any) -> Any:
    """The compiled kernel (its `asm` holds every stage) for `target`; the arguments are those of a launch."""
    triton.runtime.driver.set_active(CompileOnlyDriver(target))
    kernel.device_caches.clear()  # keyed by device alone, and every target is device 0 here
    return kernel.warmup(*args, grid=(1,), **options)
