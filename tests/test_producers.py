"""Every producer against its formula in float64: dtypes, odd sizes, strides, options, roundings, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from comparing import assert_same_bits
from formulas import FORMULAS, float64
from helpers import DEVICE, FORMATS, Case, in_nan_memory, unrounded

import tq
from tq.kernels import tuning

E4M3 = FORMATS["e4m3"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = torch.finfo(FP32).eps
SCHEMES = ("fp8_tensor", "fp8_token", "fp8_group128")

# Options that a producer's example leaves at their defaults, one form a line.
FORMS: dict[str, list[dict[str, Any]]] = {
    "fatrelu_mul": [{"threshold": 0.5}, {"threshold": -0.25}],
    "gated_rms_norm": [
        {"norm_before_gate": False},
        {"activation": "sigmoid"},
        {"activation": "sigmoid", "norm_before_gate": False, "group_size": 16},
        {"group_size": 32},
    ],
    "gelu": [{"approximate": "tanh"}],
    "gelu_mul": [{"approximate": "tanh"}],
    "qk_norm_rope": [{"interleaved": True}, {"q_heads": 1}, {"q_heads": 0, "interleaved": True}],
    "swiglu_oai": [{"interleaved": False}, {"limit": 0.5}, {"alpha": 1.0, "limit": 1.5, "interleaved": False}],
}
ALL_FORMS = [(name, form) for name in tq.PRODUCERS for form in [{}, *FORMS.get(name, [])]]


def assert_is_formula(case: Case, got: Any = None) -> None:
    """Within half a step of the code of the formula's y at the scale stored, which is its amax / 448."""
    activation = (got or case.run()).activation
    y = FORMULAS[case.producer.name](*case.arguments, **{k: v for k, v in case.options.items() if k != "rounding"})
    y = y.reshape(-1, case.hidden_size)
    groups = case.scheme.groups(case.hidden_size)
    scales = float64(activation.scales())
    if case.scheme.dynamic:
        amax = np.abs(y).reshape(len(y), groups, -1).max(-1)
        assert np.allclose(scales, np.maximum(amax / 448, case.scheme.min_scale), rtol=2e-5), f"{case}: scales"
    scale = np.broadcast_to(scales, (len(y), groups)).repeat(case.hidden_size // groups, 1)
    codes = activation.data.view(torch.uint8).cpu().numpy().reshape(y.shape)
    spacing = E4M3.spacing(np.minimum(np.abs(y) / scale, 448)) * scale
    error = np.abs(E4M3.decode(codes) * scale - y)
    # The fp32 error of y on top: of a sum of near numbers it is one of the largest.
    slack = 2e-5 * np.abs(y) + 4 * EPS * np.maximum(1.0, np.abs(y).max(-1, keepdims=True))
    assert (error <= spacing / 2 + slack).all(), f"{case}: {(error / spacing).max()} steps"


def make(name: str, form: dict[str, Any], scheme: str, rows: int, size: int, dtype=BF16) -> Case:
    case = Case(tq.PRODUCERS[name], tq.SCHEMES[scheme], rows, size, dtype)
    case.options.update(form)
    case.extra = unrounded(case.producer)
    return case


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("name", "form"), ALL_FORMS, ids=str)
def test_is_its_formula(name, form, scheme, dtype):
    size = 384 if scheme == "fp8_group128" else 160
    assert_is_formula(make(name, form, scheme, 5, size, dtype))


@pytest.mark.parametrize("size", [1, 2, 24, 96, 193, 576, 1000])
@pytest.mark.parametrize("name", tq.PRODUCERS)
def test_odd_sizes_and_strides(name, size):
    case = make(name, {}, "fp8_token", 3, size)
    if size == 1:  # whose distance to its mean is 0
        case.options.pop("residual", None)
    got = case.run()
    assert_is_formula(case, got)
    case.change_rows(in_nan_memory)
    assert_same_bits(case.run().codes, got.codes, case)


@pytest.mark.parametrize("name", tq.PRODUCERS)
def test_without_what_may_be_left_out(name):
    for left_out in ((option,) for option in tq.PRODUCERS[name].optional):
        case = make(name, {}, "fp8_token", 3, 96)
        for option in left_out:
            case.options.pop(option)
        assert_is_formula(case)


def test_specials_of_activations():
    """NaN stays NaN where a maximum would lose it; bounds are reached."""
    nan, inf = float("nan"), float("inf")
    gate = torch.tensor([[nan, 1.0, inf, -1.0, 0.5, -inf, 100.0, -0.0]], device=DEVICE)
    scale = torch.ones(1, device=DEVICE)

    def codes(name, x, **options):
        made = tq.PRODUCERS[name](x, scheme="fp8_tensor", scale=scale, **options)
        return made.data.view(torch.uint8)[0].tolist()

    def encoded(*values):
        return E4M3.encode(np.array(values)).tolist()

    assert codes("relu2", gate) == encoded(nan, 1.0, inf, 0.0, 0.25, 0.0, 1e4, 0.0)
    both = torch.cat([gate, torch.ones_like(gate)], 1)
    assert codes("fatrelu_mul", both, threshold=0.5) == encoded(nan, 1.0, inf, 0.0, 0.0, 0.0, 100.0, 0.0)
    pairs = torch.tensor([[nan, 1.0, 1.0, nan, inf, inf, 100.0, -100.0, -100.0, 3.0]], device=DEVICE)
    assert codes("swiglu_oai", pairs) == encoded(nan, nan, 8 * 7.0, -6 * 7.0, -0.0)


