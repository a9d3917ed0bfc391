"""The arithmetic of the package on a GPU, exhaustively: encoders, rounding, division, reciprocal, scale rules."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import tq
from tq.bench.cases import static_inputs
from tq.kernels import codes, device
from tq.kernels.target import target_of

BLOCK = 2048
MANTISSAS = 1 << 23


class Encoders(NamedTuple):
    """The two ways of a code, and how many codes share a byte."""

    by_integers: Any
    chosen: Any
    PER_BYTE: tl.constexpr


@triton.jit
def encode_both_kernel(values, by_integers, chosen, encoders, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    value = tl.load(values + block * BLOCK + tl.arange(0, BLOCK))
    bytes_: tl.constexpr = BLOCK // encoders.PER_BYTE
    at = block * bytes_ + tl.arange(0, bytes_)
    tl.store(by_integers + at, encoders.by_integers(value))
    tl.store(chosen + at, encoders.chosen(value))


@triton.jit
def bits_of(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def round_kernel(values, rounded, dtype: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(rounded + at, device.round_to(tl.load(values + at), dtype))


@triton.jit
def divide_kernel(differ, MANTISSAS: tl.constexpr, BLOCK: tl.constexpr):
    """Quotients of one mantissa by BLOCK divisors, at two exponents, that are not the IEEE division's; -0 and 0 too."""
    divisor = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + 0x3F800000).to(tl.float32, bitcast=True)
    inverse = device.exact_reciprocal(divisor)
    mantissa = tl.full([BLOCK], 1.0, tl.float32) * (1.0 + tl.program_id(1).to(tl.float32) / MANTISSAS)
    wrong = 0
    for i in tl.static_range(4):
        value = mantissa * (64.0 if i == 0 else -0.0078125 if i == 1 else 0.0)
        value = value * -1.0 if i == 3 else value
        quotient = device.divide(value, divisor, inverse)
        wrong += tl.sum((bits_of(quotient) != bits_of(tl.div_rn(value, divisor))).to(tl.int32))
    tl.atomic_add(differ, wrong.to(tl.int64))


@triton.jit
def reciprocal_kernel(differ, scale, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Reciprocals of BLOCK mantissas times `scale`, and quotients by LARGEST, that are not the IEEE division's."""
    mantissa = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = (mantissa + 0x3F800000).to(tl.float32, bitcast=True) * scale
    one, largest = tl.full([BLOCK], 1.0, tl.float32), tl.full([BLOCK], LARGEST, tl.float32)
    tl.atomic_add(differ, tl.sum((device.exact_reciprocal(value) != tl.div_rn(one, value)).to(tl.int64)))
    by_constant = device.divide(value, largest, 1.0 / LARGEST)
    tl.atomic_add(differ + 1, tl.sum((by_constant != tl.div_rn(value, largest)).to(tl.int64)))


def encoders() -> list[dict[str, Any]]:
    """Every code by integers, by the target's choice and by torch."""
    every = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16)
    generator = torch.Generator("cuda").manual_seed(1)
    patterns = torch.randint(-(1 << 31), 1 << 31, (1 << 24,), device="cuda", generator=generator, dtype=torch.int64)
    inputs = {
        "all bf16": every.view(torch.bfloat16).float(),
        "all fp16": every.view(torch.float16).float(),
        "2^24 random fp32 bit patterns": patterns.to(torch.int32).view(torch.float32),
    }
    rows = []
    target = target_of(torch.device("cuda", 0))
    for code in (codes.E4M3, codes.E5M2, codes.E4M3FNUZ, codes.INT8, codes.E2M1):
        both = Encoders(code.encode, code.device(target).encode, tl.constexpr(code.per_byte))
        for name, values in inputs.items():
            integers, chosen = torch.empty(2, values.numel() // code.per_byte, dtype=torch.uint8, device="cuda")
            encode_both_kernel[(values.numel() // BLOCK,)](values, integers, chosen, both, BLOCK)
            for what, other in (("the target's", chosen), ("torch's", code.reference_encode(values))):
                differ = int((integers != other).sum())
                rows.append({"check": f"{code.name} by integers against {what}, {name}", "differ": differ})
    return rows


def roundings() -> list[dict[str, Any]]:
    """fp32 rounded to a narrower dtype, by the GPU's instruction and by torch, for every bit pattern; NaN stays NaN."""
    rows, size = [], 1 << 26
    for dtype, name in ((tl.bfloat16, "bfloat16"), (tl.float16, "float16")):
        differ = 0
        for first in range(-(1 << 31), 1 << 31, size):
            values = torch.arange(first, first + size, dtype=torch.int32, device="cuda").view(torch.float32)
            ours, theirs = torch.empty_like(values), values.to(getattr(torch, name)).float()
            round_kernel[(size // BLOCK,)](values, ours, dtype, BLOCK)
            same = ours.view(torch.int32) == theirs.view(torch.int32)
            differ += int((~(same | (ours.isnan() & theirs.isnan()))).sum())
        rows.append({"check": f"rounding to {name}, all of fp32", "made": 1 << 32, "differ": differ})
    return rows


def divisions() -> list[dict[str, Any]]:
    """The corrected division and the reciprocal."""
    rows = []
    for bits, name in ((7, "bf16"), (10, "fp16")):
        differ = torch.zeros(1, dtype=torch.int64, device="cuda")
        divide_kernel[(MANTISSAS // BLOCK, 1 << bits)](differ, 1 << bits, BLOCK)
        made = 4 * MANTISSAS << bits
        rows.append({"check": f"division, {name} mantissas by all fp32 ones", "made": made, "differ": int(differ)})
    for largest in (448.0, 57344.0, 224.0, 127.0):
        counts = torch.zeros(2, dtype=torch.int64, device="cuda")
        for scale in (1.0, 2.0, 3e-13, 1e-9, 7e35):
            reciprocal_kernel[(MANTISSAS // BLOCK,)](counts, scale, largest, BLOCK)
        for what, differ in zip(("reciprocal", f"division by {largest:g}"), counts.tolist(), strict=True):
            rows.append(
                {"check": f"{what}, all fp32 mantissas at 5 exponents", "made": 5 * MANTISSAS, "differ": differ}
            )
    return rows


def scale_rule(name: str) -> list[dict[str, Any]]:
    """Scales and codes of a dynamic scheme where amax takes every fp32 mantissa."""
    scheme, inputs, differ = tq.SCHEMES[name], static_inputs(name, "cuda"), 0
    for exponent in (-40, 0, 3, 60):
        for chunk in torch.arange(MANTISSAS, device="cuda", dtype=torch.int32).split(1 << 19):
            amax = torch.ldexp((chunk + 0x3F800000).view(torch.float32), torch.tensor(exponent, device="cuda"))
            x = amax.unsqueeze(-1) * torch.linspace(-1.0, 0.9, scheme.group or 16, device="cuda")
            ours = tq.quantize(x, scheme=name, **inputs)
            with tq.use_reference():
                theirs = tq.quantize(x, scheme=name, **inputs)
            differ += int((ours.data.view(torch.uint8) != theirs.data.view(torch.uint8)).sum())
            differ += int((ours.scales() != theirs.scales()).sum())
    return [{"check": f"{name}, amax of all fp32 mantissas at 4 exponents", "differ": differ}]
