"""The linear kernels of vLLM 0.32 and 0.33 that can take a quantized input: one entry each. Imports vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.quantization.utils import nvfp4_utils, quant_utils
from vllm.platforms import current_platform
from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT

from tq.contract.consumers import NOT_LISTED, Consumer, Reads


def reads_tokens(kernel: Any) -> Reads | str:
    """E4M3 with one scale a token. Kernels with a static scale name their key themselves."""
    if kernel.config.activation_quant_key != quant_utils.kFp8DynamicTokenSym:
        return NOT_LISTED
    return _e4m3(kernel.config.activation_quant_key, "fp8_token", "row_major")


def reads_groups(kernel: Any) -> Reads | str:
    """E4M3 with one scale for each group of a token, stored as the kernel's quantizer is told to store them."""
    quantizer = kernel.quant_fp8
    scheme, layout = f"fp8_group{quantizer.group_size}", "row_major"
    if quantizer.column_major_scales:
        layout = "tma_aligned" if quantizer.tma_aligned_scales else "column_major"
    if quantizer.use_ue8m0:
        # The conditions under which vLLM's quantizer packs the exponents (`QuantFP8.forward_cuda`).
        packed = quantizer.use_deep_gemm_supported and quantizer.group_size == 128
        packed = packed and DeepGemmQuantScaleFMT.from_oracle() == DeepGemmQuantScaleFMT.UE8M0
        scheme, layout = (f"{scheme}_ue8m0", "packed") if packed else (f"{scheme}_pow2", layout)
    return _e4m3(kernel.config.activation_quant_key, scheme, layout)


def _e4m3(key: Any, scheme: str, layout: str) -> Reads | str:
    # The same keys carry fnuz codes on some AMD GPUs, whose maximum is 240.
    return Reads(key, scheme, layout) if key.dtype == torch.float8_e4m3fn else "no scheme for fnuz codes"


def reads_int8(kernel: Any) -> Reads:
    """INT8 with a static scale or one a token, with or without a zero point."""
    static, symmetric = kernel.config.is_static_input_scheme, kernel.config.input_symmetric
    key = f"kInt8{'StaticTensor' if static else 'DynamicToken'}{'Sym' if symmetric else 'Asym'}"
    scheme = f"int8_{'tensor' if static else 'token'}{'' if symmetric else '_azp'}"
    return Reads(getattr(quant_utils, key), scheme, "row_major")


_FOR_ITSELF = "the consumer's matrix product quantizes for itself"


def reads_int8_on_cpu(kernel: Any) -> Reads | str:
    # Chosen after loading, by the weight's shape and the CPU.
    if getattr(kernel, "linear_method", None) == kernel._apply_weights_sgl:
        return _FOR_ITSELF
    return reads_int8(kernel)


def reads_groups_of_many(kernel: Any) -> str:
    """From 32 tokens on DeepGEMM's, which would be taken; vLLM holds the other branch to be needed for accuracy."""
    return f"{_FOR_ITSELF} for few tokens; --linear-backend deep_gemm or cutlass takes it quantized"


def reads_nvfp4_by_tokens(kernel: Any) -> str:
    return "the layout of the consumer's scales depends on the number of tokens; another --linear-backend takes it"


def reads_nvfp4(kernel: Any) -> Reads:
    """E2M1 with an E4M3 scale for 16 elements, stored in tiles of 128 x 4."""
    return Reads(quant_utils.kNvfp4Dynamic, "nvfp4", "swizzled_128x4")


def reads_mxfp8(kernel: Any) -> Reads | str:
    """E4M3 with a UE8M0 scale for 32 elements, stored in tiles of 128 x 4 in one dimension."""
    if not current_platform.is_cuda():
        return "the consumer's scales are those of another platform"
    return Reads(quant_utils.kMxfp8Dynamic, "mxfp8", "swizzled_128x4", flat=True)


def reads_mxfp8_8x4(kernel: Any) -> Reads:
    """The same, in tiles of 8 x 4."""
    return Reads(quant_utils.kMxfp8Dynamic, "mxfp8", "swizzled_8x4", flat=True)


