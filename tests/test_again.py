"""A call like an earlier one passes the addresses of its own tensors, and everything else as the first call did."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tq
from tq.bench.cases import static_inputs
from tq.kernels import again, launch, plan


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
    monkeypatch.setattr(plan, "_plans", plan.Plans())
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
    first, *others = (vars(made[0]) for _, _, made in kept)
    for fields in others:
        assert list(fields) == list(first)
        for name, value in first.items():
            assert type(fields[name]) is type(value) and described(fields[name]) == described(value), name


def described(value: Any) -> Any:
    """What two calls of one description have in common."""
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value


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


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, 2 bytes from where a vector load may begin."""
    other = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return other.copy_(tensor)


def test_experts_are_those_of_the_call(recorder):
    for _ in range(3):
        x, counts = torch.randn(2, 6, 384), torch.tensor([3, 6], dtype=torch.int32)
        activation = tq.quantize(x, scheme="fp8_token", tokens_per_expert=counts)
        assert activation.experts.tokens_per_expert is counts and activation.experts.expert_offsets is None
        assert activation.orig_shape == x.shape and counts.data_ptr() in map(address, recorder.calls[-1])


def test_only_on_the_device_that_is_current(recorder, monkeypatch):
    x = torch.randn(6, 384)
    tq.quantize(x, scheme="fp8_token"), tq.quantize(x, scheme="fp8_token")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tq.quantize(x, scheme="fp8_token")
    assert [isinstance(calls[0], int) for calls in recorder.calls] == [False, True, False]


CHANGES = {
    "rows": lambda x, weight, more: ((x[:4], weight), more),
    "a leading dimension": lambda x, weight, more: ((x.view(2, 3, 384), weight), more),
    "a stride": lambda x, weight, more: ((torch.randn(6, 400, dtype=x.dtype)[:, :384], weight), more),
    "an address": lambda x, weight, more: ((shifted(x), weight), more),
    "a dtype": lambda x, weight, more: ((x, weight.float()), more),
    "a number": lambda x, weight, more: ((x, weight, 1e-5), more),
    "an option": lambda x, weight, more: ((x, weight), {**more, "min_scale": 1e-3}),
    "a residual": lambda x, weight, more: ((x, weight), {**more, "residual": x}),
    "the scheme": lambda x, weight, more: ((x, weight), {**more, "scheme": "int8_token"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_is_not_taken_for_an_earlier_one(recorder, monkeypatch, change):
    """One after the other, with two that are alike before and after."""
    whole_way = []
    execute = launch.execute
    monkeypatch.setattr(launch, "execute", lambda *given: whole_way.append(1) or execute(*given))
    x, weight = torch.randn(6, 384).bfloat16(), torch.ones(384, dtype=torch.bfloat16)
    same = (x, weight), {"scheme": "fp8_token"}
    other = CHANGES[change](x, weight, same[1])
    for count, (arguments, options) in ((1, same), (1, same), (2, other), (2, other), (2, same)):
        tq.PRODUCERS["rms_norm"](*arguments, **options)
        assert len(whole_way) == count
    assert recorder.calls[1] != recorder.calls[3] or change in (
        "a type",
        "an address",
        "a dtype",
        "a leading dimension",
    )


@pytest.mark.parametrize("scheme", [["fp8_token"], None, "unknown"])
def test_a_scheme_that_is_none_is_named_as_ever(recorder, scheme):
    x = torch.randn(6, 384)
    tq.quantize(x, scheme="fp8_token"), tq.quantize(x, scheme="fp8_token")
    with pytest.raises((TypeError, ValueError), match="quantize: scheme"):
        tq.quantize(x, scheme=scheme)


class TritonsLauncher:
    """As those of Triton: `launch` is in C."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, packs: bool = False, scratch: int = 0) -> None:
        self.packs, self.profile_scratch_size, self.calls = packs, scratch, []
        self.launch = lambda *given: self.calls.append(given)

    def __call__(self, x, y, z, stream, function, metadata, launched, enter, leave, *arguments):
        scratch = object() if self.profile_scratch_size else None
        rest = (arguments,) if self.packs else arguments
        self.launch(x, y, z, stream, function, False, True, scratch, metadata, launched, enter, leave, *rest)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("scratch", [0, 8])
def test_what_tritons_launcher_passes_on(packs, scratch):
    run = TritonsLauncher(packs, scratch)
    given = [1, 2, 3, again.STREAM, 77, (4, 1, 0), None, None, None]
    launch_it, before, packed = again.passed_on(run, given)
    assert run.calls == [] and packed == (packs and not scratch)
    launch_it(*[5 if value is again.STREAM else value for value in before], *([("a", "b")] if packed else ["a", "b"]))
    (called,) = run.calls
    run(1, 2, 3, 5, 77, (4, 1, 0), None, None, None, "a", "b")
    assert run.calls[1][:7] == called[:7] and run.calls[1][8:] == called[8:]
    assert (launch_it is run) == bool(scratch)
