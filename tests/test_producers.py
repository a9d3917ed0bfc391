"""Every producer against its formula in float64: dtypes, odd sizes, strides, options, roundings, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from formulas import FORMULAS, float64
from helpers import (
    DEVICE,
    FORMATS,
    ROUNDINGS,
    Case,
    assert_same_bits,
    in_nan_memory,
    rounded,
    unrounded,
)

import tq
from tq.kernels import launch, tuning

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


ONCE = [(name, each) for name in ROUNDINGS for each in ("output", "product", "after_weight") if each in ROUNDINGS[name]]


@pytest.mark.parametrize(("name", "rounding"), ONCE)
def test_the_output_is_rounded_once(name, rounding):
    """To bf16, whose values lie on ties of E4M3 under a scale of a power of two, so that codes tell."""
    scale = torch.tensor([0.125], device=DEVICE)
    case = Case(tq.PRODUCERS[name], tq.SCHEMES["fp8_tensor"], 16, 512, BF16, extra={"scale": scale})
    case.options.pop("residual", None)
    y = FORMULAS[name](*case.arguments, **case.options)
    codes = {value: E4M3.encode(value_of * 8.0) for value, value_of in (("none", y), (rounding, rounded(y, BF16)))}
    assert (codes["none"] != codes[rounding]).mean() > 3e-3 or name == "fatrelu_mul"
    for each, want in codes.items():
        case.extra["rounding"] = each
        got = case.run().codes.cpu().numpy()
        # Only what lies beside a tie may differ.
        assert (got != want).sum() <= 3, (each, (got != want).sum())


def with_up(name: str, x: torch.Tensor, value: float) -> torch.Tensor:
    """The input with another up."""
    x = x.clone()
    x[:, 1::2] = value if name == "swiglu_oai" else x[:, 1::2]
    x[:, x.shape[-1] // 2 :] = x[:, x.shape[-1] // 2 :] if name == "swiglu_oai" else value
    return x


@pytest.mark.parametrize("name", ["fatrelu_mul", "gelu_mul", "silu_mul", "swiglu_oai"])
def test_activation_and_product_are_rounded(name):
    scale = torch.tensor([0.125], device=DEVICE)
    extra = {"scale": scale, "rounding": "activation_and_product"}
    case = Case(tq.PRODUCERS[name], tq.SCHEMES["fp8_tensor"], 16, 512, BF16, extra=extra)
    (x,) = case.arguments
    if name == "swiglu_oai":
        activation, factor = FORMULAS[name](with_up(name, x, 0.0)), np.clip(float64(x)[:, 1::2], -7.0, 7.0) + 1.0
    else:
        activation, factor = FORMULAS[name](with_up(name, x, 1.0)), float64(x)[:, 512:]
    want = E4M3.encode(rounded(rounded(activation, BF16) * factor, BF16) * 8.0)
    assert (case.run().codes.cpu().numpy() != want).sum() <= 3


def test_norm_and_output_are_rounded():
    """Position 0 turns nothing, so that what is rounded twice is so once; elsewhere some codes differ."""
    case = Case(tq.PRODUCERS["qk_norm_rope"], tq.SCHEMES["fp8_tensor"], 16, 512, BF16)
    case.extra = {"scale": torch.tensor([0.125], device=DEVICE), "rounding": "output"}
    case.arguments[3][0] = 0
    once = case.run().codes.cpu().numpy()
    case.extra["rounding"] = "norm_and_output"
    twice = case.run().codes.cpu().numpy()
    assert (once[0] == twice[0]).all() and 0.001 < (once != twice).mean() < 0.1
    # The norms rounded, by the formula of a rotation by nothing; then that of the rotation with weights of 1 and the
    # mean of squares of the rounded norms given back.
    x, q_weight, k_weight, positions, cache, eps = case.arguments
    norm = rounded(FORMULAS["qk_norm_rope"](x, q_weight, k_weight, 0 * positions, cache, eps, **case.options), BF16)
    heads, half = norm.reshape(16, -1, 128), 64
    cos_sin = float64(cache)[positions.cpu().numpy()][:, None, :]
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    first, second = heads[..., :half], heads[..., half:]
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1).reshape(16, -1)
    assert (twice != E4M3.encode(rounded(turned, BF16) * 8.0)).sum() <= 3


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


def test_a_gemma_weight_is_added_to_one_in_fp32():
    """1 + 2^-12 is 1 in bf16: its product, with the largest value of a fp32 norm, would be the same code."""
    x = torch.tensor([[1.0, 1.0]], device=DEVICE)
    weight = torch.tensor([2.0**-12, 0.0], device=DEVICE).bfloat16()
    scale = torch.tensor([1.0 / (1.0625 - 2.0**-14)], device=DEVICE)  # 1 lies just below a tie, 1 + 2^-12 above
    made = tq.gemma_rms_norm(x, weight, 1e-20, scheme="fp8_tensor", scale=scale, rounding="none")
    assert made.data.view(torch.uint8)[0].tolist() == E4M3.encode(np.array([1.125, 1.0])).tolist()


def bad(name: str, **changes: Any) -> tuple[tuple, dict[str, Any]]:
    """The example of a producer, one argument or option replaced."""
    arguments, options = tq.PRODUCERS[name].example(4, 256, BF16, DEVICE)
    parameters = tq.PRODUCERS[name].bind.__code__.co_varnames
    given = dict(zip(parameters, arguments, strict=False))
    positional = [changes.pop(key) if key in changes else value for key, value in given.items()]
    return tuple(positional), {**options, **changes}


WEIGHT = torch.ones(255, device=DEVICE)
INTS = torch.arange(4, device=DEVICE)
CACHE = torch.ones(9, 128, device=DEVICE)


@pytest.mark.parametrize(
    ("name", "changes", "kind", "message"),
    [
        ("gelu", {"approximate": "erf"}, ValueError, "approximate must be one of 'none', 'tanh'; got 'erf'"),
        ("gelu_mul", {"approximate": True}, ValueError, "approximate must be one of"),
        ("gelu_mul", {"x": torch.ones(2, 257, device=DEVICE)}, ValueError, "last size of x must be 2 times"),
        ("swiglu_oai", {"x": torch.ones(2, 257, device=DEVICE)}, ValueError, "last size of x must be 2 times"),
        ("swiglu_oai", {"limit": 0.0}, ValueError, "limit must be positive, got 0.0"),
        ("swiglu_oai", {"limit": float("nan")}, ValueError, "limit must be positive, got nan"),
        ("swiglu_oai", {"alpha": float("inf")}, ValueError, "alpha must be finite, got inf"),
        ("fatrelu_mul", {"threshold": float("nan")}, ValueError, "threshold must be finite, got nan"),
        ("gemma_rms_norm", {"weight": WEIGHT}, ValueError, "weight must have shape"),
        ("gemma_rms_norm", {"eps": 0.0}, ValueError, "eps must be positive"),
        ("gemma_rms_norm", {"rounding": "before_and_after_weight"}, ValueError, "rounding must be one of"),
        ("layer_norm", {"bias": WEIGHT}, ValueError, "bias must have shape"),
        ("layer_norm", {"bias": torch.ones(256, device=DEVICE).double()}, TypeError, "bias must be bfloat16"),
        ("layer_norm", {"bias": torch.ones(512, device=DEVICE)[::2]}, ValueError, "stride of bias must be 1"),
        ("layer_norm", {"residual": WEIGHT}, ValueError, "residual must have shape"),
        ("gated_rms_norm", {"gate": torch.ones(4, 128, device=DEVICE)}, ValueError, "gate must have shape"),
        ("gated_rms_norm", {"weight": WEIGHT[:64]}, ValueError, "weight must have shape (256,), got (64,)"),
        ("gated_rms_norm", {"weight": 1.0}, TypeError, "weight must be a tensor"),
        ("gated_rms_norm", {"group_size": 48}, ValueError, "group_size must be a power of two that divides"),
        ("gated_rms_norm", {"group_size": 512}, ValueError, "group_size must be a power of two that divides"),
        ("gated_rms_norm", {"group_size": 0}, ValueError, "group_size must be a power of two that divides"),
        ("gated_rms_norm", {"group_size": -8}, ValueError, "group_size must be a power of two that divides"),
        ("gated_rms_norm", {"activation": "relu"}, ValueError, "activation must be one of 'silu', 'sigmoid'"),
        ("gated_rms_norm", {"eps": -1.0}, ValueError, "eps must be positive"),
        ("qk_norm_rope", {"q_weight": WEIGHT[:96]}, ValueError, "size of q_weight, a head's, must be a power of two"),
        ("qk_norm_rope", {"q_weight": WEIGHT[:0]}, ValueError, "size of q_weight, a head's, must be a power of two"),
        ("qk_norm_rope", {"q_weight": None}, TypeError, "q_weight must be a tensor"),
        ("qk_norm_rope", {"k_weight": WEIGHT[:64]}, ValueError, "k_weight must have shape (128,), got (64,)"),
        ("qk_norm_rope", {"k_weight": None, "q_heads": 1}, ValueError, "q_heads must be None or 2"),
        ("qk_norm_rope", {"q_heads": 3}, ValueError, "q_heads must be in [0, 2]"),
        ("qk_norm_rope", {"q_heads": None}, ValueError, "q_heads must be in [0, 2]"),
        ("qk_norm_rope", {"positions": INTS[:3]}, ValueError, "positions must have shape (4,), got (3,)"),
        ("qk_norm_rope", {"positions": INTS.float()}, TypeError, "positions must be an int32 or int64 tensor"),
        ("qk_norm_rope", {"positions": 3}, TypeError, "positions must be an int32 or int64 tensor, got int"),
        ("qk_norm_rope", {"positions": INTS.repeat_interleave(2)[::2]}, ValueError, "positions must be contiguous"),
        ("qk_norm_rope", {"positions": INTS.to("meta")}, ValueError, "positions must be on"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE[:, :127]}, ValueError, "the rotary size even and at most"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE.repeat(1, 2)}, ValueError, "the rotary size even and at most"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE[0]}, ValueError, "cos_sin_cache must be [positions, rotary size]"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE[:, ::2]}, ValueError, "its last stride 1"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE.double()}, TypeError, "cos_sin_cache must be a bfloat16, float16"),
        ("qk_norm_rope", {"cos_sin_cache": CACHE.to("meta")}, ValueError, "cos_sin_cache must be on"),
        ("qk_norm_rope", {"eps": 0.0}, ValueError, "eps must be positive"),
    ],
)
def test_bad_input(name, changes, kind, message, monkeypatch):
    """Raises before any launch."""
    monkeypatch.setattr(launch, "quantize_rows_kernel", None)
    arguments, options = bad(name, **changes)
    with pytest.raises(kind) as caught:
        tq.PRODUCERS[name](*arguments, scheme="fp8_token", **options)
    assert str(caught.value).startswith(f"{name}: ") and message in str(caught.value), caught.value


def test_what_each_replaces_is_named():
    """The op, and the quantizer after it where no fused op has both."""
    named = {
        "silu_mul": "_C.silu_and_mul",
        "gelu_mul": "_C.gelu_(tanh_)and_mul",
        "swiglu_oai": "_C.swigluoai_and_mul",
        "fatrelu_mul": "_C.fatrelu_and_mul",
        "relu2": "_C.relu_squared",
        "qk_norm_rope": "_C.fused_qk_norm_rope",
    }
    for name, op in named.items():
        replaced = tq.PRODUCERS[name].replaces(tq.SCHEMES["fp8_token"])
        assert replaced.op == f"{op} + _C.dynamic_per_token_scaled_fp8_quant"
        assert replaced.options["rounding"] in ROUNDINGS[name]
