"""Checkpoints of hybrid models with random weights: 4 layers with the heads of Qwen3-Next and of Kimi-Linear.

Three layers of the four are Gated DeltaNet or Kimi Delta Attention with 32 value heads of 128 x 128; hidden sizes,
experts and vocabularies are small. Random weights say nothing about quality. Decays are spread as training starts
them, so that states keep something of hundreds of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS, HEADS, WIDTH, TAPS = 1024, 2048, 1024, 4, 32, 128, 4


def shared() -> dict[str, Any]:
    """What both configs say."""
    return {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


class Weights(dict[str, torch.Tensor]):
    """Tensors by name, made in the order they are asked for."""

    def linear(self, name: str, rows: int, columns: int | None = None, gain: float = 1.0) -> None:
        """Outputs of about the size of the inputs, HIDDEN of them for None, times `gain`."""
        columns = columns or HIDDEN
        self[f"{name}.weight"] = (torch.randn(rows, columns) * (gain * columns**-0.5)).bfloat16()

    def norm(self, name: str, size: int, mean: float) -> None:
        self[f"{name}.weight"] = (mean + 0.1 * torch.randn(size)).bfloat16()

    def conv(self, name: str, channels: int) -> None:
        self[f"{name}.weight"] = (torch.randn(channels, 1, TAPS) * TAPS**-0.5).bfloat16()

    def decays(self, name: str, channels: int) -> None:
        """exp(A_log) from 1 to 16, softplus(dt_bias) from 0.001 to 0.1."""
        self[f"{name}.A_log"] = torch.empty(HEADS).uniform_(1, 16).log()
        step = torch.empty(channels).uniform_(-3, -1).mul_(torch.tensor(10.0).log()).exp_()
        self[f"{name}.dt_bias"] = step + (-(-step).expm1()).log()

    def mlp(self, name: str, intermediate: int) -> None:
        self.linear(f"{name}.gate_proj", intermediate)
        self.linear(f"{name}.up_proj", intermediate)
        self.linear(f"{name}.down_proj", HIDDEN, intermediate)

    def ends(self, mean: float) -> None:
        self["model.embed_tokens.weight"] = torch.randn(VOCABULARY, HIDDEN).bfloat16()
        self.linear("lm_head", VOCABULARY, gain=4.0)
        self.norm("model.norm", HIDDEN, mean)


def qwen3_next() -> tuple[dict[str, Any], Weights]:
    """(config, weights): 16 key and 32 value heads, the last layer with attention, 4 experts; norms are 1 + weight."""
    heads, kv_heads, experts, expert_size, key_heads = 8, 2, 4, 256, HEADS // 2
    config = shared() | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": WIDTH, 
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "layer_types": ["linear_attention"] * (LAYERS - 1) + ["full_attention"], "linear_conv_kernel_dim": TAPS,
        "linear_key_head_dim": WIDTH, "linear_value_head_dim": WIDTH, "linear_num_key_heads": key_heads,
        "linear_num_value_heads": HEADS, "decoder_sparse_step": 1, "moe_intermediate_size": expert_size,
        "shared_expert_intermediate_size": expert_size, "num_experts": experts, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "mlp_only_layers": [],
    }  # fmt: skip
    weights = Weights()
    weights.ends(mean=0.0)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights.norm(f"{name}.input_layernorm", HIDDEN, 0.0)
        weights.norm(f"{name}.post_attention_layernorm", HIDDEN, 0.0)
        if layer < LAYERS - 1:
            mixer = f"{name}.linear_attn"
            weights.linear(f"{mixer}.in_proj_qkvz", 2 * (key_heads + HEADS) * WIDTH)
            weights.linear(f"{mixer}.in_proj_ba", 2 * HEADS)
            weights.conv(f"{mixer}.conv1d", (2 * key_heads + HEADS) * WIDTH)
            weights.decays(mixer, HEADS)
            weights.norm(f"{mixer}.norm", WIDTH, 1.0)
            weights.linear(f"{mixer}.out_proj", HIDDEN, HEADS * WIDTH)
        else:
            mixer = f"{name}.self_attn"
            weights.linear(f"{mixer}.q_proj", 2 * heads * WIDTH)
            weights.linear(f"{mixer}.k_proj", kv_heads * WIDTH)
            weights.linear(f"{mixer}.v_proj", kv_heads * WIDTH)
            weights.linear(f"{mixer}.o_proj", HIDDEN, heads * WIDTH)
            weights.norm(f"{mixer}.q_norm", WIDTH, 0.0)
            weights.norm(f"{mixer}.k_norm", WIDTH, 0.0)
        weights.linear(f"{name}.mlp.gate", experts)
        weights.linear(f"{name}.mlp.shared_expert_gate", 1)
        weights.mlp(f"{name}.mlp.shared_expert", expert_size)
        for expert in range(experts):
            weights.mlp(f"{name}.mlp.experts.{expert}", expert_size)
    return config, weights


def kimi_linear() -> tuple[dict[str, Any], Weights]:
    """(config, weights): 32 heads of KDA, the last layer with multi-head latent attention, no experts."""
    heads, rank, rope = 16, 512, 64
    config = shared() | {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": WIDTH, "kv_lora_rank": rank, "qk_nope_head_dim": WIDTH,
        "qk_rope_head_dim": rope, "v_head_dim": WIDTH, "mla_use_nope": True, "q_lora_rank": None, "num_experts": None,
        "linear_attn_config": {
            "kda_layers": list(range(1, LAYERS)), "full_attn_layers": [LAYERS], "head_dim": WIDTH, "num_heads": HEADS,
            "short_conv_kernel_size": TAPS,
        },
    }  # fmt: skip
    weights = Weights()
    weights.ends(mean=1.0)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        mixer = f"{name}.self_attn"
        weights.norm(f"{name}.input_layernorm", HIDDEN, 1.0)
        weights.norm(f"{name}.post_attention_layernorm", HIDDEN, 1.0)
        if layer < LAYERS - 1:
            for part in "qkv":
                weights.linear(f"{mixer}.{part}_proj", HEADS * WIDTH)
                weights.conv(f"{mixer}.{part}_conv1d", HEADS * WIDTH)
            weights.linear(f"{mixer}.b_proj", HEADS)
            for gate in "fg":
                weights.linear(f"{mixer}.{gate}_a_proj", WIDTH)
                weights.linear(f"{mixer}.{gate}_b_proj", HEADS * WIDTH, WIDTH)
            weights.decays(mixer, HEADS * WIDTH)
            weights[f"{mixer}.A_log"] = weights[f"{mixer}.A_log"].view(1, 1, HEADS, 1)
            weights.norm(f"{mixer}.o_norm", WIDTH, 1.0)
            weights.linear(f"{mixer}.o_proj", HIDDEN, HEADS * WIDTH)
        else:
            weights.linear(f"{mixer}.q_proj", heads * (WIDTH + rope))
            weights.linear(f"{mixer}.kv_a_proj_with_mqa", rank + rope)
            weights.norm(f"{mixer}.kv_a_layernorm", rank, 1.0)
            weights.linear(f"{mixer}.kv_b_proj", heads * 2 * WIDTH, rank)
            weights.linear(f"{mixer}.o_proj", HIDDEN, heads * WIDTH)
        weights.mlp(f"{name}.mlp", INTERMEDIATE)
    return config, weights


MODELS: dict[str, Callable[[], tuple[dict[str, Any], Weights]]] = {
    "qwen3_next": qwen3_next,
    "kimi_linear": kimi_linear,
}


def write_checkpoint(model: str, folder: Path) -> Path:
    """The folder of a model's config.json and model.safetensors, the same in every run."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config, weights = MODELS[model]()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder
