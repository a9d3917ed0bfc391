"""Where activations flow in vLLM's models: for each forward method that was read, what its producers feed.

The same in vLLM 0.32.0 and 0.33.0. A forward is known by the SHA-256 of its source (first 16 hex digits): a subclass
that keeps it is covered; a class that overrides it, or a release that changes it, is not, and stays unfused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Unless(NamedTuple):
    """The flow holds unless this attribute of the module is true (a module is; `None` and absence are not)."""

    attribute: str
    reason: str


@dataclass(frozen=True)
class Forward:
    """classes: those of vLLM with this forward, "file.Class"; the first is the one that was read, its copies equal it.

    enters: the linear layer that takes the input. passes: the module that takes the input. feeds: producer -> the
    linear layer that takes its output. hands: producer -> the module that takes its output; of several names a layer
    has one. What happens in a module, its own forward says. Nothing else reads any of these, but their shape, dtype
    and device, and but what `shared` names, by producer or by `enters`: modules that take the same tensor where they
    exist, and so get it unquantized. unless: by the same names. through: attribute -> hashes of the methods, one of
    which it must be, that forward goes on in.
    """

    sha: str
    classes: str
    enters: str = ""
    passes: str = ""
    feeds: dict[str, str] = field(default_factory=dict)
    hands: dict[str, str] = field(default_factory=dict)
    unless: dict[str, tuple[Unless, ...]] = field(default_factory=dict)
    shared: dict[str, tuple[str, ...]] = field(default_factory=dict)
    through: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def refusal(self, name: str, module: object) -> str | None:
        """Why what was read of producer or layer `name` does not hold for this module, or `None`."""
        for attribute, reason in self.unless.get(name, ()):
            value = getattr(module, attribute, None)
            if value is not None and value is not False:
                return reason
        return None


def _decoder(sha: str, classes: str, attention: str = "self_attn", mlp: str = "mlp", **more: Any) -> Forward:
    """The usual layer: norm, attention, norm, MLP."""
    return Forward(sha, classes, hands={"input_layernorm": attention, "post_attention_layernorm": mlp}, **more)


def _sandwich(sha: str, classes: str) -> Forward:
    """Norms before and after both; those after feed the residual."""
    return Forward(sha, classes, hands={"input_layernorm": "self_attn", "pre_feedforward_layernorm": "mlp"})


def _attention(sha: str, classes: str, enters: str = "qkv_proj", **more: Any) -> Forward:
    return Forward(sha, classes, enters=enters, **more)


def _mlp(sha: str, classes: str, enters: str = "gate_up_proj", leaves: str = "down_proj", **more: Any) -> Forward:
    return Forward(sha, classes, enters=enters, feeds={"act_fn": leaves}, **more)


_GATHERED = Unless("use_attn_reduce_scatter_for_moe", "the norm's output is gathered from all ranks")
_SCATTERED = Unless("use_sequence_parallel_moe", "the norm's output is sharded over the sequence")

_SHARED: dict[str, Any] = {
    "unless": {
        "post_attention_layernorm": (
            Unless("block_sparse_moe", "the norm's output also enters the router and experts"),
        )
    }
}

FORWARDS = (
    _decoder("71daafe15adcfe3d", "llama.LlamaDecoderLayer"),
    _decoder(
        "ed1f90a51dab0fe3",
        "qwen2.Qwen2DecoderLayer qwen3.Qwen3DecoderLayer qwen3_moe.Qwen3MoeDecoderLayer gemma.GemmaDecoderLayer "
        "solar.SolarDecoderLayer",
    ),
    _decoder(
        "432f56af86f4d7de",
        "mistral.MistralDecoderLayer",
        unless={
            "post_attention_layernorm": (
                Unless("ada_rms_norm_t_cond", "the norm's output is multiplied before the consumer"),
            )
        },
    ),
    _decoder("8df3b528d54b1de4", "glm4_moe.Glm4MoeDecoderLayer"),
    _decoder("f90c19a7539b6b8a", "ernie45_moe.Ernie4_5_MoeDecoderLayer"),
    _decoder("ab6bc85ab9c3fe24", "glm4.Glm4DecoderLayer"),
    _decoder("65ad747763ff948f", "granite.GraniteDecoderLayer"),
    _decoder(
        "46e6430c986b2674", "granitemoehybrid.GraniteMoeHybridMambaDecoderLayer", "mamba", "shared_mlp", **_SHARED
    ),
    _decoder("452156473c2091fa", "granitemoehybrid.GraniteMoeHybridAttentionDecoderLayer", mlp="shared_mlp", **_SHARED),
    _decoder("b298ec5cf5bd5344", "granitemoe.GraniteMoeDecoderLayer", mlp="block_sparse_moe"),
    _decoder("12cbea59332d219e", "granitemoeshared.GraniteMoeSharedDecoderLayer", mlp="block_sparse_moe"),
    _decoder("61425d4b80dce0b8", "qwen2_moe.Qwen2MoeDecoderLayer"),
    _decoder("3ff896be762d11d7", "minicpm.MiniCPMDecoderLayer"),
    _decoder("32769447f046abdd", "hyperclovax.HyperCLOVAXDecoderLayer"),
    _decoder("aee6fb5f713727e8", "exaone_moe.ExaoneMoeDecoderLayer"),
    _decoder("dc17fc0147ce4869", "llama4.Llama4DecoderLayer", mlp="feed_forward"),
    _decoder("9c453f67236c3daa", "mixtral.MixtralDecoderLayer", mlp="block_sparse_moe"),
    _decoder("aff820379d36af07", "minimax_m2.MiniMaxM2DecoderLayer", mlp="block_sparse_moe"),
    _decoder("daf59849bb37c3d0", "gpt_oss.TransformerBlock", attention="attn"),
    _decoder(
        "afc3b5b7784a8656",
        "qwen3_next.Qwen3NextDecoderLayer",
        "self_attn linear_attn",
        unless={"input_layernorm": (_GATHERED,), "post_attention_layernorm": (_GATHERED,)},
    ),
    _decoder(
        "1a400f32120b8f9e",
        "deepseek_v2.DeepseekV2DecoderLayer",
        unless={"input_layernorm": (_SCATTERED,), "post_attention_layernorm": (_SCATTERED,)},
    ),
    Forward(
        "bd19e654d53eac7e",
        "internlm2.InternLMDecoderLayer",
        hands={"attention_norm": "attention", "ffn_norm": "feed_forward"},
    ),
    _sandwich("b5f55c06078d7d22", "gemma2.Gemma2DecoderLayer"),
    _sandwich("ef8240f53966ddb9", "gemma3.Gemma3DecoderLayer"),
    _sandwich("b384971afb3b6eb6", "gemma4.Gemma4DecoderLayer"),
    Forward(
        "6cf9f8469707d98f",
        "nemotron_h.NemotronHMLPDecoderLayer nemotron_h.NemotronHMoEDecoderLayer",
        hands={"norm": "mixer"},
    ),
    Forward("49a3895fbd8dd537", "nemotron_h.NemotronHAttentionDecoderLayer", hands={"norm": "mixer"}),
    Forward(
        "e154eeded5148cfe", "nemotron_h.NemotronHMambaDecoderLayer mamba2.Mamba2DecoderLayer", hands={"norm": "mixer"}
    ),
    _attention(
        "4408c421cfca87e3",
        "llama.LlamaAttention mixtral.MixtralAttention gemma.GemmaAttention gemma2.Gemma2Attention glm4.Glm4Attention "
        "deepseek_v2.DeepseekAttention solar.SolarAttention minicpm.MiniCPMAttention qwen2_moe.Qwen2MoeAttention "
        "hyperclovax.HyperCLOVAXAttention",
    ),
    _attention("e9ab3a3ad35f47cb", "mistral.MistralAttention"),
    _attention("ba0c8dad0d653295", "qwen2.Qwen2Attention"),
    _attention("0cd83a1ca6e0b9d9", "qwen3.Qwen3Attention"),
    _attention("3b1a3f0021a921e2", "qwen3_moe.Qwen3MoeAttention"),
    _attention("af381100dc2cc58c", "qwen3_next.Qwen3NextAttention"),
    _attention("146011759baad531", "glm4_moe.Glm4MoeAttention"),
    _attention("491bb61fe405900a", "ernie45_moe.Ernie4_5_MoeAttention"),
    _attention("bf07feba6c39db35", "minimax_m2.MiniMaxM2Attention"),
    _attention("cffa69f16ad1cf1b", "gpt_oss.OAIAttention"),
    _attention("a1fa152c9f374e88", "llama4.Llama4Attention"),
    _attention("942f41cfd210af30", "granite.GraniteAttention granitemoe.GraniteMoeAttention"),
    _attention("e7c778dbc50ff748", "granitemoehybrid.GraniteMoeHybridAttention"),
    _attention("c83c48afae45ff72", "gemma3.Gemma3Attention"),
    _attention(
        "2dbb9cb8a21d5bb6",
        "gemma4.Gemma4Attention",
        unless={"qkv_proj": (Unless("is_kv_shared_layer", "the layer projects queries alone"),)},
    ),
    _attention("40fa850e072d2e20", "internlm2.InternLM2Attention", enters="wqkv"),
    _attention("50a8cf87c242f23c", "nemotron_h.NemotronHAttention"),
    Forward("dd71f52bb0d646bb", "mamba.mamba_mixer2.MambaMixer2", enters="in_proj"),
    Forward(
        "1916e63b9e1a72b2",
        "mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention",
        enters="in_proj_qkvz",
        shared={"in_proj_qkvz": ("in_proj_ba",)},
        through={"_forward_method": ("f4e836d850fc6f9c", "dae4b5562b374c07")},  # on a GPU of Nvidia, on a CPU
    ),
    Forward("7b9eaa8c1bb7a731", "deepseek_v2.DeepseekV2MLAAttention AXK1.AXK1MLAAttention", passes="mla_attn"),
    Forward(
        "5a50465cfb8f9cae",
        "mla.MultiHeadLatentAttentionWrapper",
        enters="fused_qkv_a_proj",
        feeds={"q_a_layernorm": "q_b_proj"},
        shared={"fused_qkv_a_proj": ("indexer", "g_proj"), "q_a_layernorm": ("indexer",)},
        unless={
            "fused_qkv_a_proj": (Unless("q_proj", "queries and keys have a projection each"),),
            "q_a_layernorm": (
                Unless("fuse_qkv_rmsnorm", "vLLM fuses the norm with the one beside it"),
                Unless("dcp_q_replicate", "the consumer is sharded over the context"),
            ),
        },
    ),
    # Calls maybe_fused_act_quant, which calls a module whose type is not in its table, as a routed one's.
    _mlp("33cd5706cd8a0f90", "llama.LlamaMLP"),
    _mlp("643e2a950d96a35c", "mistral.MistralMLP hyperclovax.HyperCLOVAXMLP"),
    _mlp(
        "42d88f10393524ea",
        "qwen2.Qwen2MLP glm4_moe.Glm4MoeMLP ernie45_moe.Ernie4_5_MoeMLP granite.GraniteMLP gemma.GemmaMLP "
        "deepseek_v2.DeepseekV2MLP exaone4.Exaone4GatedMLP solar.SolarMLP minicpm.MiniCPMMLP",
    ),
    _mlp("b9e18e62654fa45d", "gemma2.Gemma2MLP gemma3.Gemma3MLP gemma4.Gemma4MLP"),
    _mlp("4d6c73ed1cb86eae", "internlm2.InternLM2MLP", leaves="w2"),
    _mlp("e36149516daff3b2", "granitemoeshared.GraniteMoeSharedMLP", enters="input_linear", leaves="output_linear"),
    _mlp(
        "27fc14d96feacc1a",
        "qwen3_moe.Qwen3MoeMLP qwen2_moe.Qwen2MoeMLP",
        unless={"gate_up_proj": (Unless("expert_gate", "the input also enters the gate of the experts"),)},
    ),
    _mlp("74abe45acd3829f7", "nemotron_h.NemotronHMLP", enters="up_proj"),
)

BY_SHA = {forward.sha: forward for forward in FORWARDS}
# Names that a producer has in a model that is not in the table; "norm" says too little.
USUAL_PRODUCERS = {
    name for forward in FORWARDS for name in (*forward.hands, *forward.feeds) if name not in ("norm", "q_a_layernorm")
}