@pytest.mark.parametrize("group_size", [8, 64, 192, None])
def test_weights_that_groups_share(group_size):
    """As the same weight for every group, given whole; a group that is the row is the row."""
    x, gate = torch.randn(2, 5, 192, device=DEVICE).bfloat16()
    weight = torch.rand(group_size or 192, device=DEVICE).bfloat16()
    got = tq.gated_rms_norm(x, gate, weight, scheme="fp8_token", group_size=group_size)
    whole = weight.repeat(192 // len(weight))
    want = tq.gated_rms_norm(x, gate, whole, scheme="fp8_token", group_size=group_size)
    assert_same_bits(got.data, want.data)
    assert_same_bits(got.scale, want.scale)
    if group_size == 192:
        want = tq.gated_rms_norm(x, gate, whole, scheme="fp8_token")
        assert_same_bits(got.data, want.data)


@pytest.mark.parametrize(("name", "scheme"), [(n, s) for n in ("gated_rms_norm", "qk_norm_rope") for s in SCHEMES])
def test_means_of_groups_however_rows_are_cut(name, scheme):
    """Of halves of small integers the sum of squares is exact: the same bits however rows are cut, one program for
    several rows or several for one included."""
    case = Case(tq.PRODUCERS[name], tq.SCHEMES[scheme], 6, 640)

    def halves(tensor):
        return (torch.randint(-6, 7, tensor.shape, device=DEVICE) / 2).to(tensor.dtype)

    case.change_rows(lambda rows: rows if rows.shape[-1] != 640 else halves(rows))
    want = case.run()
    configs = [(4, 128, 5, 4), (2, 256, 3, 4), (8, 1024, 1, 4)]
    if scheme != "fp8_token":
        configs += [(1, 128, 1, 4), (4, 256, 1, 4), (2, 128, 2, 1), (2, 32, 1, 1)]
    for config in configs:
        with tuning.force(tuning.RowConfig(*config)):
            got = case.run()
        assert_same_bits(got.codes, want.codes, f"{case} {config}")
        assert_same_bits(got.activation.scale, want.activation.scale, f"{case} {config}")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (64, 32), (128, 24), (16, 2), (32, 0), (128, 8)])
def test_rotary_sizes(head_size, rotary, interleaved):
    """Also of queries in the middle of qkv, positions of both dtypes and of x's shape, and no keys."""
    heads, tokens = 5, 6
    qkv = torch.randn(tokens, (heads + 3) * head_size, device=DEVICE).bfloat16()
    x = qkv[:, head_size : (heads + 1) * head_size]
    weights = torch.rand(2, head_size, device=DEVICE).bfloat16()
    cache = torch.randn(40, rotary, device=DEVICE)
    positions = torch.randint(40, (tokens,), device=DEVICE)
    for k_weight, q_heads in ((weights[1], 4), (None, None)):
        case = Case(tq.PRODUCERS["qk_norm_rope"], tq.SCHEMES["fp8_token"], tokens, heads * head_size)
        case.arguments = (x, weights[0], k_weight, positions, cache, 1e-5)
        case.options = {"q_heads": q_heads, "interleaved": interleaved}
        case.extra = {"rounding": "none"}
        want = case.run()
        assert_is_formula(case, want)
        case.arguments = (x.unflatten(0, (2, 3)), weights[0], k_weight, positions.int().view(2, 3), cache, 1e-5)
        assert_same_bits(case.run().codes.view(tokens, -1), want.codes)


def test_a_position_is_that_of_its_row():
    """Position 0 turns nothing; the others each by their own angle."""
    x = torch.randn(4, 64, device=DEVICE).bfloat16()
    weight = torch.ones(64, device=DEVICE).bfloat16()
    angles = torch.arange(8, device=DEVICE)[:, None] * torch.ones(32, device=DEVICE)
    cache = torch.cat([angles.cos(), angles.sin()], 1)
    one = [
        tq.qk_norm_rope(x[i : i + 1], weight, None, torch.tensor([p], device=DEVICE), cache, scheme="fp8_token").data
        for i, p in enumerate((3, 0, 7, 0))
    ]
    positions = torch.tensor([3, 0, 7, 0], device=DEVICE)
    got = tq.qk_norm_rope(x, weight, None, positions, cache, scheme="fp8_token")
    assert_same_bits(got.data, torch.cat(one))
    plain = tq.rms_norm(x, weight, scheme="fp8_token", rounding="after_weight")
    assert_same_bits(got.data[1::2], plain.data[1::2])
    assert (got.data.view(torch.uint8)[::2] != plain.data.view(torch.uint8)[::2]).any(1).all()


def test_layer_norm_of_a_large_mean():
    """The variance is of distances: (mean of squares) - (mean)^2 would be 0 here."""
    x = (torch.arange(64, device=DEVICE) % 2 + 4096.0).expand(3, 64).contiguous()
    activation = tq.layer_norm(x, torch.ones(64, device=DEVICE), scheme="fp8_token")
    want = float64(x) * 2 - 2 * 4096.5
    assert np.allclose(float64(activation.dequantize(FP32)), want, rtol=1e-4)
