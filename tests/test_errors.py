"""What must not run: the error names the op, the argument and what came, and nothing has been written by then."""

from __future__ import annotations

import re

import pytest
import torch
import triton.language as tl
from helpers import ALL_PAIRS, DEVICE, names
from refusals import ANY, HIDDEN, every_producer, example, raises, rows, scalar, weight

import tq
from tq.kernels import launch

every_pair = pytest.mark.parametrize(("producer", "scheme"), ALL_PAIRS)
grouped_schemes = [name for name, scheme in tq.SCHEMES.items() if scheme.group]


@every_producer
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_dtype(producer, dtype):
    (x, *rest), options = example(producer)
    raises(
        TypeError,
        producer,
        "x must be",
        "bfloat16, float16 or float32",
        dtype,
        arguments=(x.to(dtype), *rest),
        **options,
    )


@every_producer
@pytest.mark.parametrize("given", [None, 1.0, [[1.0]]])
def test_no_tensor(producer, given):
    (_, *rest), options = example(producer)
    raises(TypeError, producer, "x must be a tensor", type(given).__name__, arguments=(given, *rest), **options)


@every_producer
def test_last_stride(producer):
    (x, *rest), options = example(producer)
    for wrong in (x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2]):
        assert wrong.shape == x.shape
        parts = "last stride of x must be 1", wrong.stride(), "contiguous()"
        raises(ValueError, producer, *parts, arguments=(wrong, *rest), **options)


@every_producer
def test_leading_dimensions_of_two_strides(producer):
    (x, *rest), _ = example(producer)
    wrong = rows(2, 8, x.shape[-1])[:, :5]
    parts = "leading dimensions of x", "one stride", (2, 5, x.shape[-1]), wrong.stride(), "contiguous()"
    raises(ValueError, producer, *parts, arguments=(wrong, *rest))


@every_producer
@pytest.mark.parametrize("size", [0, 32769])
def test_hidden_size_out_of_range(producer, size):
    (x, *rest), _ = example(producer)
    parts = x.shape[-1] // HIDDEN
    rest = tuple(value.new_ones(size) if isinstance(value, torch.Tensor) else value for value in rest)
    wrong = torch.empty(2, parts * size, dtype=torch.bfloat16, device=DEVICE)
    raises(ValueError, producer, "last size of x must be", "[1, 32768]", parts * size, arguments=(wrong, *rest))


def test_an_odd_last_size_has_no_halves():
    raises(ValueError, "silu_mul", "last size of x must be 2 times", 257, arguments=(rows(2, 257),))


@every_producer
def test_no_dimension(producer):
    (_, *rest), _ = example(producer)
    raises(
        ValueError, producer, "x must have a hidden dimension", "0-d", arguments=(torch.ones((), device=DEVICE), *rest)
    )


@every_producer
@pytest.mark.parametrize("scheme", grouped_schemes)
def test_a_partial_group(producer, scheme):
    group = tq.SCHEMES[scheme].group
    arguments, options = example(producer, scheme, size=group + group // 2)
    parts = f"hidden size must be a multiple of {group}", group + group // 2
    raises(ValueError, producer, *parts, arguments=arguments, scheme=scheme, **options)


@every_producer
@pytest.mark.parametrize("scheme", ["fp8", "", "FP8_TOKEN"])
def test_unknown_scheme(producer, scheme):
    arguments, options = example(producer)
    raises(
        ValueError, producer, "scheme must be one of", ANY, repr(scheme), arguments=arguments, scheme=scheme, **options
    )


@every_producer
@pytest.mark.parametrize("scheme", [None, 3, torch.float8_e4m3fn])
def test_a_scheme_that_is_no_name(producer, scheme):
    arguments, options = example(producer)
    with pytest.raises((TypeError, ValueError), match=f"^{producer}: scheme must be .*{re.escape(repr(scheme))}"):
        tq.PRODUCERS[producer](*arguments, scheme=scheme, **options)


@every_pair
def test_unknown_layout(producer, scheme):
    arguments, options = example(producer, scheme)
    parts = "layout of", scheme, tq.SCHEMES[scheme].layouts[0].name, "'diagonal'"
    raises(ValueError, producer, *parts, arguments=arguments, scheme=scheme, **{**options, "layout": "diagonal"})


@pytest.mark.parametrize("producer", [name for name in tq.PRODUCERS if "rounding" in names(tq.PRODUCERS[name])])
def test_unknown_rounding(producer):
    arguments, options = example(producer)
    parts = "rounding must be one of", "'none'", "'sometimes'"
    raises(ValueError, producer, *parts, arguments=arguments, rounding="sometimes", **options)


@every_producer
def test_unknown_option(producer):
    arguments, options = example(producer)
    raises(TypeError, producer, "speed", arguments=arguments, speed="high", **options)


@every_producer
def test_number_of_arguments(producer):
    arguments, options = example(producer)
    raises(TypeError, producer, "signature", arguments=(*arguments, 1.0, 2.0, 3.0), **options)
    raises(TypeError, producer, "signature", "x", arguments=(), **options)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, w: tq.quantize(x, "fp8_token"), "positional"),
        (lambda x, w: tq.quantize(x), "scheme"),
        (lambda x, w: tq.rms_norm(x, w, 1e-6, "fp8_token"), "positional"),
        (lambda x, w: tq.rms_norm(x, scheme="fp8_token"), "weight"),
        (lambda x, w: tq.rms_norm(x, w, x, 1e-6, scheme="fp8_token"), "positional"),
        (lambda x, w: tq.silu_mul(x, scalar(), scheme="fp8_tensor"), "positional"),
    ],
)
def test_positional_mistakes(call, name):
    """Options are names alone, so Python itself refuses."""
    with pytest.raises(TypeError, match=name):
        call(rows(2, HIDDEN), weight())


