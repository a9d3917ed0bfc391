"""Settings of every test: the interpreter where there is no GPU, seeds, and memory that shows what was not written."""

from __future__ import annotations

import os

import pytest
import torch

# Triton decides at import whether it interprets, so this comes before anything that imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_empty = torch.empty


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, and 0xAB in every byte of integers, so that an output which no program wrote differs."""

    def poisoned_empty(*sizes, **options):
        tensor = _empty(*sizes, **options)
        if torch.compiler.is_compiling() or tensor.device.type == "meta" or tensor.requires_grad:
            return tensor
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            return tensor.fill_(float("nan"))
        if tensor.dtype in (torch.uint8, torch.int32):
            return tensor.fill_(0xAB if tensor.dtype == torch.uint8 else -0x54545455)
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.fixture(params=["decided", "repeated"] if not torch.cuda.is_available() else ["repeated"])
def adapter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """The contract's adapter of an engine that is not there; with calls repeated as on a GPU, and without."""
    from contract_fakes import Adapter, repeat_calls

    from tq.contract import route

    if request.param == "repeated" and not torch.cuda.is_available():
        repeat_calls(monkeypatch)
    adapter = Adapter()
    monkeypatch.setattr(route.state, "adapter", adapter)
    return adapter


@pytest.fixture
def layer(adapter, monkeypatch: pytest.MonkeyPatch):
    """A decoder layer of static FP8 that can be paired."""
    from contract_fakes import known_decoder

    return known_decoder(monkeypatch)


@pytest.fixture
def make_packed(monkeypatch, tmp_path):
    """Makes layers with packed states."""
    from packed_fakes import layer_maker

    return layer_maker(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def native():
    """vLLM's packed decode kernels, by kind."""
    from native_steps import native_steps

    yield from native_steps()
