"""For the tests of producers and schemes: float64 oracles, cases made from a producer's example, exact comparisons.

Nothing here computes with tq's kernels; what is compared is either bits or values in units of a code's spacing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from formulas import FORMULAS, float64

import tq

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
STATIC_SCALE = 0.0625 * 1.1  # no power of two; the examples stay inside the range of the code
# Producers whose y has one right value in fp32. The order of a sum and the last bit of an exponential are free.
EXACT_PRODUCERS = {"quantize"}
# Where each may round: the values of `rounding`.
MUL = "none", "product", "activation_and_product"
ROUNDINGS = {
    "fatrelu_mul": MUL,
    "gated_rms_norm": ("none", "output"),
    "gelu": ("none", "output"),
    "gelu_mul": MUL,
    "gemma_rms_norm": ("none", "after_weight"),
    "layer_norm": ("none", "after_weight"),
    "qk_norm_rope": ("none", "output", "norm_and_output"),
    "relu2": ("none", "output"),
    "rms_norm": ("none", "after_weight", "before_and_after_weight"),
    "silu": ("none", "output"),
    "silu_mul": MUL,
    "swiglu_oai": MUL,
}
FLT_MAX = np.finfo(np.float32).max

SCHEME_LAYOUTS = [(scheme.name, layout.name) for scheme in tq.SCHEMES.values() for layout in scheme.layouts]


def covering_pairs() -> list[tuple[str, str]]:
    """Every producer with a scheme of each granularity, and every other scheme with a producer in turn.

    What a pair does follows from its parts, so that not all of them need be tried everywhere.
    """
    producers, of_granularity = list(tq.PRODUCERS), {}
    for name, scheme in tq.SCHEMES.items():
        of_granularity.setdefault(scheme.granularity, name)
    others = [name for name in tq.SCHEMES if name not in of_granularity.values()]
    pairs = [(producer, scheme) for producer in producers for scheme in of_granularity.values()]
    return pairs + [(producers[i % len(producers)], scheme) for i, scheme in enumerate(others)]


PAIRS = covering_pairs()
# Every scheme with one producer, the producers in turn.
ONE_EACH = [(list(tq.PRODUCERS)[i % len(tq.PRODUCERS)], scheme) for i, scheme in enumerate(tq.SCHEMES)]
ALL_PAIRS = [(producer, scheme) for producer in tq.PRODUCERS for scheme in tq.SCHEMES]
PAIR_LAYOUTS = [(producer, scheme, layout.name) for producer, scheme in PAIRS for layout in tq.SCHEMES[scheme].layouts]


class SmallFloat(NamedTuple):
    """A float format of one byte, sign bit on top, in float64 arithmetic. `largest`: code of the largest value."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: int
    nan: int

    def values(self) -> np.ndarray:
        """The values of the codes 0 to `largest`, ascending."""
        fields = [divmod(code, 1 << self.mantissa_bits) for code in range(self.largest + 1)]
        unit = 2.0**-self.mantissa_bits
        return np.array(
            [
                mantissa * unit * 2.0 ** (1 - self.bias)
                if exponent == 0
                else (1.0 + mantissa * unit) * 2.0 ** (exponent - self.bias)
                for exponent, mantissa in fields
            ]
        )

    def spacing(self, value: np.ndarray) -> np.ndarray:
        """Distance of the format's values in the binade of `value`."""
        value = np.asarray(value, np.float64)
        exponent = np.where(value == 0.0, 1 - self.bias, np.frexp(value)[1] - 1)
        return np.ldexp(1.0, np.maximum(exponent, 1 - self.bias) - self.mantissa_bits)

    def encode(self, value: np.ndarray) -> np.ndarray:
        """The code nearest to `value`, ties to the even one, saturating; a NaN of either sign gives the code `nan`."""
        with np.errstate(invalid="ignore"):  # of a signaling NaN
            value = np.asarray(value, np.float64)
        known = np.where(np.isnan(value), 0.0, value)
        values = self.values()
        known = np.clip(known, -values[-1], values[-1])
        # Dividing by a power of two is exact, and rint rounds a tie to even, which is the even code.
        steps = np.rint(np.abs(known) / self.spacing(known)) * self.spacing(known)
        code = np.searchsorted(values, np.minimum(steps, values[-1]))
        code = code | np.where(np.signbit(known), 0x80, 0)
        return np.where(np.isnan(value), self.nan, code).astype(np.uint8)

    def decode(self, code: np.ndarray) -> np.ndarray:
        """The value of each byte; NaN for those past `largest`."""
        code = np.asarray(code, np.uint8).astype(np.int64)
        values = np.full(128, np.nan)
        values[: self.largest + 1] = self.values()
        return np.where(code & 0x80, -1.0, 1.0) * values[code & 0x7F]


# The oracle of every code there is: a new code needs its line here.
FORMATS = {"e4m3": SmallFloat(exponent_bits=4, mantissa_bits=3, bias=7, largest=0x7E, nan=0x7F)}
SIGNIFICANT_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


