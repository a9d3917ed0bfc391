"""vLLM's `scaled_fp8_quant` for builds that do not have it."""

from __future__ import annotations

from contextlib import nullcontext

import torch

import tq

# The interpreter runs one Triton program at a time in Python: fine for activations of a test model, minutes for the
# weights that pass through here while a model loads. Above this many elements the torch reference gives the same bits.
REFERENCE_ABOVE = 1 << 16


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = e4m3(input / scale), with a given scale, one per row, or amax / 448 of the whole tensor.

    input: [M, N]; returns (q [max(M, num_token_padding), N] float8_e4m3fn, scale fp32). Follows vLLM's wrapper of the
    same name; scales of groups are not supported.
    """
    if scale is not None and scale.numel() != 1:
        raise NotImplementedError(
            f"scaled_fp8_quant: scale must have one element on this build, got shape {tuple(scale.shape)}; "
            "use a checkpoint with per-tensor scales"
        )
    dynamic_rows = scale is None and use_per_token_if_dynamic
    if scale is None and not dynamic_rows:
        # The floor keeps an all-zero tensor from dividing by zero.
        scale = (input.abs().amax().float() / 448.0).clamp(min=torch.finfo(torch.float32).tiny).reshape(1)
    with _implementation(input):
        if dynamic_rows:
            quantized = tq.quantize(input, scheme="fp8_token", scale_ub=scale_ub)
            scale = quantized.scale
        else:
            quantized = tq.quantize(input, scheme="fp8_tensor", scale=scale)
    data = quantized.data
    rows = max(num_token_padding or 0, input.shape[0])
    if output is None and rows == input.shape[0]:
        return data, scale
    if output is None:
        output = torch.zeros((rows, input.shape[1]), dtype=data.dtype, device=data.device)
    output[: input.shape[0]] = data
    if dynamic_rows and rows > input.shape[0]:
        scale = torch.nn.functional.pad(scale, (0, 0, 0, rows - input.shape[0]), value=1.0)
    return output, scale


def _implementation(tensor: torch.Tensor):
    large = not torch.compiler.is_compiling() and tensor.numel() > REFERENCE_ABOVE
    return tq.use_reference() if large else nullcontext()