def apply_block(kernel: Any, layer: Any, activation: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """`Fp8BlockScaledMMLinearKernel.apply_weights` after its quantization."""
    params = kernel._get_layer_params(layer)
    output = kernel.apply_block_scaled_mm(
        A=_rows(activation.data), B=params.weight, As=activation.scale, Bs=params.block_scale
    )
    if bias is not None:
        output = output + bias
    return output.to(kernel.config.out_dtype).view(*activation.orig_shape[:-1], params.weight.shape[0])


def apply_cutlass_int8(kernel: Any, layer: Any, activation: Any, bias: torch.Tensor | None) -> torch.Tensor:
    weight, weight_scale, _, static_zero_point, adjustment = kernel._get_layer_params(layer)
    scales = {"scale_a": activation.scale, "scale_b": weight_scale, "out_dtype": activation.orig_dtype, "bias": bias}
    zero_point = _zero_point(activation)
    if zero_point is None:
        return ops.cutlass_scaled_mm(activation.data, weight, **scales)
    if static_zero_point is not None:
        zero_point = None  # it has been multiplied into the adjustment
    return ops.cutlass_scaled_mm_azp(activation.data, weight, azp_adj=adjustment, azp=zero_point, **scales)


def apply_triton_int8(kernel: Any, layer: Any, activation: Any, bias: torch.Tensor | None) -> torch.Tensor:
    weight, weight_scale, _, static_zero_point, adjustment = kernel._get_layer_params(layer)
    dtype, scale = activation.orig_dtype, activation.scale
    output = torch.ops.vllm.int8_scaled_mm_func(_rows(activation.data), weight, scale, weight_scale, dtype, bias)
    zero_point = _zero_point(activation)
    if zero_point is not None:
        scales = scale * (weight_scale.view(1, -1) if weight_scale.dim() else weight_scale)
        if static_zero_point is None:
            output -= scales * (zero_point * adjustment).to(dtype)
        else:
            output -= (scales * adjustment).to(dtype)
    return output.view(*activation.orig_shape[:-1], -1)


def apply_onednn_int8(kernel: Any, layer: Any, activation: Any, bias: torch.Tensor | None) -> torch.Tensor:
    *_, adjustment = kernel._get_layer_params(layer)
    rows = _rows(activation.data)
    output = torch.empty((rows.shape[0], kernel.dnnl_handler.n), dtype=activation.orig_dtype)
    zero_point = _zero_point(activation)
    ops.onednn_scaled_mm(kernel.dnnl_handler, rows, output, activation.scale, zero_point, adjustment, bias)
    return output.view(*activation.orig_shape[:-1], -1)


def _apply_nvfp4(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """multiply(rows, scales, layer, dtype) -> the product; around it vLLM's kernels do the same."""

    def apply(kernel: Any, layer: Any, activation: Any, bias: torch.Tensor | None) -> torch.Tensor:
        # The tiles of the scales cover what is padded here.
        padding = nvfp4_utils.nvfp4_weight_padding_bytes(layer)
        rows = nvfp4_utils.pad_nvfp4_activation_for_cutlass(_rows(activation.data), padding)
        output = multiply(rows, activation.scale, layer, activation.orig_dtype)
        output = nvfp4_utils.slice_nvfp4_output(output, layer.output_size_per_partition)
        if bias is not None:
            output = output + bias
        return output.view(*activation.orig_shape[:-1], layer.output_size_per_partition)

    return apply


def _cutlass_nvfp4(rows: torch.Tensor, scales: torch.Tensor, layer: Any, dtype: torch.dtype) -> torch.Tensor:
    return ops.cutlass_scaled_fp4_mm(rows, layer.weight, scales, layer.weight_scale, layer.alpha, dtype)


def _cudnn_nvfp4(rows: torch.Tensor, scales: torch.Tensor, layer: Any, dtype: torch.dtype) -> torch.Tensor:
    from vllm.utils.flashinfer import flashinfer_scaled_fp4_mm

    weights = layer.weight, scales, layer.weight_scale, layer.alpha
    return flashinfer_scaled_fp4_mm(rows, *weights, dtype, backend="cudnn")


def _torch_nvfp4(rows: torch.Tensor, scales: torch.Tensor, layer: Any, dtype: torch.dtype) -> torch.Tensor:
    pairs = torch.float4_e2m1fn_x2
    both = {"scale_a": scales.reshape(-1), "scale_b": layer.weight_scale.reshape(-1)}
    return torch._scaled_mm(rows.view(pairs), layer.weight.view(pairs).t(), out_dtype=dtype, **both) * layer.alpha


def apply_torch_mxfp8(kernel: Any, layer: Any, activation: Any, bias: torch.Tensor | None) -> torch.Tensor:
    scales = {"scale_a": activation.scale.view(torch.float8_e8m0fnu), "scale_b": layer.weight_scale}
    dtype = activation.orig_dtype
    output = torch._scaled_mm(_rows(activation.data), layer.weight.t(), bias=bias, out_dtype=dtype, **scales)
    return output.reshape(*activation.orig_shape[:-1], layer.weight.shape[0])


def apply_trtllm_mxfp8(kernel: Any, layer: Any, activation: Any, bias: torch.Tensor | None) -> torch.Tensor:
    from vllm.utils.flashinfer import mm_mxfp8

    scales, dtype = (activation.scale, layer.weight_scale), activation.orig_dtype
    options = {"out_dtype": dtype, "backend": "trtllm", "use_8x4_sf_layout": True}
    output = mm_mxfp8(_rows(activation.data), layer.weight.t(), *scales, **options)
    output = output[:, : layer._mxfp8_trtllm_output_size].contiguous()
    if bias is not None:
        output = output + bias
    return output.view(*activation.orig_shape[:-1], layer._mxfp8_trtllm_output_size)


def _rows(data: torch.Tensor) -> torch.Tensor:
    return data.view(-1, data.shape[-1])


def _zero_point(activation: Any) -> torch.Tensor | None:
    # vLLM's own activations have no place for one.
    return getattr(activation, "zero_point", None)


apply_cutlass_nvfp4, apply_cudnn_nvfp4, apply_torch_nvfp4 = map(
    _apply_nvfp4, (_cutlass_nvfp4, _cudnn_nvfp4, _torch_nvfp4)
)

# By name: 0.32 has not all of them.
_KERNELS = {
    "CutlassFP8ScaledMMLinearKernel": Consumer(reads_tokens),
    "ChannelWiseTorchFP8ScaledMMLinearKernel": Consumer(reads_tokens),
    "CutlassFp8BlockScaledMMKernel": Consumer(reads_groups, apply_block),
    "DeepGemmFp8BlockScaledMMKernel": Consumer(reads_groups, apply_block),
    "TritonFp8BlockScaledMMKernel": Consumer(reads_groups, apply_block),
    "BlockWiseTorchFP8ScaledMMLinearKernel": Consumer(reads_groups, apply_block),
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": Consumer(reads_groups_of_many),
    "CutlassInt8ScaledMMLinearKernel": Consumer(reads_int8, apply_cutlass_int8),
    "TritonInt8ScaledMMLinearKernel": Consumer(reads_int8, apply_triton_int8),
    "CPUInt8ScaledMMLinearKernel": Consumer(reads_int8_on_cpu, apply_onednn_int8),
    "CutlassNvFp4LinearKernel": Consumer(reads_nvfp4, apply_cutlass_nvfp4),
    "FlashInferCudnnNvFp4LinearKernel": Consumer(reads_nvfp4, apply_cudnn_nvfp4),
    "FlashInferTrtllmNvFp4LinearKernel": Consumer(reads_nvfp4_by_tokens),
    "TorchNvFp4LinearKernel": Consumer(reads_nvfp4, apply_torch_nvfp4),
    "TorchMxFp8LinearKernel": Consumer(reads_mxfp8, apply_torch_mxfp8),
    "FlashInferTrtllmMxfp8LinearKernel": Consumer(reads_mxfp8_8x4, apply_trtllm_mxfp8),
}
CONSUMERS: dict[type, Consumer] = {
    getattr(linear, name): consumer for name, consumer in _KERNELS.items() if hasattr(linear, name)
}
