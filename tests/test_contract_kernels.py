"""Each kernel of `tq.contract.kernels.CONSUMERS`, with vLLM's own class and torch for the matrix product."""

from __future__ import annotations

import dataclasses
import importlib
import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import tq
from tq.contract import consumers, hooks, route, vllm
from tq.contract.consumers import Reads

pytestmark = pytest.mark.vllm
if vllm.unsupported_version() is not None:
    pytest.skip(vllm.unsupported_version(), allow_module_level=True)

from vllm.model_executor.kernels import linear  # noqa: E402
from vllm.model_executor.kernels.linear import (  # noqa: E402
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation  # noqa: E402
from vllm.model_executor.layers.quantization.utils import quant_utils as keys  # noqa: E402

from tq.contract import kernels  # noqa: E402

K, N = 256, 128
# Only the arithmetic differs by device, and vLLM's own of that needs a GPU; torch stands in for it.
FP8_BLOCK = {
    kind.__name__: kind for kind, consumer in kernels.CONSUMERS.items() if consumer.apply is kernels.apply_block
}
FP8_TOKEN = {
    kind.__name__: kind for kind, consumer in kernels.CONSUMERS.items() if consumer.reads is kernels.reads_tokens
}


@pytest.fixture(autouse=True)
def config(monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config

    for kind in kernels.CONSUMERS:
        monkeypatch.setattr(kind, "is_supported", classmethod(lambda cls, capability=None: (True, None)))
    with set_current_vllm_config(VllmConfig()):
        yield


def fp8_config(activation, weight):
    return FP8ScaledMMLinearLayerConfig(weight, activation, (N, K), torch.bfloat16, torch.bfloat16)


def layer_of(kernel, **parameters):
    layer = torch.nn.Module()
    for name, value in parameters.items():
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    layer.quant_method = SimpleNamespace(fp8_linear=kernel)
    return layer


def weight(dtype):
    return torch.randint(-4, 5, (N, K), generator=torch.Generator().manual_seed(0)).to(dtype)


def powers(m=5):
    """Rows whose greatest value makes the scale exactly 1, so that dividing by it and multiplying agree."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-7, 8, (m, K), generator=generator).float()
    x[:, 0] = x[:, 128] = 448
    return x.bfloat16()


def activation_of(x, reads):
    """What vLLM's quantizers make of `powers`: the values themselves, and scales of 1."""
    made = tq.quantize(x, scheme=reads.scheme, layout=reads.layout)
    assert torch.equal(made.data.float(), x.float()) and bool((made.scales() == 1).all())
    return QuantizedActivation(made.data, made.scale, x.dtype, x.shape, reads.key)


@pytest.mark.parametrize("name", FP8_BLOCK)
@pytest.mark.parametrize("bias", [None, torch.arange(N).bfloat16()], ids=["no bias", "bias"])
def test_block_kernel_computes_from_what_it_would_have_made(name, bias, monkeypatch):
    kernel = FP8_BLOCK[name](fp8_config(keys.kFp8Dynamic128Sym, keys.kFp8Static128BlockSym))
    handed = []

    def product(A, B, As, Bs):
        handed.append(As)
        a = A.float().unflatten(-1, (-1, 128)) * As.unsqueeze(-1)
        return (a.flatten(-2) @ (B.float() * Bs.repeat_interleave(128, 0).repeat_interleave(128, 1)).T).bfloat16()

    monkeypatch.setattr(kernel, "apply_block_scaled_mm", product)
    layer = layer_of(kernel, weight=weight(torch.float8_e4m3fn), weight_scale_inv=torch.tensor([[0.5, 2.0]]))
    x = powers().view(1, 5, K)
    expected = kernel.apply_weights(layer, x, bias)
    assert consumers.accept(layer, kernels.CONSUMERS) is None
    got = kernel.apply_weights(layer, activation_of(x, kernel.tq_reads), bias)
    assert torch.equal(got, expected) and got.shape == expected.shape and got.dtype == expected.dtype
    assert torch.equal(kernel.apply_weights(layer, x, bias), expected)
    # The kernel's own quantizer is the measure of the layout; of size 1 a stride says nothing.
    assert handed[0].stride() == handed[2].stride() or kernel.tq_reads.layout == "tma_aligned"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("fp8_group128", "row_major")),
        ({"column_major_scales": True}, ("fp8_group128", "column_major")),
        ({"column_major_scales": True, "tma_aligned_scales": True}, ("fp8_group128", "tma_aligned")),
        ({"tma_aligned_scales": True}, ("fp8_group128", "row_major")),  # what vLLM's quantizer does with it
        (
            {"use_ue8m0": True, "column_major_scales": True, "tma_aligned_scales": True},
            ("fp8_group128_pow2", "tma_aligned"),
        ),
        ({"use_ue8m0": True, "column_major_scales": True}, ("fp8_group128_pow2", "column_major")),
        ({"use_ue8m0": True, "packs": True, "column_major_scales": True}, ("fp8_group128_ue8m0", "packed")),
    ],
)
def test_block_kernel_reads_what_its_quantizer_stores(options, expected, monkeypatch):
    from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT

    kernel = FP8_BLOCK["DeepGemmFp8BlockScaledMMKernel"](fp8_config(keys.kFp8Dynamic128Sym, keys.kFp8Static128BlockSym))
    options = dict(options)
    packs = options.pop("packs", False)
    monkeypatch.setattr(
        DeepGemmQuantScaleFMT,
        "from_oracle",
        classmethod(lambda cls: cls.UE8M0 if packs else cls.FLOAT32_CEIL_UE8M0),
    )
    quantizer = kernel.quant_fp8
    quantizer.use_deep_gemm_supported = packs
    quantizer.use_ue8m0 = quantizer.column_major_scales = quantizer.tma_aligned_scales = False
    for name, value in options.items():
        setattr(quantizer, name, value)
    assert kernels.reads_groups(kernel) == Reads(keys.kFp8Dynamic128Sym, *expected)


