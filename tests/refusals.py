"""For the tests of what must not run: calls that would, and what a refusal must look like."""

from __future__ import annotations

import pytest
import torch
from comparing import assert_same_bits
from helpers import DEVICE, Case

import tq

HIDDEN = 256
every_producer = pytest.mark.parametrize("producer", tq.PRODUCERS)
dynamic_schemes = [name for name, scheme in tq.SCHEMES.items() if scheme.dynamic]
ANY = dynamic_schemes[0]


def rows(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device=DEVICE).to(dtype)


def weight(size=HIDDEN, dtype=torch.bfloat16):
    return torch.ones(size, dtype=dtype, device=DEVICE)


def scalar(value=1.0, **options):
    return torch.tensor([value], **{"dtype": torch.float32, "device": DEVICE, **options})


def raises(kind, producer, *parts, arguments=(), scheme=ANY, **options):
    """The call raises exactly `kind`; its message starts with the op and holds `parts`, and no tensor changed."""
    given = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
    given = [value for value in given if value.device.type != "meta"]
    before = [value.clone() for value in given]
    for _ in range(2):
        with pytest.raises(kind) as caught:
            tq.PRODUCERS[producer](*arguments, scheme=scheme, **options)
        message = str(caught.value)
        assert type(caught.value) is kind and message.startswith(f"{producer}: "), repr(caught.value)
        assert all(str(part) in message for part in parts), f"{message!r} without all of {parts}"
    for value, old in zip(given, before, strict=True):
        assert_same_bits(value, old, "a tensor that a refused call was given")


def example(producer, scheme=ANY, number=4, size=HIDDEN):
    """(arguments, options) that would run."""
    case = Case(tq.PRODUCERS[producer], tq.SCHEMES[scheme], number, size)
    return case.arguments, {name: value for name, value in case.call_options().items() if value is not None}
