"""Linear kernels that quantize their own input, made to take it quantized. A kind of kernel is one `Consumer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from tq.contract.scales import kernel_of
from tq.kernels.schemes import SCHEMES

NOT_LISTED = "the consumer takes no quantized input"


class Reads(NamedTuple):
    """What a kernel reads in place of its input. key: vLLM's for it. scheme: in `SCHEMES`. layout: of its scales; flat:
    it wants them in one dimension."""

    key: Any
    scheme: str
    layout: str
    flat: bool = False

    def __str__(self) -> str:
        return f"{self.scheme} with {self.layout} scales"


@dataclass(frozen=True)
class Consumer:
    """reads(kernel) -> what the kernel's own quantizer makes, which is what its matrix product takes; or why it takes
    nothing. apply(kernel, layer, activation, bias) -> output, as the kernel computes it after quantizing; `None` where
    the kernel does it itself for the key it names.
    """

    reads: Callable[[Any], Reads | str]
    apply: Callable[[Any, Any, Any, torch.Tensor | None], torch.Tensor] | None = None


def has_scheme(scheme: str, layout: str) -> bool:
    """Whether tq has a scheme of this name with scales in this layout."""
    return scheme in SCHEMES and layout in (known.name for known in SCHEMES[scheme].layouts)


def accept(linear: Any, consumers: dict[type, Consumer]) -> str | None:
    """Let the kernel of `linear` take a quantized input and name its key on the layer; returns why not, or `None`.

    The kernel object alone changes, to a subclass of its class: which kernel runs stays vLLM's choice and the user's
    (`--linear-backend`, `VLLM_DISABLED_KERNELS`). Nothing changes for an input that is not quantized. Harmless twice.
    """
    if getattr(linear, "requires_unquantized_input", False):
        return "the consumer needs its unquantized input"
    if getattr(linear, "_input_quant_key", None) is not None:
        return None
    kernel = kernel_of(linear)
    if getattr(kernel, "tq_reads", None) is None:
        consumer = consumers.get(type(kernel))
        if consumer is None:
            return NOT_LISTED
        reads = consumer.reads(kernel)
        if isinstance(reads, str):
            return reads
        if not has_scheme(reads.scheme, reads.layout):
            return f"no scheme {reads}"
        kernel.tq_reads = reads
        kernel.__class__ = _accepting(type(kernel), consumer.apply)  # type: ignore[arg-type]
    linear._input_quant_key = kernel.tq_reads.key
    return None


def withdraw(linear: Any) -> None:
    """Undo `accept`, if it was done."""
    kernel = kernel_of(linear)
    if getattr(kernel, "tq_reads", None) is not None:
        kernel.__class__ = type(kernel).tq_base
        del kernel.tq_reads
        linear.__dict__.pop("_input_quant_key", None)


def attach(y: torch.Tensor, linear: Any, activation: Any) -> torch.Tensor:
    """y, for every reader but `linear`, which finds its own input in it (`find_attached`)."""
    if torch.compiler.is_compiling():
        y = y.view(y.shape)  # Dynamo lets a tensor have attributes that is all of an operator's result, not one of many
    y.tq_quantized = linear, activation  # type: ignore[attr-defined]
    return y


def find_attached(linear: Any) -> None:
    """Let `linear` take what `attach` gives it. Its class stays, by which vLLM looks up a wrapper for LoRA.

    A tensor made from y, as a view of it is, has nothing attached: then the layer quantizes for itself. Harmless twice.
    """
    plain = linear.forward
    if hasattr(plain, "tq_plain"):
        return

    def forward(input_: Any, *args: Any, **options: Any) -> Any:
        attached = getattr(input_, "tq_quantized", None)
        if attached is not None and attached[0] is linear:
            input_ = attached[1]
        return plain(input_, *args, **options)

    forward.tq_plain = plain  # type: ignore[attr-defined]
    linear.forward = forward


def forget_attached(linear: Any) -> None:
    """Undo `find_attached`, if it was done."""
    plain = getattr(linear.forward, "tq_plain", None)
    if plain is not None:
        del linear.forward
        if linear.forward != plain:  # it was not that of the class either
            linear.forward = plain


@cache
def _accepting(base: Any, apply: Any) -> Any:
    """Subclass of a kernel class that takes a quantized input, and a plain one as before."""

    def input_quant_key(self: Any) -> Any:
        return self.tq_reads.key

    def apply_weights(self: Any, layer: Any, x: Any, bias: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return base.apply_weights(self, layer, x, bias, **options)
        check_activation(base.__name__, x, self.tq_reads)
        if apply is None:
            return base.apply_weights(self, layer, x, bias, **options)
        return apply(self, layer, x, bias)

    members = {"input_quant_key": input_quant_key, "apply_weights": apply_weights, "tq_base": base}
    return type(f"Tq{base.__name__}", (base,), {**members, "__module__": __name__})


def check_activation(op: str, activation: Any, reads: Reads) -> None:
    """Raises TypeError for an activation of another key, ValueError for another scheme or another layout of the scales.

    One that tq did not make does not say its layout: then the strides of its scales must be those of the layout.
    """
    made = getattr(activation, "reads", None)
    if made is reads:  # made for this very kernel: no need to compare keys field by field
        return
    key = getattr(activation, "quant_key", None)
    if key != reads.key:
        came = key or type(activation).__name__
        raise TypeError(
            f"{op}: input must be a tensor or an activation of {reads.key}, got {came}; quantize it for this layer"
        )
    scheme = SCHEMES[reads.scheme]
    zero_point = getattr(activation, "zero_point", None)
    if (zero_point is not None) != ("zero_point" in scheme.rule.needs or scheme.rule.zero_point):
        raise ValueError(
            f"{op}: input of {reads.scheme} must {'not ' * (zero_point is not None)}have a zero point; quantize it for "
            f"the layer that reads it"
        )
    if made is None:
        if not scheme.dynamic:
            return  # one scale lies in one way
        groups = scheme.groups(activation.orig_shape[-1])
        fitting = [
            layout.name for layout in scheme.layouts if fits(layout, activation.scale, groups, scheme.rule.stored)
        ]
        if reads.layout in fitting:
            return
        other = fitting[0] if fitting else f"{activation.scale.dtype} {tuple(activation.scale.stride())}"
        made = Reads(key, reads.scheme, other)
    if made != reads:
        raise ValueError(f"{op}: input must be {reads}, got {made}; quantize it for the layer that reads it")


def fits(layout: Any, scales: torch.Tensor, groups: int, dtype: torch.dtype) -> bool:
    """Whether `scales` lie where those that `layout` allocates would. Strides of sizes below 2 say nothing."""
    flat = scales.flatten(0, -2) if scales.dim() > 2 else scales
    wanted = layout.allocate(flat.shape[0], groups, dtype, torch.device("meta"))
    strides = zip(wanted.stride(), flat.stride(), wanted.shape, strict=False)
    return (
        flat.dtype == wanted.dtype
        and flat.shape == wanted.shape
        and all(mine == theirs for mine, theirs, size in strides if size > 1)
    )
