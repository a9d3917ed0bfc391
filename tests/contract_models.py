"""Configurations of small models of several families, and what `tq explain` says of each, to stdout as JSON.

python tests/contract_models.py FOLDER
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["HF_HUB_OFFLINE"] = "1"

from contract_engine import CONFIG, QUANTIZATION

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True, "hidden_act": "silu"}
GROUPED = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1}
GROUPED |= {"topk_group": 1, "routed_scaling_factor": 1.0}
GEMMA = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 64,
    "sliding_window": 128,
    "tie_word_embeddings": True,
}
MLA = {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
MAMBA = {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 1, "conv_kernel": 4}
MAMBA |= {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3}
# One layer of each kind.
GATED_DELTA_NET = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2}
GATED_DELTA_NET |= {"linear_num_value_heads": 4, "linear_conv_kernel_dim": 4, "num_experts": 4}
GATED_DELTA_NET |= {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 128}
GATED_DELTA_NET |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
FAMILIES = {
    "LlamaForCausalLM": {"model_type": "llama"},
    "MistralForCausalLM": {"model_type": "mistral"},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", **EXPERTS, "num_experts": 4, "mlp_only_layers": [0]},
    "Qwen2ForCausalLM": {"model_type": "qwen2"},
    "Qwen3ForCausalLM": {"model_type": "qwen3"},
    "Phi3ForCausalLM": {"model_type": "phi3", "pad_token_id": 0},
    "Gemma2ForCausalLM": {"model_type": "gemma2", **GEMMA},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", **GEMMA},
    "Glm4ForCausalLM": {"model_type": "glm4", "attention_bias": True},
    "GraniteForCausalLM": {"model_type": "granite", "residual_multiplier": 0.5},
    "GraniteMoeHybridForCausalLM": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "shared_intermediate_size": 512,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "position_embedding_type": "rope",
    },
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3", **GROUPED, **MLA},
    "Qwen3NextForCausalLM": {"model_type": "qwen3_next", **EXPERTS, **GATED_DELTA_NET},
    "NemotronHForCausalLM": {"model_type": "nemotron_h", **MAMBA},
    "GptOssForCausalLM": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 256, "n_layer": 2, "n_head": 4},
}


def main(folder: Path) -> None:
    from tq.contract.explain import explain

    found = {}
    for name, family in FAMILIES.items():
        model = folder / name
        model.mkdir()
        quantized = {} if name == "GPT2LMHeadModel" else {"quantization_config": QUANTIZATION["static"]}
        config = {**CONFIG, "head_dim": 64, **family, "architectures": [name], **quantized}
        (model / "config.json").write_text(json.dumps(config))
        found[name] = [[b.name, b.consumer, b.producer, b.scheme, b.reason] for b in explain(model).boundaries]
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