def rounded(value: Any, dtype: torch.dtype) -> np.ndarray:
    """float64 rounded once to the normal range of `dtype`, nearest-even, in float64 arithmetic."""
    fraction, exponent = np.frexp(np.asarray(value, np.float64))
    bits = SIGNIFICANT_BITS[dtype]
    return np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)


def float32(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values, exactly, for a tensor of at most 32 bits."""
    return tensor.detach().cpu().to(torch.float32).numpy()


def truth(producer: tq.Producer, arguments: tuple, options: dict[str, Any]) -> np.ndarray:
    """Y in float64, rounded nowhere; of a producer without a formula above, by its own reference in float64."""
    if producer.name in FORMULAS:
        return FORMULAS[producer.name](*arguments, **options)
    return producer.reference(*arguments, **options, **unrounded(producer), precision=torch.float64).y.cpu().numpy()


def unrounded(producer: tq.Producer) -> dict[str, Any]:
    """The options that keep a producer's y in fp32, as far as it has them."""
    return {name: value for name, value in (("rounding", "none"), ("round_residual", False)) if name in names(producer)}


def names(producer: tq.Producer) -> tuple[str, ...]:
    """The parameters of a producer."""
    code = producer.bind.__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


# How y meets its scale, and how the scale is made; a scheme that is not here is compared with its own reference.
STATIC, TOKEN, GROUP = "y * (1 / given)", "y / (amax / 448)", "y * (1 / (amax / 448))"
POWER = "y / 2^ceil(log2(amax / 448))"
ORACLES = {
    "fp8_tensor": STATIC,
    "fp8_token": TOKEN,
    "fp8_group128": GROUP,
    "fp8_group64": GROUP,
    "fp8_group128_pow2": POWER,
    "fp8_group128_ue8m0": POWER,
}
DYNAMIC_SCHEMES = [name for name in ORACLES if tq.SCHEMES[name].dynamic]


def as_stored(scheme: str, scale: Any) -> np.ndarray:
    """A scale as the scheme keeps it: rounded up to a power of two where it does that."""
    scale = np.asarray(scale, np.float32)
    if ORACLES[scheme] is not POWER:
        return scale
    mantissa, exponent = np.frexp(scale)
    return np.ldexp(np.float32(1), exponent - (mantissa == 0.5))


def scaled_by_oracle(
    scheme: str, y: np.ndarray, scale: float = 1.0, scale_ub: float | None = None, min_scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of fp32 y [M, N] by numpy: fp32 divisions and products as `ORACLES` says, then float64."""
    y, found = np.asarray(y, np.float32), tq.SCHEMES[scheme]
    code, one = FORMATS[found.code.name], np.float32(1)
    with np.errstate(all="ignore"):
        if ORACLES[scheme] is STATIC:
            return code.encode(y * (one / np.float32(scale))), np.array([scale], np.float32)
        grouped = y.reshape(len(y), -1, found.group or y.shape[-1])
        amax = np.nan_to_num(np.abs(grouped), nan=0.0, posinf=np.inf).max(-1)
        limit = FLT_MAX if scale_ub is None else np.float32(scale_ub)
        least = np.float32(found.min_scale if min_scale is None else min_scale)
        scales = as_stored(scheme, np.maximum(np.minimum(amax, limit) / np.float32(448), least))
        if ORACLES[scheme] is GROUP:
            quotient = grouped * (one / scales[..., None])
        else:
            quotient = grouped / scales[..., None]
            if ORACLES[scheme] is TOKEN:
                quotient = np.where(np.isinf(grouped), np.float32(np.nan), quotient)
    return code.encode(quotient).reshape(y.shape), scales


@dataclass
class Case:
    """One call of a producer: [rows, hidden_size] of `dtype`, changed by `change` before it is made."""

    producer: tq.Producer
    scheme: tq.Scheme
    rows: int
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16
    layout: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arguments, self.options = self.producer.example(self.rows, self.hidden_size, self.dtype, DEVICE)

    def __str__(self) -> str:
        extra = "".join(f" {name}={value}" for name, value in self.extra.items())
        return f"{self.producer.name} {self.scheme.name} [{self.rows}, {self.hidden_size}] {self.dtype}{extra}"

    def is_rows(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[0] == self.rows

    def change(self, function: Callable[[torch.Tensor], torch.Tensor], where: Callable[[Any], bool]) -> Case:
        """Replaces every argument and option that `where` holds for."""
        self.arguments = tuple(function(value) if where(value) else value for value in self.arguments)
        self.options = {name: function(value) if where(value) else value for name, value in self.options.items()}
        return self

    def change_rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Case:
        """Replaces every tensor that has one row per token."""
        return self.change(function, self.is_rows)

    def call_options(self) -> dict[str, Any]:
        """The options of the call, with a scale where the scheme needs one."""
        options = {**self.options, "layout": self.layout, **self.extra}
        if not self.scheme.dynamic:
            options.setdefault("scale", torch.tensor([STATIC_SCALE], device=DEVICE))
        return options

    def run(self) -> Result:
        made = self.producer(*self.arguments, scheme=self.scheme.name, **self.call_options())
        activation, *side_outputs = made if isinstance(made, tuple) else (made,)
        return Result(str(self), activation, side_outputs)

    def run_reference(self) -> Result:
        with tq.use_reference():
            return self.run()

    def check(self, activation: tq.QuantizedActivation | None = None) -> tq.CheckReport:
        options = self.call_options()
        return tq.check(self.producer, *self.arguments, scheme=self.scheme.name, activation=activation, **options)


class Result(NamedTuple):
    """What a call returned, and a name for failures."""

    label: str
    activation: tq.QuantizedActivation
    side_outputs: list[torch.Tensor]

    @property
    def codes(self) -> torch.Tensor:
        return self.activation.data.view(torch.uint8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as integers, so that NaN equals itself and -0 differs from 0."""
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(as_integers[tensor.dtype.itemsize])


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, label: Any = "") -> None:
    """Same shape, dtype and bits; a failure names the first coordinate and both values."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{label}: {got.dtype} {tuple(got.shape)}"
    wrong = (bits(got) != bits(want)).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        values = f"{got[first]} in place of {want[first]}"
        raise AssertionError(f"{label}: {len(wrong)} of {got.numel()} differ, first at {first}: {values}")


def assert_codes(scheme: tq.Scheme, got: torch.Tensor, want: Any, scale: Any, label: Any, allowed: int = 0) -> None:
    """Same bytes, but for at most `allowed` that are one step away; a failure names codes, values and scale."""
    got, want = got.cpu().numpy(), want.cpu().numpy() if isinstance(want, torch.Tensor) else np.asarray(want)
    assert got.shape == want.shape, f"{label}: shape {got.shape} in place of {want.shape}"
    wrong = np.argwhere(got != want)
    # Magnitudes are ascending in code order, so a step is a difference of one.
    steps = np.abs(got.astype(np.int32) - want.astype(np.int32))
    if len(wrong) > allowed or steps.max(initial=0) > 1:
        at = tuple(wrong[np.argmax(steps[tuple(wrong.T)])].tolist())
        decode = FORMATS[scheme.code.name].decode
        raise AssertionError(
            f"{label}: {len(wrong)} of {got.size} codes differ, {allowed} may; at {at} code {got[at]:#04x} "
            f"({decode(got[at])}) in place of {want[at]:#04x} ({decode(want[at])}); scale {scale}"
        )


def assert_equal_results(got: Result, want: Result) -> None:
    """Same codes, scales and side outputs, bit for bit."""
    assert_same_bits(got.codes, want.codes, f"{got.label}: codes")
    assert_same_bits(got.activation.scale, want.activation.scale, f"{got.label}: scales")
    for mine, theirs in zip(got.side_outputs, want.side_outputs, strict=True):
        assert_same_bits(mine, theirs, f"{got.label}: side output")


def assert_matches(case: Case, got: Result, want: Result) -> None:
    """Bit-equal; of a producer with a reduction or an exponential y may differ in its last fp32 bit, so scales may too
    and one code in 10,000 by one step. Side outputs are bit-equal always.
    """
    if case.producer.name in EXACT_PRODUCERS:
        return assert_equal_results(got, want)
    scheme, allowed = case.scheme, -(-got.codes.numel() // 10_000)
    assert_codes(scheme, got.codes, want.codes, want.activation.scale, f"{got.label}: codes", allowed)
    scales, expected = float64(got.activation.scales()), float64(want.activation.scales())
    assert scales.shape == expected.shape, f"{got.label}: scales {scales.shape} in place of {expected.shape}"
    far = np.abs(scales - expected) > 2.0**-21 * np.abs(expected)
    assert np.isfinite(scales).all() and not far.any(), f"{got.label}: scales {scales[far]}, not {expected[far]}"
    for mine, theirs in zip(got.side_outputs, want.side_outputs, strict=True):
        assert_same_bits(mine, theirs, f"{got.label}: side output")


def in_nan_memory(tensor: torch.Tensor, pad: int = 64) -> torch.Tensor:
    """The same rows with `pad` NaN after each and a row of NaN before and behind."""
    shape = tensor.shape[0] + 2, tensor.shape[1] + pad
    memory = torch.full(shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
    view = memory[1:-1, : tensor.shape[1]]
    view.copy_(tensor)
    return view


def hidden_sizes(scheme: tq.Scheme) -> Iterator[tuple[str, int]]:
    """(name, size): a power of two, no power of two, and one group."""
    yield "aligned", max(2 * scheme.group, 256)
    yield "ragged", 3 * scheme.group or 193
    yield "one_group", scheme.group or 32
