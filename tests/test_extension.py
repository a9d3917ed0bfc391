"""A producer and a scheme from outside the package get everything that those inside have, from one registration."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from comparing import assert_matches, assert_same_bits
from formulas import float64
from helpers import DEVICE, FORMATS, Case, in_nan_memory

import tq
from tq.kernels import schemes, tuning
from tq.kernels.device import Rows, load_rows, load_vector, load_x
from tq.kernels.layouts import COLUMN_MAJOR, ROW_MAJOR, TMA_ALIGNED
from tq.kernels.producer import Bound, check_like, check_rows


@triton.jit
def load_relu2(args, row, col, mask):
    y = tl.maximum(load_rows(args.x, row, col, mask), 0.0)
    return y * y


def relu2_reference(x, *, precision=torch.float32):
    return tq.Reference(x.reshape(-1, x.shape[-1]).to(precision).relu().square())


class LayerNormArgs(NamedTuple):
    x: Rows
    weight: torch.Tensor
    eps: float


@triton.jit
def add_value(args, loaded, means, total):
    return total + loaded


@triton.jit
def add_squared_distance(args, loaded, means, total):
    return total + (loaded - means[0]) * (loaded - means[0])


@triton.jit
def normalize(args, loaded, means, row, col, mask):
    # Not zero where no column is, which the template has to see to.
    return (loaded - means[0]) * tl.rsqrt(means[1] + args.eps) * (1.0 + load_vector(args.weight, col, mask))


def bind_layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> Bound:
    check_like("test_layer_norm", "weight", weight, x.shape[-1:], x.device)
    return Bound(LayerNormArgs(check_rows("test_layer_norm", "x", x), weight, eps), x.shape, x.dtype, x.device)


def layer_norm_reference(x, weight, eps=1e-5, *, precision=torch.float32):
    x = x.reshape(-1, x.shape[-1]).to(precision)
    centered = x - x.mean(-1, keepdim=True)
    normalized = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return tq.Reference(normalized * (1.0 + weight.to(precision)))


def layer_norm_example(rows, hidden_size, dtype, device):
    # Quarters, whose sum is exact: with so large a mean its last bits would be seen in what is left.
    x, weight = torch.round(4.0 * torch.randn(rows, hidden_size)) / 4.0 + 8.0, torch.rand(hidden_size) - 0.5
    return (x.to(device, dtype), weight.to(device, dtype)), {}


@pytest.fixture(scope="module", autouse=True)
def registered():
    """The whole of what an author writes, and its removal."""
    tq.register_producer(tq.Producer("test_relu2", load=load_relu2, reference=relu2_reference))
    tq.register_producer(
        tq.Producer(
            "test_layer_norm",
            load=load_x,
            moments=(add_value, add_squared_distance),
            apply=normalize,
            bind=bind_layer_norm,
            reference=layer_norm_reference,
            example=layer_norm_example,
        )
    )
    code, rule = tq.SCHEMES["fp8_group128"].code, tq.SCHEMES["fp8_group128"].rule
    layouts = (COLUMN_MAJOR, ROW_MAJOR, TMA_ALIGNED)
    tq.register_scheme(tq.Scheme("test_group32", code, "group", rule, group=32, min_scale=1e-9, layouts=layouts))
    tq.register_scheme(tq.Scheme("test_default_floor", code, "group", rule, group=32))
    yield
    for name in ("test_relu2", "test_layer_norm"):
        tq.PRODUCERS.pop(name)
    for name in ("test_group32", "test_default_floor"):
        tq.SCHEMES.pop(name)


PRODUCERS = ("test_relu2", "test_layer_norm")
PAIRS = [(name, scheme) for name in PRODUCERS for scheme in ("fp8_tensor", "fp8_token", "fp8_group128", "test_group32")]
PAIRS += [(name, "test_group32") for name in tq.PRODUCERS]
every_pair = pytest.mark.parametrize(("producer", "scheme"), PAIRS)


def make(producer, scheme, rows=5, layout=None, dtype=torch.bfloat16) -> Case:
    return Case(tq.PRODUCERS[producer], tq.SCHEMES[scheme], rows, 384, dtype, layout=layout)


def formula(producer, x, weight=None):
    """The value in float64."""
    if producer == "test_relu2":
        return np.maximum(x, 0.0) ** 2
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * (1.0 + weight)


@every_pair
def test_eager_call_and_reference(producer, scheme):
    for dtype in (torch.bfloat16, torch.float32):
        case = make(producer, scheme, dtype=dtype)
        assert_matches(case, case.run(), case.run_reference())
        case.change_rows(in_nan_memory)
        assert_matches(case, case.run(), case.run_reference())


@pytest.mark.parametrize(("producer", "scheme"), [pair for pair in PAIRS if pair[0] in PRODUCERS])
def test_it_is_within_half_a_step_of_float64(producer, scheme):
    case = make(producer, scheme)
    activation = case.run().activation
    tensors = [float64(each) for each in case.arguments]
    y, code = formula(producer, *tensors), FORMATS["e4m3"]
    groups = case.scheme.groups(384)
    scale = np.broadcast_to(float64(activation.scale), (5, groups)).repeat(384 // groups, 1)
    error = np.abs(float64(activation.dequantize(torch.float32)) - y)
    quotient = np.minimum(np.abs(y) / scale, 448)
    assert (error <= code.spacing(quotient) * scale / 2 + 2e-5 * np.abs(y) + 1e-6).all()


@every_pair
def test_check(producer, scheme):
    case = make(producer, scheme)
    activation = case.run().activation
    report = case.check(activation)
    assert report.ok and report.worst_ulps <= 0.5 + 1e-5
    activation.data.view(torch.uint8)[3, 5] ^= 1
    assert case.check(activation).column("wrong_codes").tolist() == [0, 0, 0, 1, 0]


@every_pair
def test_torch_op(producer, scheme):
    case = make(producer, scheme)
    options = {name: value for name, value in case.call_options().items() if value is not None}
    torch.library.opcheck(getattr(torch.ops.tq, producer).default, case.arguments, {"scheme": scheme, **options})


@every_pair
def test_torch_compile(producer, scheme):
    torch._dynamo.reset()
    case = make(producer, scheme)
    options = case.call_options()

    def call(arguments, options):
        made = case.producer(*arguments, scheme=scheme, **options)
        activation, *sides = made if isinstance(made, tuple) else (made,)
        return activation.data, activation.scale, sides

    want = case.run()
    data, scale, _ = torch.compile(call, fullgraph=True, backend="aot_eager")(case.arguments, options)
    assert_same_bits(data, want.activation.data)
    assert_same_bits(scale, want.activation.scale)


@pytest.mark.parametrize("layout", ["row_major", "column_major", "tma_aligned"])
@pytest.mark.parametrize("producer", [*PRODUCERS, *tq.PRODUCERS])
def test_layouts(producer, layout):
    case = make(producer, "test_group32", layout=layout)
    activation = case.run().activation
    assert activation.scale.shape == (5, 12) and activation.layout == layout
    assert activation.scale.stride() == {"row_major": (12, 1), "column_major": (1, 5), "tma_aligned": (1, 8)}[layout]
    assert_matches(case, case.run(), case.run_reference())
    assert make(producer, "test_group32").run().activation.layout == "column_major"


@every_pair
def test_every_tiling(producer, scheme):
    case = make(producer, scheme)
    want = case.run()
    for config in (tuning.RowConfig(4, 128, 3, 4), tuning.RowConfig(8, 128, 4, 4)):
        with tuning.force(config):
            assert_matches(case, case.run(), want)


def test_errors_name_the_new_op():
    for producer in PRODUCERS:
        (x, *rest), _ = tq.PRODUCERS[producer].example(2, 384, torch.bfloat16, DEVICE)
        with pytest.raises(ValueError, match=f"^{producer}: scheme must be one of .*test_group32.*'fp4'"):
            tq.PRODUCERS[producer](x, *rest, scheme="fp4")
        with pytest.raises(TypeError, match=f"^{producer}: x must be"):
            tq.PRODUCERS[producer](x.double(), *rest, scheme="fp8_token")
        with pytest.raises(
            ValueError, match=f"^{producer}: hidden size must be a multiple of 32 for test_group32, got 48"
        ):
            rest = [each[:48] for each in rest]
            tq.PRODUCERS[producer](x[:, :48], *rest, scheme="test_group32")


@pytest.mark.parametrize("producer", ["quantize", "test_relu2"])
def test_zero_groups_under_a_scheme_that_names_no_least_scale(producer):
    """Its codes are zero and its scales positive all the same, and finite values stay finite."""
    x = torch.randn(3, 64, device=DEVICE).abs()
    x[1], x[2, :32] = 0.0, 1e-42
    activation = tq.PRODUCERS[producer](x, scheme="test_default_floor")
    assert activation.scale.isfinite().all() and (activation.scale > 0).all()
    codes = activation.data.view(torch.uint8)
    assert (codes[1] == 0).all() and (codes & 0x7F != 0x7F).all()


def test_a_floor_below_what_divisions_need_is_refused():
    code, rule = tq.SCHEMES["fp8_token"].code, tq.SCHEMES["fp8_token"].rule
    with pytest.raises(ValueError, match="min_scale"):
        tq.Scheme("test_low", code, "token", rule, min_scale=schemes.SMALLEST_MIN_SCALE / 2)


def test_registries_are_what_they_were():
    """Names are taken until they are removed."""
    with pytest.raises(ValueError, match="'test_relu2'"):
        tq.register_producer(tq.PRODUCERS["test_relu2"])
    with pytest.raises(ValueError, match="'test_group32'"):
        tq.register_scheme(tq.SCHEMES["test_group32"])
