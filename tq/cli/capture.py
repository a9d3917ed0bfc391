"""Capture of producer inputs from a Hugging Face Llama model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

SITES = {  # site: (producer, linear layer that reads the result)
    "input_layernorm": ("rms_norm", "self_attn.q_proj"),
    "post_attention_layernorm": ("rms_norm", "mlp.gate_proj"),
    "silu_mul": ("silu_mul", "mlp.down_proj"),
    "o_proj": ("quantize", "self_attn.o_proj"),
}


def capture(model: Any, ids: list[int], captured: Sequence[int], quantized: Path) -> dict[str, torch.Tensor]:
    """Tensors `layers.i.<site>.<x, residual, weight, scale>` of one forward pass over `ids`.

    x and residual of a norm are taken apart: the output of the branch before, and the stream it is added to. The scale
    is the input scale of the reading linear layer in the FP8 folder `quantized`.
    """
    layers = model.model.layers
    seen: dict[str, torch.Tensor] = {}

    def keep_input(name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _, args: seen.__setitem__(name, args[0].detach()[0].clone())

    def keep_output(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def hook(_: torch.nn.Module, __: Any, output: Any) -> None:
            seen[name] = (output[0] if isinstance(output, tuple) else output).detach()[0].clone()

        return hook

    for index, layer in enumerate(layers):
        layer.input_layernorm.register_forward_pre_hook(keep_input(f"{index}.stream"))
        layer.post_attention_layernorm.register_forward_pre_hook(keep_input(f"{index}.middle"))
        layer.self_attn.register_forward_hook(keep_output(f"{index}.attention"))
        layer.self_attn.o_proj.register_forward_pre_hook(keep_input(f"{index}.o_proj"))
        layer.mlp.gate_proj.register_forward_hook(keep_output(f"{index}.gate"))
        layer.mlp.up_proj.register_forward_hook(keep_output(f"{index}.up"))
        layer.mlp.register_forward_hook(keep_output(f"{index}.mlp"))
    with torch.inference_mode():
        model(torch.tensor([ids]))

    out: dict[str, torch.Tensor] = {}
    with safe_open(quantized / "model.safetensors", framework="pt") as checkpoint:
        for i in captured:
            name = f"layers.{i}"
            if i:
                out[f"{name}.input_layernorm.x"] = seen[f"{i - 1}.mlp"]
                out[f"{name}.input_layernorm.residual"] = seen[f"{i - 1}.middle"]
            else:
                out[f"{name}.input_layernorm.x"] = seen["0.stream"]
            out[f"{name}.post_attention_layernorm.x"] = seen[f"{i}.attention"]
            out[f"{name}.post_attention_layernorm.residual"] = seen[f"{i}.stream"]
            out[f"{name}.silu_mul.x"] = torch.cat((seen[f"{i}.gate"], seen[f"{i}.up"]), dim=-1)
            out[f"{name}.o_proj.x"] = seen[f"{i}.o_proj"]
            for norm in ("input_layernorm", "post_attention_layernorm"):
                out[f"{name}.{norm}.weight"] = getattr(layers[i], norm).weight.detach().clone()
            for site, (_, linear) in SITES.items():
                out[f"{name}.{site}.scale"] = checkpoint.get_tensor(f"model.{name}.{linear}.input_scale")
    # One tensor may serve two sites, and safetensors refuses shared memory.
    return {key: value.clone(memory_format=torch.contiguous_format) for key, value in out.items()}
