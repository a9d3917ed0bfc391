"""GGUF file (Llama architecture, byte-level BPE) to a Hugging Face folder in bfloat16.

Source followed: the GGUF specification and the tensor names of the `gguf` library. Weights are dequantized in float32
and rounded once to bfloat16; rotary rows go back to the half-split order that Hugging Face uses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

RMS_EPS = 1e-5  # the GGUF file holds the float32 neighbour 9.9999997e-06

_HF_NAME = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the GGUF order of rotary rows: pairs interleaved in each head, [H, D/2, 2, K] -> [H, 2, D/2, K]."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def convert(gguf_path: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of `gguf_path` into the new folder `folder`."""
    import gguf
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    reader = gguf.GGUFReader(gguf_path)

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    special = {
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": field("llama.embedding_length") // heads,
        "vocab_size": field("llama.vocab_size"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": RMS_EPS,
        "rope_theta": float(field("llama.rope.freq_base")),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
        **special,
    }
    weights = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                values = _unpermute(values, heads if parts[2] == "attn_q" else kv_heads)
            name = f"model.layers.{parts[1]}.{_HF_NAME[parts[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[parts[0]]
        weights[name] = values.bfloat16().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    pairs = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key.removesuffix("_id"): tokens[index] for key, index in special.items()},
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": field("tokenizer.chat_template"),
    }
    for name, content in (("config", config), ("generation_config", special), ("tokenizer_config", tokenizer_config)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
