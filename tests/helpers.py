"""For the tests of producers and schemes: float64 formulas of producers, cases made from their examples, exact
comparisons. The formats are in formats.py, the schemes in oracles.py.

Nothing here computes with tq's kernels; what is compared is either bits or values in units of a code's spacing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from formats import FORMATS
from formulas import FORMULAS
from oracles import DYNAMIC_SCHEMES, FLT_MAX, ORACLES, Given, as_stored, format_of, quantized_by_oracle

import tq
from tq.bench.cases import STATIC_INPUTS, static_inputs
from tq.kernels.rules import ScaleInputs

__all__ = [
    "DYNAMIC_SCHEMES",
    "FLT_MAX",
    "FORMATS",
    "ORACLES",
    "Given",
    "as_stored",
    "format_of",
    "quantized_by_oracle",
]

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
STATIC_RANGE = 28.0 * 1.1  # the largest value under a static scale, no power of two; the examples stay below
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

SCHEME_LAYOUTS = [(scheme.name, layout.name) for scheme in tq.SCHEMES.values() for layout in scheme.layouts]


# What a pair does follows from its parts, so that not all of them need be tried everywhere: every scheme with one
# the producers in turn; there are fewer of these.
ONE_EACH = [(list(tq.PRODUCERS)[i % len(tq.PRODUCERS)], scheme) for i, scheme in enumerate(tq.SCHEMES)]
PAIRS = ONE_EACH
ALL_PAIRS = [(producer, scheme) for producer in tq.PRODUCERS for scheme in tq.SCHEMES]
PAIR_LAYOUTS = [(producer, scheme, layout.name) for producer, scheme in PAIRS for layout in tq.SCHEMES[scheme].layouts]
# Every producer with one of a scheme for each granularity, and one producer with all of them.
GRANULARITIES = ("fp8_tensor", "fp8_token", "fp8_group128")
CORE = [(producer, GRANULARITIES[i % 3]) for i, producer in enumerate(tq.PRODUCERS)]
CORE = list(dict.fromkeys(CORE + [("rms_norm", scheme) for scheme in GRANULARITIES]))

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


TOPS = {name: float(form.values()[-1]) for name, form in FORMATS.items()}


def static_options(scheme: str) -> dict[str, torch.Tensor]:
    """What the scheme needs of the caller, its scale such that STATIC_RANGE is the largest value."""
    top = TOPS[tq.SCHEMES[scheme].code.name]
    values = {**STATIC_INPUTS, "scale": STATIC_RANGE / top, "global_scale_inv": 448.0 * top / STATIC_RANGE}
    return {name: torch.full_like(tensor, values[name]) for name, tensor in static_inputs(scheme, DEVICE).items()}


def given_of(options: dict[str, Any]) -> Given:
    """The numbers behind a call's options, for an oracle."""
    tensors = {name: options.get(name) for name in Given._fields}
    return Given(**{name: value.item() for name, value in tensors.items() if isinstance(value, torch.Tensor)})


def inputs_of(options: dict[str, Any], min_scale: float) -> ScaleInputs:
    """The same for a scheme's reference."""
    return ScaleInputs(**{name: options.get(name) for name in ScaleInputs._fields[:-2]}, min_scale=min_scale)


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

    def is_of_rows(self, value: Any) -> bool:
        """Whether a tensor has something for each token: its row, or one number."""
        return isinstance(value, torch.Tensor) and value.dim() in (1, 2) and value.shape[0] == self.rows

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
        """The options of the call, with the static inputs that the scheme needs."""
        return {**static_options(self.scheme.name), **self.options, "layout": self.layout, **self.extra}

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


def is_float(value: Any) -> bool:
    """Whether it is a tensor of numbers; positions and the like are integers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()
