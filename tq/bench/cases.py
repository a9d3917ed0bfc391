"""What is measured: every registered producer and scheme, over shapes of real models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from tq.kernels.plan import Prepared, prepare
from tq.kernels.producer import PRODUCERS, Producer
from tq.kernels.schemes import SCHEMES

# By the width of a producer: sizes of its activation, and whose they are.
SIZES = {
    "hidden": {576: "SmolLM2-135M", 4096: "Llama-3-8B", 5120: "Qwen3-14B", 8192: "Llama-3-70B"},
    "intermediate": {1536: "SmolLM2-135M", 14336: "Llama-3-8B"},
}
TOKENS = (1, 16, 64, 128, 1024, 8192)
# Static inputs of the schemes that need them, for activations of about unit size.
STATIC_INPUTS: dict[str, float | int] = {"scale": 0.02, "zero_point": 3, "global_scale_inv": 448.0 * 6.0 / 8.0}


def static_inputs(scheme: str, device: Any) -> dict[str, torch.Tensor]:
    """What the rule of a scheme needs of the caller, by name."""
    return {
        name: torch.tensor([STATIC_INPUTS[name]], device=device).to(
            torch.int32 if name == "zero_point" else torch.float32
        )
        for name in SCHEMES[scheme].rule.needs
    }


class Case(NamedTuple):
    """One producer in one of its forms, one scheme, one shape. `left_out` are options of the example that are not
    given."""

    producer: Producer
    left_out: tuple[str, ...]
    scheme: str
    rows: int
    hidden_size: int

    @property
    def name(self) -> str:
        """rms_norm, rms_norm+residual, ..."""
        given = [option for option in self.producer.optional if option not in self.left_out]
        return "+".join([self.producer.name, *given])

    def arguments(self, dtype: torch.dtype, device: Any) -> tuple[tuple, dict[str, Any]]:
        """Fresh random arguments and options, the static scale included where the scheme needs one."""
        arguments, options = self.producer.example(self.rows, self.hidden_size, dtype, device)  # type: ignore[misc]
        options = {name: value for name, value in options.items() if name not in self.left_out}
        return arguments, options | static_inputs(self.scheme, device)

    def prepare(self, dtype: torch.dtype, device: Any) -> Prepared:
        """The call with fresh arguments, checked and allocated."""
        arguments, options = self.arguments(dtype, device)
        return prepare(self.producer, arguments, self.scheme, options)


def bytes_of(prepared: Prepared) -> int:
    """Bytes a call must move: each input read once, each output written once."""
    inputs = [*prepared.arguments, *(v for k, v in prepared.options.items() if k not in prepared.plan.producer.mutates)]
    outputs = [prepared.codes, prepared.scales, *prepared.bound.side_outputs]
    tensors = [tensor for tensor in [*inputs, *outputs] if isinstance(tensor, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def cases(tokens: tuple[int, ...] = TOKENS, sizes: tuple[int, ...] = ()) -> Iterator[Case]:
    """Every registered producer, in each of its forms, with every scheme at every shape it divides. sizes: for all
    producers; none: those of `SIZES`."""
    for producer in PRODUCERS.values():
        for left_out in [producer.optional, ()] if producer.optional else [()]:
            for scheme in SCHEMES.values():
                for hidden_size in sizes or SIZES[producer.width]:
                    if scheme.group and hidden_size % scheme.group:
                        continue
                    for rows in tokens:
                        yield Case(producer, left_out, scheme.name, rows, hidden_size)


def in_turn(every: Iterable[Case]) -> Iterator[Case]:
    """One case of each producer and scheme, the sizes in turn: enough where kernels are interpreted."""
    of_pair: dict[tuple[str, str], list[Case]] = {}
    for case in every:
        of_pair.setdefault((case.name, case.scheme), []).append(case)
    for i, same in enumerate(of_pair.values()):
        yield same[i % len(same)]
