"""vLLM's `scaled_fp8_quant` for builds that do not have it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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
    """Codes = e4m3(input / scale), with a given scale, one per row, or amax / 448 of the whole tensor.

    input: [M, N]; returns (codes [max(M, num_token_padding), N] float8_e4m3fn, scale fp32). Follows vLLM's wrapper of
    the same name; scales of groups are not supported.
    """
    if scale is not None and scale.numel() != 1:
        raise NotImplementedError(
            f"scaled_fp8_quant: scale must have one element on this build, got shape {tuple(scale.shape)}; "
            "use a checkpoint with per-tensor scales"
        )
    per_row = scale is None and use_per_token_if_dynamic
    with _implementation(input):
        if per_row:
            quantized = tq.quantize(input, scheme="fp8_token", scale_ub=scale_ub)
        else:
            quantized = tq.quantize(input, scheme="fp8_tensor", scale=_amax_scale(input) if scale is None else scale)
    data, scale = quantized.data, quantized.scale
    rows = max(num_token_padding or 0, input.shape[0])
    if output is None and rows == input.shape[0]:
        return data, scale
    if output is None:
        output = torch.zeros((rows, input.shape[1]), dtype=data.dtype, device=data.device)
    output[: input.shape[0]] = data
    if per_row and rows > input.shape[0]:
        scale = torch.nn.functional.pad(scale, (0, 0, 0, rows - input.shape[0]), value=1.0)
    return output, scale


def _amax_scale(tensor: torch.Tensor) -> torch.Tensor:
    # The floor keeps an all-zero tensor from dividing by zero.
    return (tensor.abs().amax().float() / 448.0).clamp(min=torch.finfo(torch.float32).tiny).reshape(1)


def _implementation(tensor: torch.Tensor) -> AbstractContextManager[None]:
    large = not torch.compiler.is_compiling() and tensor.numel() > REFERENCE_ABOVE
    return tq.use_reference() if large else nullcontext()