@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan")])
def test_eps(eps):
    raises(ValueError, "rms_norm", "eps must be positive", eps, arguments=(rows(2, HIDDEN), weight(), eps))


@pytest.mark.parametrize(
    ("kind", "wrong", "parts"),
    [
        (ValueError, lambda: weight(HIDDEN + 1), ("weight must have shape", (HIDDEN,), (HIDDEN + 1,))),
        (ValueError, lambda: weight().view(1, HIDDEN), ("weight must have shape", (HIDDEN,), (1, HIDDEN))),
        (ValueError, lambda: torch.ones(HIDDEN, dtype=torch.bfloat16, device="meta"), ("weight must be on", "meta")),
        (TypeError, lambda: weight(dtype=torch.float64), ("weight must be", torch.float64)),
        (TypeError, lambda: weight(dtype=torch.int8), ("weight must be", torch.int8)),
        (ValueError, lambda: weight(2 * HIDDEN)[::2], ("stride of weight must be 1", 2, "contiguous()")),
    ],
)
def test_weight(kind, wrong, parts):
    raises(kind, "rms_norm", *parts, arguments=(rows(2, HIDDEN), wrong()))


@pytest.mark.parametrize("wrong", [None, 1.0])
def test_a_weight_that_is_no_tensor(wrong):
    raises(TypeError, "rms_norm", "weight", arguments=(rows(2, HIDDEN), wrong))


@pytest.mark.parametrize("name", ["residual", "residual_out"])
@pytest.mark.parametrize(
    ("kind", "wrong", "parts"),
    [
        (ValueError, lambda: rows(5, HIDDEN), ((4, HIDDEN), (5, HIDDEN))),
        (ValueError, lambda: rows(2, 2, HIDDEN), ((4, HIDDEN), (2, 2, HIDDEN))),
        (ValueError, lambda: rows(HIDDEN, 4).t(), ("last stride", (1, 4))),
        (ValueError, lambda: torch.ones(4, HIDDEN, dtype=torch.bfloat16, device="meta"), ("must be on", "meta")),
        (TypeError, lambda: rows(4, HIDDEN, dtype=torch.float64), (torch.float64,)),
        (TypeError, lambda: rows(4, HIDDEN).int(), (torch.int32,)),
        (TypeError, lambda: 1.0, ("float",)),
    ],
)
def test_residual(name, kind, wrong, parts):
    residual = {"residual": rows(4, HIDDEN), name: wrong()}
    raises(kind, "rms_norm", name, *parts, arguments=(rows(4, HIDDEN), weight()), **residual)


def test_residual_out_of_another_dtype_or_without_residual():
    arguments = rows(4, HIDDEN), weight()
    wrong = rows(4, HIDDEN, dtype=torch.float32)
    parts = "residual_out must be", torch.bfloat16, torch.float32
    raises(TypeError, "rms_norm", *parts, arguments=arguments, residual=rows(4, HIDDEN), residual_out=wrong)
    raises(ValueError, "rms_norm", "residual_out needs residual", "None", arguments=arguments, residual_out=wrong)


