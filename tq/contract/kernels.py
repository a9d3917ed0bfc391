"""The linear kernels of vLLM 0.32 and 0.33 that can take a quantized input: one entry each. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.quantization.utils import nvfp4_utils, quant_utils
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


def reads_int8(kernel: Any) -> Reads | str:
    """INT8 with a static scale or one a token. vLLM's activation has no place for a zero point."""
    if not kernel.config.input_symmetric:
        return "the consumer's input has a zero point"
    if kernel.config.is_static_input_scheme:
        return Reads(quant_utils.kInt8StaticTensorSym, "int8_tensor", "row_major")
    return Reads(quant_utils.kInt8DynamicTokenSym, "int8_token", "row_major")


def reads_int8_on_cpu(kernel: Any) -> Reads | str:
    # Chosen after loading, by the weight's shape and the CPU.
    if getattr(kernel, "linear_method", None) == kernel._apply_weights_sgl:
        return "the consumer's matrix product quantizes for itself"
    return reads_int8(kernel)


def reads_nvfp4(kernel: Any) -> Reads:
    """E2M1 with an E4M3 scale for 16 elements, stored in tiles of 128 x 4."""
    return Reads(quant_utils.kNvfp4Dynamic, "nvfp4", "swizzled_128x4")


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
    weight, weight_scale, *_ = kernel._get_layer_params(layer)
    return ops.cutlass_scaled_mm(
        activation.data,
        weight,
        scale_a=activation.scale,
        scale_b=weight_scale,
        out_dtype=activation.orig_dtype,
        bias=bias,
    )


def apply_triton_int8(kernel: Any, layer: Any, activation: Any, bias: torch.Tensor | None) -> torch.Tensor:
    weight, weight_scale, *_ = kernel._get_layer_params(layer)
    output = torch.ops.vllm.int8_scaled_mm_func(
        _rows(activation.data), weight, activation.scale, weight_scale, activation.orig_dtype, bias
    )
    return output.view(*activation.orig_shape[:-1], -1)


def apply_onednn_int8(kernel: Any, layer: Any, activation: Any, bias: torch.Tensor | None) -> torch.Tensor:
    *_, adjustment = kernel._get_layer_params(layer)
    rows = _rows(activation.data)
    output = torch.empty((rows.shape[0], kernel.dnnl_handler.n), dtype=activation.orig_dtype)
    ops.onednn_scaled_mm(kernel.dnnl_handler, rows, output, activation.scale, None, adjustment, bias)
    return output.view(*activation.orig_shape[:-1], -1)


def apply_cutlass_nvfp4(kernel: Any, layer: Any, activation: Any, bias: torch.Tensor | None) -> torch.Tensor:
    # The tiles of the scales cover what is padded here.
    padding = nvfp4_utils.nvfp4_weight_padding_bytes(layer)
    rows = nvfp4_utils.pad_nvfp4_activation_for_cutlass(_rows(activation.data), padding)
    output = ops.cutlass_scaled_fp4_mm(
        rows, layer.weight, activation.scale, layer.weight_scale, layer.alpha, activation.orig_dtype
    )
    output = nvfp4_utils.slice_nvfp4_output(output, layer.output_size_per_partition)
    if bias is not None:
        output = output + bias
    return output.view(*activation.orig_shape[:-1], layer.output_size_per_partition)


def _rows(data: torch.Tensor) -> torch.Tensor:
    return data.view(-1, data.shape[-1])


CONSUMERS: dict[type, Consumer] = {
    linear.CutlassFP8ScaledMMLinearKernel: Consumer(reads_tokens),
    linear.ChannelWiseTorchFP8ScaledMMLinearKernel: Consumer(reads_tokens),
    linear.CutlassFp8BlockScaledMMKernel: Consumer(reads_groups, apply_block),
    linear.DeepGemmFp8BlockScaledMMKernel: Consumer(reads_groups, apply_block),
    linear.TritonFp8BlockScaledMMKernel: Consumer(reads_groups, apply_block),
    linear.BlockWiseTorchFP8ScaledMMLinearKernel: Consumer(reads_groups, apply_block),
    linear.CutlassInt8ScaledMMLinearKernel: Consumer(reads_int8, apply_cutlass_int8),
    linear.TritonInt8ScaledMMLinearKernel: Consumer(reads_int8, apply_triton_int8),
    linear.CPUInt8ScaledMMLinearKernel: Consumer(reads_int8_on_cpu, apply_onednn_int8),
    linear.CutlassNvFp4LinearKernel: Consumer(reads_nvfp4, apply_cutlass_nvfp4),
}
