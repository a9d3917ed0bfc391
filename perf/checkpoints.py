"""Llama-shaped checkpoints of random weights in compressed-tensors form, for whole engines.

weight = code * scale with one scale a tensor, an output channel or a block of 128 x 128; normal weights of variance
1 / columns. Random weights say nothing about quality: greedy tokens of two roundings soon part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

E4M3_MAX, INT8_MAX, BLOCK = 448.0, 127.0, 128
INPUT_SCALE = {"static": 0.01, "int8_static": 0.03}  # of inputs of unit variance


class Shape(NamedTuple):
    """Sizes of a model; the default is a Llama of 8 billion parameters with a quarter of its layers."""

    layers: int = 8
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Linear layer -> (rows, columns) of its weight."""
        key_values = self.kv_heads * self.hidden // self.heads
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (key_values, self.hidden),
            "self_attn.v_proj": (key_values, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }


def _scheme(kind: str, weights: str, activations: str, dynamic: bool) -> dict[str, Any]:
    """A group of a compressed-tensors configuration: what shares a scale among the weights and the activations."""
    args: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True}
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {**args, "strategy": weights, "dynamic": False},
        "input_activations": {**args, "strategy": activations, "dynamic": dynamic},
        "output_activations": None,
    }
    if weights == "block":
        group["weights"]["block_structure"] = [BLOCK, BLOCK]
        group["input_activations"]["group_size"] = BLOCK
    return group


SCHEMES = {
    "static": _scheme("float", "tensor", "tensor", False),
    "token": _scheme("float", "channel", "token", True),
    "block": _scheme("float", "block", "group", True),
    "int8_static": _scheme("int", "channel", "tensor", False),
    "int8_token": _scheme("int", "channel", "token", True),
}


def quantized(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, fp32 scales) of a weight, the greatest code being the greatest value."""
    strategy, rows, columns = SCHEMES[scheme]["weights"]["strategy"], *weight.shape
    integers = SCHEMES[scheme]["weights"]["type"] == "int"
    limit = INT8_MAX if integers else E4M3_MAX
    if strategy == "block":
        blocks = (
            pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        )
        scale = blocks.abs().amax((1, 3)) / limit
        expanded = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    else:
        scale = (weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().view(1)) / limit
        expanded = scale
    scaled = (weight / expanded).clamp(-limit, limit)
    return scaled.round().to(torch.int8) if integers else scaled.to(torch.float8_e4m3fn), scale.float()


def write_checkpoint(folder: Path, scheme: str, shape: Shape, device: str) -> None:
    """Writes the checkpoint, `config.json` last: where it is, all else is."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    files: dict[str, str] = {}

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device, generator=generator)

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, folder / name)
        files.update(dict.fromkeys(tensors, name))

    for layer in range(shape.layers):
        tensors = {}
        for name, (rows, columns) in shape.linears.items():
            key = f"model.layers.{layer}.{name}"
            codes, scale = quantized(normal(rows, columns) * columns**-0.5, scheme)
            tensors[f"{key}.weight"], tensors[f"{key}.weight_scale"] = codes, scale
            if scheme in INPUT_SCALE:
                tensors[f"{key}.input_scale"] = torch.full((1,), INPUT_SCALE[scheme], dtype=torch.float32)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = (1 + 0.1 * normal(shape.hidden)).bfloat16()
        save(f"layer{layer}.safetensors", tensors)
    rest = {"model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden).bfloat16()}
    rest["lm_head.weight"] = (normal(shape.vocabulary, shape.hidden) * shape.hidden**-0.5).bfloat16()
    rest["model.norm.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)
    save("rest.safetensors", rest)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text(json.dumps(config(scheme, shape), indent=1))


def config(scheme: str, shape: Shape) -> dict[str, Any]:
    """`config.json` of a checkpoint."""
    integers = SCHEMES[scheme]["weights"]["type"] == "int"
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if integers else "float-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": SCHEMES[scheme]},
        },
    }


def write_adapter(folder: Path, shape: Shape, rank: int = 8) -> None:
    """A LoRA of random matrices for the first layer, in the form of PEFT."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    names = ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
    tensors = {}
    for name in names:
        rows, columns = shape.linears[name]
        key = f"base_model.model.model.layers.0.{name}"
        for part, sizes in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            tensors[f"{key}.{part}.weight"] = (torch.randn(sizes, generator=generator) * sizes[1] ** -0.5).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".")[1] for name in names})
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**described, "task_type": "CAUSAL_LM"}))


def described(scheme: str, shape: Shape) -> str:
    """In words."""
    group = SCHEMES[scheme]
    activations = group["input_activations"]
    kind = "FP8" if activations["type"] == "float" else "INT8"
    how = f"{'dynamic' if activations['dynamic'] else 'static'} per {activations['strategy']}"
    return (
        f"{shape.layers} layers, hidden {shape.hidden}, intermediate {shape.intermediate}, {kind} W8A8, weights per "
        f"{group['weights']['strategy']}, inputs {how}, random weights"
    )