def test_residual_out_whose_rows_overlap():
    """Several programs would write one place."""
    out = rows(1, HIDDEN).expand(4, HIDDEN)
    arguments = rows(4, HIDDEN), weight()
    raises(ValueError, "rms_norm", "residual_out", arguments=arguments, residual=rows(4, HIDDEN), residual_out=out)


@every_pair
def test_a_cpu_without_the_interpreter(producer, scheme, monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", tl.constexpr(False))
    arguments, options = example(producer, scheme)
    arguments = tuple(value.cpu() if isinstance(value, torch.Tensor) else value for value in arguments)
    options = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    parts = "on a GPU", "cpu", "TRITON_INTERPRET=1", "use_reference"
    raises(NotImplementedError, producer, *parts, arguments=arguments, scheme=scheme, **options)
    with pytest.raises(NotImplementedError, match=r"^check: .*on a GPU.*cpu"):
        tq.check(producer, *arguments, scheme=scheme, **options)
    with tq.use_reference():
        assert tq.PRODUCERS[producer](*arguments, scheme=scheme, **options) is not None


@every_producer
def test_a_device_without_kernels(producer):
    def elsewhere(value):
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    arguments, options = example(producer)
    arguments = tuple(map(elsewhere, arguments))
    options = {name: elsewhere(value) for name, value in options.items()}
    raises(NotImplementedError, producer, "must be on a GPU", "meta", arguments=arguments, **options)


@pytest.mark.parametrize("scheme", tq.SCHEMES)
def test_check_refuses(scheme):
    arguments, options = example("quantize", scheme)
    activation = tq.quantize(*arguments, scheme=scheme, **options)

    def refuses(message, producer="quantize", scheme=scheme, activation=activation, **more):
        with pytest.raises((ValueError, TypeError), match=message):
            tq.check(producer, *arguments, scheme=scheme, activation=activation, **{**options, **more})

    refuses("^check: producer must be one of .*quantize.*'celu'", producer="celu")
    refuses("^quantize: .*speed", speed=1)
    refuses("^quantize: layout of", layout="diagonal")
    other = tq.quantize(rows(5, HIDDEN), scheme=scheme, **options)
    width = HIDDEN // tq.SCHEMES[scheme].code.per_byte
    refuses(rf"^check: data must .*\({4}, {width}\).*\(5, {width}\)", activation=other)
    another = next(name for name in tq.SCHEMES if tq.SCHEMES[name].dynamic != tq.SCHEMES[scheme].dynamic)
    options = example("quantize", another)[1]
    refuses(f"^check: activation must be of scheme {another}, got {scheme}", scheme=another)


def test_check_changes_nothing_of_the_callers():
    arguments, options = example("rms_norm")
    with pytest.raises(ValueError, match=r"^check: residual_out must be None"):
        tq.check("rms_norm", *arguments, scheme=ANY, residual_out=options["residual"], **options)


def test_names_are_taken_once():
    with pytest.raises(ValueError, match=r"^register_scheme: .*'fp8_token'"):
        tq.register_scheme(tq.Scheme("fp8_token", tq.SCHEMES["fp8_token"].code, "token", tq.SCHEMES["fp8_token"].rule))
    with pytest.raises(ValueError, match=r"^register_producer: .*'quantize'"):
        tq.register_producer(tq.Producer("quantize", load=None, reference=lambda x: None))
    assert tq.SCHEMES["fp8_token"].min_scale > 0 and tq.PRODUCERS["quantize"].load is not None


@pytest.mark.parametrize(
    ("granularity", "group"), [("group", 0), ("group", 48), ("group", -32), ("token", 128), ("tensor", 1), ("row", 0)]
)
def test_schemes_that_make_no_sense(granularity, group):
    code, rule = tq.SCHEMES["fp8_token"].code, tq.SCHEMES["fp8_token"].rule
    with pytest.raises(ValueError, match=r"^Scheme odd: ") as caught:
        tq.Scheme("odd", code, granularity, rule, group=group, min_scale=1e-6)
    assert str(group) in str(caught.value) and repr(granularity) in str(caught.value)


def test_use_reference_ends_with_its_block(monkeypatch):
    calls = []

    def counting(prepared):
        calls.append(prepared)
        return launch.run_reference(prepared)

    monkeypatch.setattr(launch, "launch", counting)
    x = rows(2, HIDDEN)
    with pytest.raises(KeyError), tq.use_reference():
        tq.quantize(x, scheme=ANY)
        raise KeyError
    assert not calls
    tq.quantize(x, scheme=ANY)
    assert len(calls) == 1
