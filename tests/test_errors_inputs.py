"""What must not be given to a scheme: scales, zero points, bounds, widths, experts; the error names it."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, Case
from refusals import ANY, HIDDEN, dynamic_schemes, every_producer, example, raises, rows, scalar, weight

import tq

static_schemes = [name for name, scheme in tq.SCHEMES.items() if not scheme.dynamic]


@every_producer
def test_inputs_of_nvfp4_and_zero_points(producer):
    arguments, options = example(producer, "nvfp4")
    del options["global_scale_inv"]

    def check(kind, *parts, scheme="nvfp4", options=options, **more):
        raises(kind, producer, *parts, arguments=arguments, scheme=scheme, **{**options, **more})

    check(ValueError, "global_scale_inv must be given for nvfp4", "None")
    check(TypeError, "global_scale_inv must be a float32 tensor", "float", global_scale_inv=3.0)
    check(ValueError, "global_scale_inv must have one element", (2,), global_scale_inv=torch.ones(2, device=DEVICE))
    check(ValueError, "global_scale_inv must be on", "meta", global_scale_inv=torch.ones(1, device="meta"))
    check(ValueError, "global_scale_inv must be None for", scheme=ANY, global_scale_inv=scalar())
    azp = {"scheme": "int8_tensor_azp", "scale": scalar()}
    check(ValueError, "zero_point must be given for int8_tensor_azp", "int32", **azp)
    check(TypeError, "zero_point must be a int32 tensor", torch.float32, zero_point=scalar(), **azp)
    check(
        ValueError, "zero_point must be None for int8_tensor,", **{**azp, "scheme": "int8_tensor"}, zero_point=scalar()
    )


@every_producer
def test_smooth_scale(producer):
    arguments, options = example(producer)

    def check(kind, wrong, *parts):
        raises(kind, producer, *parts, arguments=arguments, **options, smooth_scale=wrong)

    check(TypeError, 1.0, "smooth_scale must be a tensor", "float")
    check(ValueError, weight(HIDDEN + 1), "smooth_scale must have shape", (HIDDEN,), (HIDDEN + 1,))
    check(ValueError, weight(2 * HIDDEN)[::2], "stride of smooth_scale must be 1", 2)
    check(TypeError, weight().double(), "smooth_scale must be", torch.float64)
    check(ValueError, weight().to("meta"), "smooth_scale must be on", "meta")


@every_producer
@pytest.mark.parametrize("scheme", ["fp8_token", "mxfp4"])
def test_data_width(producer, scheme):
    arguments, options = example(producer, scheme)
    unit = 32 if scheme == "mxfp4" else 1
    for wrong in (HIDDEN - unit, 0, 32769, *((HIDDEN + 16,) if unit > 1 else ())):
        parts = f"data_width must be a multiple of {unit}", HIDDEN, wrong
        raises(ValueError, producer, *parts, arguments=arguments, scheme=scheme, data_width=wrong, **options)


@every_producer
def test_tokens_per_expert(producer):
    arguments, options = example(producer)
    counts = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    parts = "tokens_per_expert needs activations", "(4, "
    raises(ValueError, producer, *parts, arguments=arguments, tokens_per_expert=counts, **options)
    case = Case(tq.PRODUCERS[producer], tq.SCHEMES[ANY], 4, HIDDEN).change_rows(lambda each: each.view(2, 2, -1))
    for kind, wrong, parts in (
        (TypeError, [1, 2], ("int32 or int64", "list")),
        (TypeError, counts.float(), ("int32 or int64", torch.float32)),
        (ValueError, counts[:1], ("tokens_per_expert must have shape", (2,), (1,))),
        (ValueError, counts.repeat_interleave(2)[::2], ("tokens_per_expert must be contiguous", "(2,)")),
        (ValueError, counts.to("meta"), ("tokens_per_expert must be on", "meta")),
    ):
        raises(kind, producer, *parts, arguments=case.arguments, tokens_per_expert=wrong, **case.options)


@every_producer
@pytest.mark.parametrize("scheme", static_schemes)
def test_a_static_scheme_and_its_scale(producer, scheme):
    arguments, options = example(producer, scheme)
    del options["scale"]

    def check(kind, *parts, **more):
        raises(kind, producer, *parts, arguments=arguments, scheme=scheme, **options, **more)

    check(ValueError, "scale must be given for", scheme, "None")
    check(TypeError, "scale must be a float32 tensor", "float", scale=1.0)
    check(TypeError, "scale must be a float32 tensor", torch.bfloat16, scale=scalar(dtype=torch.bfloat16))
    check(TypeError, "scale must be a float32 tensor", torch.float64, scale=scalar(dtype=torch.float64))
    check(ValueError, "scale must have one element", (2,), scale=torch.ones(2, device=DEVICE))
    check(ValueError, "scale must have one element", (0,), scale=torch.ones(0, device=DEVICE))
    check(ValueError, "scale must be on", DEVICE, "meta", scale=torch.ones(1, device="meta"))
    check(ValueError, "scale_ub", "must be None for", scheme, scale=scalar(), scale_ub=scalar())
    check(ValueError, "min_scale must be None for", scheme, scale=scalar(), min_scale=1e-6)


@every_producer
@pytest.mark.parametrize("scheme", dynamic_schemes)
def test_a_dynamic_scheme_and_its_bounds(producer, scheme):
    arguments, options = example(producer, scheme)

    def check(kind, *parts, **more):
        raises(kind, producer, *parts, arguments=arguments, scheme=scheme, **options, **more)

    rule = tq.SCHEMES[scheme].rule
    check(ValueError, "scale must be None for", scheme, scale=scalar())
    check(ValueError, "zero_point must be None for", scheme, zero_point=scalar(1, dtype=torch.int32))
    if "scale_ub" not in rule.takes:
        check(ValueError, "scale_ub must be None for", scheme, scale_ub=scalar())
        check(ValueError, "min_scale must be None for", scheme, min_scale=1.0)
        return
    check(TypeError, "scale_ub must be a float32 tensor", "float", scale_ub=448.0)
    check(TypeError, "scale_ub must be a float32 tensor", torch.float16, scale_ub=scalar(dtype=torch.float16))
    check(ValueError, "scale_ub must have one element", (4,), scale_ub=torch.ones(4, device=DEVICE))
    check(ValueError, "scale_ub must be on", DEVICE, "meta", scale_ub=torch.ones(1, device="meta"))
    for value in (-1.0, float("nan"), *((0.0, 2.0**-81) if rule.least_min_scale else ())):
        check(ValueError, "min_scale must be at least", value, min_scale=value)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_scale_on_the_host():
    parts = "scale must be on cuda", "cpu"
    raises(ValueError, "quantize", *parts, arguments=(rows(2, HIDDEN),), scheme="fp8_tensor", scale=torch.ones(1))