def test_cutlass_and_triton_store_scales_the_other_way_round():
    found = {
        name: kernels.reads_groups(kind(fp8_config(keys.kFp8Dynamic128Sym, keys.kFp8Static128BlockSym))).layout
        for name, kind in FP8_BLOCK.items()
    }
    assert found["CutlassFp8BlockScaledMMKernel"] == "column_major"
    assert found["TritonFp8BlockScaledMMKernel"] == "row_major"


@pytest.mark.parametrize("name", FP8_TOKEN)
def test_token_kernel_takes_the_key_it_could_always_have_taken(name, monkeypatch):
    kernel = FP8_TOKEN[name](
        fp8_config(keys.kFp8DynamicTokenSym, keys.kFp8StaticChannelSym),
        ["weight", "weight_scale", "input_scale", "input_scale_ub"],
    )
    monkeypatch.setattr(
        kernel,
        "apply_scaled_mm",
        lambda A, B, out_dtype, As, Bs, bias, output_shape: (
            (A[: output_shape[0]].float() * As[: output_shape[0]]) @ B.float() * Bs.t()
        ).to(out_dtype),
    )
    hooks.supply_missing_quantizer()
    layer = layer_of(kernel, weight=weight(torch.float8_e4m3fn).t(), weight_scale=torch.full((N, 1), 0.5))
    x = powers()
    expected = kernel.apply_weights(layer, x)
    assert consumers.accept(layer, kernels.CONSUMERS) is None
    assert kernel.tq_reads == Reads(keys.kFp8DynamicTokenSym, "fp8_token", "row_major")
    assert torch.equal(kernel.apply_weights(layer, activation_of(x, kernel.tq_reads)), expected)
    assert torch.equal(kernel.apply_weights(layer, x), expected)


def test_one_scale_for_all_tokens_computed_at_run_time_has_no_scheme():
    kernel = SimpleNamespace(config=fp8_config(keys.kFp8DynamicTensorSym, keys.kFp8StaticTensorSym))
    assert isinstance(kernels.reads_tokens(kernel), str)


