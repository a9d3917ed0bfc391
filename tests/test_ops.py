"""The torch ops: schemas, fakes, and torch.compile, which must give the bits of an eager call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import assert_matches, assert_same_bits
from helpers import DEVICE, ONE_EACH, PAIR_LAYOUTS, PAIRS, Case, in_nan_memory
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import tq

# Producers, and those that can write into a given tensor once more with one.
FORMS = {name: (False, True) if tq.PRODUCERS[name].mutates else (False,) for name in tq.PRODUCERS}
every_form = pytest.mark.parametrize(
    ("producer", "scheme", "out"), [(producer, scheme, out) for producer, scheme in PAIRS for out in FORMS[producer]]
)
every_layout = pytest.mark.parametrize(
    ("producer", "scheme", "layout", "out"), [(*pair, out) for pair in PAIR_LAYOUTS for out in FORMS[pair[0]]]
)
SHAPES = {
    "5": (5, None),
    "0": (0, None),
    "3d": (6, lambda rows: rows.view(2, 3, -1)),
    "strided": (5, in_nan_memory),
    "empty_3d": (0, lambda rows: rows.view(2, 0, rows.shape[-1])),
}


# Every layout in one shape, and every other shape in the layout with the oddest strides.
SHAPED = [
    (producer, scheme, layout, out, shape)
    for producer, scheme, layout in PAIR_LAYOUTS
    for out in FORMS[producer]
    for shape in (SHAPES if layout == tq.SCHEMES[scheme].layouts[-1].name else ("5",))
]


def make(producer: str, scheme: str, layout: str, rows: int, out: bool, change: Any = None) -> Case:
    found = tq.SCHEMES[scheme]
    case = Case(tq.PRODUCERS[producer], found, rows, max(2 * found.group, 64), layout=layout)
    if out:
        add_outputs(case)
    return case if change is None else case.change_rows(change)


def add_outputs(case: Case) -> Case:
    """Gives a tensor for every side output, which may not be the one that is read."""
    for name in case.producer.mutates:
        case.options[name] = torch.zeros_like(case.options[name.removesuffix("_out")])
    return case


def op_and_arguments(case: Case, out: bool) -> tuple[Any, tuple, dict[str, Any]]:
    op = getattr(torch.ops.tq, case.producer.name + ("_out" if out else "")).default
    options = {name: value for name, value in case.call_options().items() if value is not None}
    return op, case.arguments, {"scheme": case.scheme.name, **options}


def tensors(value: Any) -> list[torch.Tensor]:
    found, _ = torch.utils._pytree.tree_flatten(value)
    return [each for each in found if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize(
    ("producer", "scheme", "out", "rows"),
    [
        (producer, scheme, out, rows)
        for producer, scheme in ONE_EACH
        for out in FORMS[producer]
        for rows in ((5, 0) if scheme in ("fp8_tensor", "fp8_token", "mxfp8") else (5,))
    ],
)
def test_opcheck(producer, out, scheme, rows):
    """The schema tells what is mutated and aliased, the fake agrees, and tracing with dynamic shapes does too."""
    op, arguments, options = op_and_arguments(make(producer, scheme, None, rows, out), out)
    torch.library.opcheck(op, arguments, options)


@pytest.mark.parametrize(("producer", "scheme", "layout", "out", "shape"), SHAPED)
def test_the_fake_says_what_the_kernel_returns(producer, out, scheme, layout, shape):
    rows, change = SHAPES[shape]
    op, arguments, options = op_and_arguments(make(producer, scheme, layout, rows, out, change), out)
    real = tensors(op(*arguments, **options))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake_arguments, fake_options = torch.utils._pytree.tree_map_only(
            torch.Tensor, mode.from_tensor, (arguments, options)
        )
        fake = tensors(op(*fake_arguments, **fake_options))
    assert len(real) == len(fake) > 0
    for mine, theirs in zip(real, fake, strict=True):
        for name in ("shape", "dtype", "device", "layout"):
            assert getattr(mine, name) == getattr(theirs, name), name
        assert mine.stride() == theirs.stride() and mine.storage_offset() == theirs.storage_offset()
        assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    given = {each.untyped_storage().data_ptr() for each in tensors((arguments, options)) if each.numel()}
    assert not given & {each.untyped_storage().data_ptr() for each in real if each.numel()}, "an output is an input"


@every_layout
def test_the_op_is_the_call(producer, out, scheme, layout):
    case = make(producer, scheme, layout, 5, out)
    want = case.run()
    sides = [side.clone() for side in want.side_outputs]
    op, arguments, options = op_and_arguments(add_outputs(case) if out else case, out)
    codes, *rest = op(*arguments, **options)
    assert_same_bits(codes, want.codes)
    computed = [want.activation.scale if case.scheme.dynamic else None]
    computed += [want.activation.zero_point if case.scheme.dynamic else None]
    for tensor in computed:
        if tensor is not None:
            mine = rest.pop(0)
            assert mine.stride() == tensor.stride()
            assert_same_bits(mine.view(tensor.dtype), tensor)
        elif out:
            assert rest.pop(0).numel() == 0  # an op that mutates cannot leave out what there is none of
    written = [options[name] for name in case.producer.mutates] if out else rest
    for mine, theirs in zip(written, sides, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("producer", tq.PRODUCERS)
def test_what_a_schema_mutates(producer):
    """Exactly the declared arguments, in the `_out` op alone."""
    for form in ("", "_out") if tq.PRODUCERS[producer].mutates else ("",):
        schema = getattr(torch.ops.tq, producer + form).default._schema
        mutated = {each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write}
        assert mutated == (set(tq.PRODUCERS[producer].mutates) if form else set())


def compiled_call(case: Case, backend: Any) -> Any:
    """A compiled function of (tensor arguments, tensor options) -> (data, scale, side outputs)."""
    producer, scheme = case.producer, case.scheme.name
    constants = {name: value for name, value in case.call_options().items() if not isinstance(value, torch.Tensor)}
    numbers = [value for value in case.arguments if not isinstance(value, torch.Tensor)]

    def call(arguments, options):
        made = producer(*arguments, *numbers, scheme=scheme, **options, **constants)
        activation, *sides = made if isinstance(made, tuple) else (made,)
        return activation.data, activation.scale, sides

    return torch.compile(call, fullgraph=True, backend=backend)


def tensor_options(case: Case) -> dict[str, torch.Tensor]:
    return {name: value for name, value in case.call_options().items() if isinstance(value, torch.Tensor)}


@every_form
def test_compiled_equals_eager(producer, out, scheme):
    torch._dynamo.reset()
    case = make(producer, scheme, tq.SCHEMES[scheme].layouts[-1].name, 5, out)
    want = case.run()
    sides = [side.clone() for side in want.side_outputs]
    options = tensor_options(add_outputs(case) if out else case)
    data, scale, got_sides = compiled_call(case, "aot_eager")(tensors(case.arguments), options)
    assert_same_bits(data, want.activation.data)
    assert_same_bits(scale, want.activation.scale)
    assert scale.stride() == want.activation.scale.stride() and data.stride() == want.activation.data.stride()
    for name in case.producer.mutates if out else ():
        assert_same_bits(options[name], sides[0])
    for mine, theirs in zip(got_sides, sides, strict=True):
        assert_same_bits(mine, theirs)


@pytest.mark.parametrize("scheme", tq.SCHEMES)
@pytest.mark.parametrize("producer", [name for name in tq.PRODUCERS if tq.PRODUCERS[name].mutates])
def test_compiled_in_place(producer, scheme):
    """The tensor that is read is the one that is written, once; what follows in the graph sees the new values."""
    torch._dynamo.reset()
    case = make(producer, scheme, None, 5, False)
    want = case.run()
    source = case.producer.mutates[0].removesuffix("_out")
    place = case.options[source].clone()

    def step(arguments, place):
        options = {**tensor_options(case), source: place, case.producer.mutates[0]: place}
        activation, side = case.producer(*arguments, scheme=scheme, **options)
        return activation.data, activation.scale, side + 1.0, place * 2.0

    data, scale, side, doubled = torch.compile(step, fullgraph=True, backend="aot_eager")(case.arguments, place)
    assert_same_bits(data, want.activation.data)
    assert_same_bits(scale, want.activation.scale)
    assert_same_bits(place, want.side_outputs[0])
    assert_same_bits(side, want.side_outputs[0] + 1.0)
    assert_same_bits(doubled, want.side_outputs[0] * 2.0)


@pytest.mark.parametrize(("producer", "scheme", "out"), [(*pair, out) for pair in ONE_EACH for out in FORMS[pair[0]]])
def test_one_graph_serves_every_number_of_rows(producer, out, scheme):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layout = tq.SCHEMES[scheme].layouts[-1].name
    call = None
    for rows in (5, 6, 33, 128):
        case = make(producer, scheme, layout, rows, out)
        want = case.run()
        options = tensor_options(add_outputs(case) if out else case)
        call = call or compiled_call(case, counter)
        for tensor in filter(case.is_of_rows, [*case.arguments, *options.values()]):
            torch._dynamo.mark_dynamic(tensor, 0)
        data, scale, sides = call(tensors(case.arguments), options)
        assert_same_bits(data, want.activation.data)
        assert_same_bits(scale, want.activation.scale)
        assert scale.stride() == want.activation.scale.stride()
        for mine, theirs in zip(sides, want.side_outputs, strict=True):
            assert_same_bits(mine, theirs)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("producer", "scheme", "out"), [(*pair, out) for pair in ONE_EACH for out in FORMS[pair[0]]])
def test_compiled_over_no_rows(producer, out, scheme):
    torch._dynamo.reset()
    case = make(producer, scheme, None, 0, out)
    want = case.run()
    data, scale, sides = compiled_call(case, "aot_eager")(tensors(case.arguments), tensor_options(case))
    wanted = [want.activation.data, want.activation.scale, *want.side_outputs]
    for mine, theirs in zip([data, scale, *sides], wanted, strict=True):
        assert_same_bits(mine, theirs)
        assert mine.stride() == theirs.stride()


def test_inductor_between_other_operations():
    """What comes before and after the op is fused as ever; the residual written in place is what comes after."""
    torch._dynamo.reset()
    x, residual = torch.randn(2, 5, 128, device=DEVICE).bfloat16()
    weight = torch.ones(128, dtype=torch.bfloat16, device=DEVICE)

    def block(x, residual):
        activation, residual = tq.rms_norm(
            x * 2.0, weight, scheme="fp8_group128", layout="tma_aligned", residual=residual, residual_out=residual
        )
        return activation.data.view(torch.uint8), activation.scale * 1.0, residual + 1.0

    wanted_residual = residual.clone()
    want = block(x, wanted_residual)
    for mine, theirs in zip(torch.compile(block, fullgraph=True)(x, residual), want, strict=True):
        assert_same_bits(mine.contiguous(), theirs.contiguous())
    assert_same_bits(residual, wanted_residual)


@pytest.mark.parametrize("producer", tq.PRODUCERS)
def test_a_compiled_call_raises_what_an_eager_one_does(producer):
    torch._dynamo.reset()
    case = make(producer, "fp8_token", None, 5, False)
    for options, message in (
        ({"layout": "diagonal"}, "layout of fp8_token must be"),
        ({"min_scale": 0.0}, "min_scale must"),
    ):
        case.extra = options
        with pytest.raises(ValueError, match=f"^{producer}: {message}"):
            case.run()
        with pytest.raises(Exception, match=message):
            compiled_call(case, "aot_eager")(tensors(case.arguments), tensor_options(case))


def test_comparisons_are_of_bits():
    """What these tests rest on: NaN equals itself, zeros of two signs differ, one wrong code is found and named."""
    nan = torch.tensor([float("nan")])
    assert_same_bits(nan, nan.clone())
    with pytest.raises(AssertionError):
        assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    case = make("quantize", "fp8_token", None, 5, False)
    wrong = case.run()
    wrong.codes[3, 7] ^= 1
    with pytest.raises(AssertionError, match=r"\(3, 7\)"):
        assert_matches(case, wrong, case.run())
