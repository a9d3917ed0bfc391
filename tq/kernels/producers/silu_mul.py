"""y = silu(gate) * up."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tq.activation import QuantizedActivation
from tq.kernels.device import Rows, load_rows, reciprocal, round_to
from tq.kernels.producer import (
    Bound,
    Producer,
    Reference,
    Replaced,
    as_rows,
    check_choice,
    check_rows,
    constant,
    register_producer,
    round_through,
)
from tq.kernels.rules import AMAX_MULTIPLYING
from tq.kernels.schemes import VLLM_MIN_SCALE, Scheme

ROUNDINGS = ("none", "product", "activation_and_product")


class Args(NamedTuple):
    gate: Rows
    up: Rows
    ROUNDING: tl.constexpr


@triton.jit
def load_silu_mul(args, row, col, mask):
    dtype: tl.constexpr = args.gate.data.dtype.element_ty
    gate = load_rows(args.gate, row, col, mask)
    # exp2 and reciprocal rather than exp and a division: 6 instructions instead of 17.
    activation = gate * reciprocal(1.0 + tl.exp2(gate * -1.4426950408889634))
    if args.ROUNDING == "activation_and_product":
        activation = round_to(activation, dtype)
    product = activation * load_rows(args.up, row, col, mask)
    return product if args.ROUNDING == "none" else round_to(product, dtype)


def bind(x: torch.Tensor, *, rounding: str = "activation_and_product") -> Bound:
    rows, half = as_rows(x), x.shape[-1] // 2
    gate, up = rows.data[:, :half], rows.data[:, half:]
    args = Args(Rows(gate, rows.stride), Rows(up, rows.stride), constant(rounding))
    return Bound(args, torch.Size((*x.shape[:-1], half)), x.dtype, x.device)


def check(x: torch.Tensor, *, rounding: str) -> None:
    check_rows("silu_mul", "x", x, parts=2)
    check_choice("silu_mul", "rounding", rounding, ROUNDINGS)


def reference(x: torch.Tensor, *, rounding: str, precision: torch.dtype = torch.float32) -> Reference:
    gate, up = x.reshape(-1, x.shape[-1]).to(precision).chunk(2, -1)
    activation = gate / (1.0 + torch.exp(-gate))
    if rounding == "activation_and_product":
        activation = round_through(activation, x.dtype)
    product = activation * up
    return Reference(product if rounding == "none" else round_through(product, x.dtype))


def replaces(scheme: Scheme) -> Replaced:
    if scheme.quantizer == "_C.per_token_group_fp8_quant" and scheme.rule is AMAX_MULTIPLYING:
        return Replaced("_C.silu_and_mul_per_block_quant", {"rounding": "none"}, VLLM_MIN_SCALE)
    options = {"rounding": "activation_and_product"}
    if scheme.quantizer == "_C.static_scaled_fp8_quant":
        return Replaced("_C.silu_and_mul_quant", options)
    if scheme.quantizer == "_C.scaled_fp4_quant":
        return Replaced("_C.silu_and_mul_nvfp4_quant", {"rounding": "product"})
    return Replaced(f"_C.silu_and_mul + {scheme.quantizer}", options)


def example(rows: int, hidden_size: int, dtype: torch.dtype, device: Any) -> tuple[tuple, dict[str, Any]]:
    return (torch.randn(rows, 2 * hidden_size, device=device).to(dtype),), {}


SILU_MUL = register_producer(
    Producer(
        "silu_mul",
        load=load_silu_mul,
        reference=reference,
        bind=bind,
        check=check,
        replaces=replaces,
        example=example,
        parts=2,
    )
)


def silu_mul(x: torch.Tensor, *, scheme: str, rounding: str | None = None, **options: Any) -> QuantizedActivation:
    """y = gate / (1 + exp(-gate)) * up, with gate = x[..., :N] and up = x[..., N:]; data = encode(y / scale).

    Shapes: x [..., 2N] bf16, fp16 or fp32, last stride 1; data [..., N], N at most 32768.
    Rounding: "none" keeps fp32, "product" rounds y to x's dtype, "activation_and_product" rounds silu(gate) too; None
    is what the replaced op does. Options and errors common to all producers are those of `tq.kernels.launch.call`.
    Source: vLLM 0.33 `_C.silu_and_mul_quant` (fp8_tensor), `_C.silu_and_mul_per_block_quant` (fp8_group64,
    fp8_group128), elsewhere `_C.silu_and_mul` followed by the quantizer; the exponential may differ in its last bits.
    """
    return SILU_MUL(x, scheme=scheme, rounding=rounding, **options)