def int8_kernel(kind, static=False, symmetric=True):
    return kind(
        Int8ScaledMMLinearLayerConfig(is_static_input_scheme=static, is_channelwise=True, input_symmetric=symmetric),
        ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"],
    )


INT8 = [kind for kind in kernels.CONSUMERS if "Int8" in kind.__name__]


@pytest.mark.parametrize("kind", INT8)
def test_int8_kernel_reads_what_its_configuration_says(kind):
    found = {
        (static, symmetric): tuple(kernels.CONSUMERS[kind].reads(int8_kernel(kind, static, symmetric)))[:2]
        for static in (False, True)
        for symmetric in (False, True)
    }
    assert found == {
        (False, True): (keys.kInt8DynamicTokenSym, "int8_token"),
        (True, True): (keys.kInt8StaticTensorSym, "int8_tensor"),
        (False, False): (keys.kInt8DynamicTokenAsym, "int8_token_azp"),
        (True, False): (keys.kInt8StaticTensorAsym, "int8_tensor_azp"),
    }


@dataclasses.dataclass
class WithZeroPoint(QuantizedActivation):
    zero_point: torch.Tensor | None = None


@pytest.mark.parametrize("kind", INT8)
@pytest.mark.parametrize("static", [False, True], ids=["token", "static"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "zero point"])
def test_int8_kernel_computes_from_what_it_would_have_made(kind, static, symmetric, monkeypatch):
    """Both ways end in the same product, here of torch, of codes, scales and zero points made by hand."""
    kernel = int8_kernel(kind, static, symmetric)
    codes = torch.randint(-128, 128, (5, K), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    scale = torch.tensor(0.25) if static else torch.arange(1, 6).float().view(5, 1)
    zero = None if symmetric else torch.tensor(7, dtype=torch.int32) if static else torch.arange(5).int().view(5, 1)
    x, bias = ((codes.float() - (0 if zero is None else zero)) * scale).bfloat16(), torch.arange(N).bfloat16()

    def product(a, b, scale_a, scale_b, out_dtype, bias=None):
        assert a.dtype == torch.int8 and scale_a is scale
        y = (a.float() @ b.float()) * scale_a * scale_b.view(1, -1)
        return (y if bias is None else y + bias.float()).to(out_dtype)

    def product_azp(a, b, scale_a, scale_b, out_dtype, azp_adj, azp=None, bias=None):
        assert (azp is None) == static
        y = a.float() @ b.float() - (azp_adj if azp is None else azp * azp_adj)
        return (y * scale_a * scale_b.view(1, -1) + bias.float()).to(out_dtype)

    def quantize(x, given=None, *rest, **options):
        return codes.view(x.shape), scale, zero

    def onednn(handler, a, output, scale_a, zero_point, adjustment, bias):
        assert zero_point is zero and adjustment is layer.azp_adj
        output.copy_(product(a, handler.weight, scale_a, layer.weight_scale, output.dtype, bias))

    monkeypatch.setattr(kernels.ops, "scaled_int8_quant", quantize)
    monkeypatch.setattr(kernels.ops, "onednn_scaled_int8_quant", quantize)
    monkeypatch.setattr(kernels.ops, "cutlass_scaled_mm", product)
    monkeypatch.setattr(kernels.ops, "cutlass_scaled_mm_azp", product_azp)
    monkeypatch.setattr(kernels.ops, "onednn_scaled_mm", onednn)
    op = SimpleNamespace(int8_scaled_mm_func=lambda a, b, sa, sb, dtype, bias: product(a, b, sa, sb, dtype, bias))
    monkeypatch.setattr(torch.ops, "vllm", op)
    from vllm.model_executor.kernels.linear.scaled_mm import triton

    monkeypatch.setattr(triton, "triton_scaled_mm", product)
    layer = layer_of(kernel, weight=weight(torch.int8).t(), weight_scale=torch.arange(1, N + 1).float().view(N, 1))
    layer.azp_adj = (
        None if symmetric else layer.weight.sum(0, keepdim=True, dtype=torch.int32) * (zero if static else 1)
    )
    layer.input_zero_point = zero if static else None
    layer.dnnl = kernel.dnnl_handler = SimpleNamespace(n=N, weight=layer.weight)
    kernel.linear_method = getattr(kernel, "_apply_weights_onednn", None)
    expected = kernel.apply_weights(layer, x, bias)
    assert consumers.accept(layer, kernels.CONSUMERS) is None
    activation = WithZeroPoint(codes, scale, x.dtype, x.shape, kernel.tq_reads.key, zero)
    assert torch.equal(kernel.apply_weights(layer, activation, bias), expected)
    assert torch.equal(kernel.apply_weights(layer, x, bias), expected)
    wrong = WithZeroPoint(
        codes, scale, x.dtype, x.shape, kernel.tq_reads.key, None if zero is not None else scale.int()
    )
    with pytest.raises(ValueError, match="zero point; quantize it for the layer"):
        kernel.apply_weights(layer, wrong, bias)


def stand_in_for(kind):
    """A kernel of this class without its constructor, which asks for a GPU."""
    if not hasattr(linear, kind):
        pytest.skip("not in this release of vLLM")
    return getattr(linear, kind).__new__(getattr(linear, kind))


@pytest.mark.parametrize("kind", ["CutlassNvFp4", "FlashInferCudnnNvFp4", "TorchNvFp4"])
@pytest.mark.parametrize("padding", [0, 16])
def test_nvfp4_kernel_computes_from_what_it_would_have_made(kind, padding, monkeypatch):
    """Codes and scales made by hand; the product says what it was given."""
    kernel, given = stand_in_for(f"{kind}LinearKernel"), []
    module = importlib.import_module(type(kernel).__module__)
    codes = torch.randint(0, 256, (5, K // 2), generator=torch.Generator().manual_seed(3)).to(torch.uint8)
    scales = torch.ones(128, 16).to(torch.float8_e4m3fn)

    def quantize(x, inverse, *, is_sf_swizzled_layout, backend, padded_n):
        assert is_sf_swizzled_layout and inverse is layer.input_global_scale_inv
        return torch.nn.functional.pad(codes, (0, (padded_n - K) // 2)), scales

    def product(a, b, *others, **named):
        given.append([a.view(torch.uint8), b.view(torch.uint8), *others, *named.values()])
        return (a.view(torch.uint8).float().sum(-1, keepdim=True) + torch.arange(N + 32)).bfloat16()

    monkeypatch.setattr(module, "scaled_fp4_quant", quantize)
    for owner in (module, kernels.ops, importlib.import_module("vllm.utils.flashinfer")):
        for name in ("cutlass_scaled_fp4_mm", "flashinfer_scaled_fp4_mm"):
            monkeypatch.setattr(owner, name, product, raising=False)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    layer = layer_of(kernel, weight=torch.zeros(N + 32, K // 2 + padding, dtype=torch.uint8), alpha=torch.tensor(0.5))
    layer.output_size_per_partition, layer.input_size_per_partition = N, K
    layer.weights_padding_cols = padding
    layer.weight_scale, layer.input_global_scale_inv = torch.ones(1), torch.tensor(0.25)
    x, bias = torch.ones(1, 5, K).bfloat16(), torch.arange(N).bfloat16()
    expected = kernel.apply_weights(layer, x.view(5, K), bias)
    consumer = kernels.CONSUMERS[type(kernel)]
    assert consumer.reads(kernel) == Reads(keys.kNvfp4Dynamic, "nvfp4", "swizzled_128x4")
    activation = QuantizedActivation(codes, scales, x.dtype, x.shape, keys.kNvfp4Dynamic)
    got = consumer.apply(kernel, layer, activation, bias)
    assert got.shape == (1, 5, N) and torch.equal(got.view(5, N), expected)
    mine, theirs = ([str(each) for each in values] for values in reversed(given))
    assert sorted(mine) == sorted(theirs)  # by name or by place


@pytest.mark.parametrize(
    ("kind", "layout"), [("TorchMxFp8", "swizzled_128x4"), ("FlashInferTrtllmMxfp8", "swizzled_8x4")]
)
def test_mxfp8_kernel_computes_from_what_it_would_have_made(kind, layout, monkeypatch):
    kernel, given = stand_in_for(f"{kind}LinearKernel"), []
    module = importlib.import_module(type(kernel).__module__)
    monkeypatch.setattr(kernels.current_platform, "is_cuda", lambda: True)
    consumer = kernels.CONSUMERS[type(kernel)]
    reads = consumer.reads(kernel)
    assert reads == Reads(keys.kMxfp8Dynamic, "mxfp8", layout, flat=True)
    x, bias = powers(), torch.arange(N).bfloat16()
    made = tq.quantize(x, scheme="mxfp8", layout=layout)

    def quantize(x, **options):
        assert options in ({}, {"is_sf_swizzled_layout": True})
        return made.data, made.scale.flatten()

    def product(a, b, *others, bias=None, **named):
        given.append([a.float(), b, *others, *named.values()])
        y = a.float() @ b.float()
        return (y if bias is None else y + bias).bfloat16()

    monkeypatch.setattr(module, "mxfp8_e4m3_quantize", quantize, raising=False)
    flashinfer = importlib.import_module("vllm.utils.flashinfer")
    monkeypatch.setattr(flashinfer, "flashinfer_mxfp8_quantize_8x4", quantize, raising=False)
    monkeypatch.setattr(flashinfer, "mm_mxfp8", product, raising=False)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    layer = layer_of(kernel, weight=weight(torch.float8_e4m3fn), weight_scale=torch.ones(N * 8, dtype=torch.uint8))
    layer._mxfp8_trtllm_output_size = N - 8 if "Trtllm" in kind else N
    bias = bias[: layer._mxfp8_trtllm_output_size]
    expected = kernel.apply_weights(layer, x, bias)
    vllm.load_adapter()
    activation = route.state.adapter.wrap(reads, made.data, made.scale, x.dtype, x.shape)
    assert activation.scale.dim() == 1 and activation.quant_key == keys.kMxfp8Dynamic
    assert torch.equal(consumer.apply(kernel, layer, activation, bias), expected)
    mine, theirs = ([str(each) for each in values] for values in reversed(given))
    assert sorted(mine) == sorted(theirs)


def test_the_amx_product_of_a_cpu_quantizes_for_itself():
    kind = next(kind for kind in INT8 if kind.__name__.startswith("CPU"))
    kernel = int8_kernel(kind)
    kernel.linear_method = kernel._apply_weights_sgl
    assert kernels.reads_int8_on_cpu(kernel) == "the consumer's matrix product quantizes for itself"


@pytest.mark.parametrize("kind", ["FlashInferFp8DeepGEMMDynamicBlockScaledKernel", "FlashInferTrtllmNvFp4LinearKernel"])
def test_kernels_that_take_what_depends_on_the_number_of_tokens_keep_their_input(kind):
    layer = layer_of(stand_in_for(kind), weight=weight(torch.float8_e4m3fn))
    reason = consumers.accept(layer, kernels.CONSUMERS)
    assert "--linear-backend" in reason and type(layer.quant_method.fp8_linear).__name__ == kind


@pytest.mark.parametrize("backend", ["cutlass", "triton", "torch", "deep_gemm"])
def test_kernels_are_still_those_of_the_backend_asked_for(backend):
    """The table of a backend, and the list it is searched in, hold vLLM's classes alone."""
    from vllm.model_executor.kernels import linear

    vllm.load_adapter()
    assert all(kind.__module__.startswith("vllm.") for kind in linear._LINEAR_BACKEND_KERNEL_MAP[backend])
    lists = (linear._POSSIBLE_FP8_KERNELS, linear._POSSIBLE_FP8_BLOCK_KERNELS, linear._POSSIBLE_INT8_KERNELS)
    assert all(kind.__module__.startswith("vllm.") for found in lists for kinds in found.values() for kind in kinds)
