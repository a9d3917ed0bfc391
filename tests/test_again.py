"""A call like an earlier one passes the addresses of its own tensors, and everything else as the first call did."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tq
from tq.bench.cases import static_inputs
from tq.kernels import launch, plan


class Recorder:
    """Stands where the kernel and its compiled form stand, and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def __getitem__(self, grid: Any) -> Recorder:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Recorder:
        self.calls.append(leaves(arguments))
        return self


def leaves(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, tuple) else [value]


def address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def recorder(monkeypatch):
    standing = Recorder()
    monkeypatch.setattr(launch, "quantize_rows_kernel", standing)
    monkeypatch.setattr(launch, "check_device", lambda op, device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(plan, "_plans", {})
    return standing


SCHEMES = ("fp8_tensor", "fp8_token", "fp8_group128_ue8m0", "int8_token_azp", "nvfp4")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("producer", list(tq.PRODUCERS))
@pytest.mark.parametrize("shape", ["rows", "three_dimensions"])
def test_the_second_call_passes_its_own_addresses(recorder, producer, scheme, shape):
    found = tq.PRODUCERS[producer]

    def arguments_and_options() -> tuple[tuple, dict[str, Any]]:
        arguments, options = found.example(6, 384, torch.bfloat16, "cpu")
        options |= {"return_unquantized": True, **static_inputs(scheme, "cpu")}
        if shape == "rows":
            return arguments, options

        def split(value: Any) -> Any:
            rows = isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[0] == 6
            return value.unflatten(0, (2, 3)) if rows else value

        return tuple(map(split, arguments)), {name: split(value) for name, value in options.items()}

    kept = []
    for _ in range(3):
        arguments, options = arguments_and_options()
        made = found(*arguments, scheme=scheme, **options)
        kept.append((arguments, options, made))
    assert len(recorder.calls) == 3
    for (arguments, options, made), passed in zip(kept[1:], recorder.calls[1:], strict=True):
        (known,) = plan._plans.values()
        expected = leaves(launch.kernel_arguments(plan.fill(known, arguments, options), known.launch))
        mine = {address(tensor) for tensor in (*arguments, *options.values()) if isinstance(tensor, torch.Tensor)}
        outputs = [made[0].data, made[0].scale, made[0].zero_point, *made[1:]]
        mine_out = {address(tensor) for tensor in outputs if isinstance(tensor, torch.Tensor)} - mine
        seen = set()
        for want, got in zip(expected, passed, strict=True):
            if not isinstance(want, torch.Tensor):
                assert got is want or got == want
            elif any(lies_in(want, tensor) for tensor in (*arguments, *options.values())):
                assert got == want.data_ptr()
            else:
                assert got in mine_out
                seen.add(got)
        assert seen == mine_out


def lies_in(part: torch.Tensor, whole: Any) -> bool:
    """Whether `part` is a view of `whole`."""
    return isinstance(whole, torch.Tensor) and part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_tensor_given_twice_is_found_twice(recorder):
    """The residual written in place in one call, into a tensor of its own in the next: two descriptions or one."""
    weight = torch.ones(384)
    for _ in range(2):
        x, residual, other = (torch.randn(6, 384) for _ in range(3))
        for out in (residual, other):
            _, new = tq.rms_norm(x, weight, scheme="fp8_token", residual=residual, residual_out=out)
            assert new is out
            passed = recorder.calls[-1]
            addresses = {address(value) for value in passed}
            assert {x.data_ptr(), weight.data_ptr(), residual.data_ptr(), out.data_ptr()} <= addresses


def test_an_offset_view_is_passed_at_its_offset(recorder):
    for _ in range(2):
        x = torch.randn(8, 400)
        tq.quantize(x[2:, 16:], scheme="fp8_token")
        assert x[2:, 16:].data_ptr() in {address(value) for value in recorder.calls[-1]}
