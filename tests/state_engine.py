"""Runs engines of `perf.state_engine` on a CPU: a small hybrid model and vLLM's CUDA layer of GDN, whose Triton kernels
are stood in for by torch. Writes rows to stdout as JSON.

python tests/state_engine.py SECONDS ENGINES
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# One process, so that the model can be looked at.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

import torch
from torch.nn import functional

import tq.contract
from perf import state_checkpoints, state_engine, state_process
from perf.state_verdict import ENGINES, failures
from perf.state_watch import QWEN
from tq.contract import packed_layers, state

SIZES = {"HIDDEN": 64, "INTERMEDIATE": 64, "VOCABULARY": 128, "HEADS": 2, "WIDTH": 32}
CASES = {"PROMPTS": (1, 9, 30, 50), "EVEN": (4,) * 2, "NEW_TOKENS": 6, "BATCHES": (1, 2), "TURNS": 1, "VOCABULARY": 90}
OPTIONS = {
    "max_model_len": 128,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": None,
    "gpu_memory_utilization": 0.3,
    "attention_backend": None,
}


def convolve(x, history, weight):
    """Tokens [n, channels] behind the history [channels, taps - 1] -> (outputs, new history)."""
    joined = torch.cat([history.T, x])
    taps = weight.shape[1]
    out = sum(joined[i : i + len(x)].float() * weight[:, i].float() for i in range(taps))
    return functional.silu(out).to(x.dtype), joined[len(x) :].T


def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, **rest):
    out, bounds = torch.empty_like(x), query_start_loc.tolist()
    for i, slot in enumerate(cache_indices.tolist()):
        tokens = slice(bounds[i], bounds[i + 1])
        history = conv_states[slot] if has_initial_state[i] else torch.zeros_like(conv_states[slot])
        made, kept = convolve(x.T[tokens], history, weight)
        out.T[tokens] = made
        conv_states[slot] = kept
    return out


def causal_conv1d_update(x, conv_state, weight, bias, activation, conv_state_indices, **rest):
    out = torch.empty_like(x)
    for i, slot in enumerate(conv_state_indices.tolist()):
        out[i : i + 1], conv_state[slot] = convolve(x[i : i + 1], conv_state[slot].clone(), weight)
    return out


def steps(q, k, v, log_decay, beta, states, scale):
    """Tokens [n, heads, ...] one after another from states [heads, values, keys], which are changed; q and k normal."""
    group, out = v.shape[1] // q.shape[1], torch.empty(v.shape)
    q, k = (each.float().repeat_interleave(group, 1) for each in (q, k))
    for i in range(len(q)):
        states *= log_decay[i].exp()[:, None, None]
        update = beta[i, :, None] * (v[i].float() - (states @ k[i, :, :, None])[..., 0])
        states += update[..., None] * k[i, :, None, :]
        out[i] = scale * (states @ q[i, :, :, None])[..., 0]
    return out


def normal(x):
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)


def gates(a, b, A_log, dt_bias):
    return -A_log.exp() * functional.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def fused_post_conv_prep(conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, **rest):
    keys = num_k_heads * head_k_dim
    q, k, v = conv_output.split([keys, keys, conv_output.shape[1] - 2 * keys], 1)
    q, k = (normal(each.unflatten(1, (-1, head_k_dim))).to(conv_output.dtype) for each in (q, k))
    return q, k, v.unflatten(1, (-1, head_v_dim)), *gates(a, b, A_log, dt_bias)


def chunk_gated_delta_rule(q, k, v, g, beta, initial_state, cu_seqlens, **rest):
    out, states, bounds = torch.empty(v.shape), initial_state.clone(), cu_seqlens.tolist()
    for i in range(len(states)):
        t = slice(bounds[i], bounds[i + 1])
        out[0, t] = steps(q[0, t], k[0, t], v[0, t], g[0, t], beta[0, t], states[i], q.shape[-1] ** -0.5)
    return out.to(v.dtype), states


def packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, **rest):
    heads, values, keys = initial_state.shape[1:]
    key_heads = (mixed_qkv.shape[1] - heads * values) // (2 * keys)
    q, k, v, *rest = fused_post_conv_prep(mixed_qkv.float(), a, b, A_log, dt_bias, key_heads, keys, values)
    for i, slot in enumerate(ssm_state_indices.tolist()):
        token = slice(i, i + 1)
        out[i] = steps(q[token], k[token], v[token], *(each[token] for each in rest), initial_state[slot], scale)
    return out, initial_state


def gating_update(A_log, a, b, dt_bias, q, k, v, initial_state, cu_seqlens, ssm_state_indices, **rest):
    given = normal(q[0]), normal(k[0]), v[0], *gates(a, b, A_log, dt_bias)
    out, bounds = torch.empty(v.shape), cu_seqlens.tolist()
    for i, slot in enumerate(ssm_state_indices.tolist()[: len(bounds) - 1]):
        t = slice(bounds[i], bounds[i + 1])
        out[0, t] = steps(*(each[t] for each in given), initial_state[slot], q.shape[-1] ** -0.5)
    return out.to(v.dtype), initial_state


def stand_in():
    """vLLM's CUDA layer, on a CPU."""
    from importlib import import_module

    qwen = import_module(QWEN)
    qwen.causal_conv1d_fn, qwen.causal_conv1d_update = causal_conv1d_fn, causal_conv1d_update
    qwen.fused_post_conv_prep, qwen.fla_chunk_gated_delta_rule = fused_post_conv_prep, chunk_gated_delta_rule
    qwen.fused_recurrent_gated_delta_rule_packed_decode = packed_decode
    qwen.fused_sigmoid_gating_delta_rule_update = gating_update
    import_module("vllm._custom_ops").causal_conv1d_weight_pack = lambda weight: weight.unsqueeze(1)
    layer = qwen.QwenGatedDeltaNetAttention
    layer.forward_cpu, layer._warmup_prefill_kernels = layer.forward_cuda, lambda *arguments: None
    state.platform_refusal = packed_layers.platform_refusal = lambda: None


def change(module, values):
    for name, value in values.items():
        setattr(module, name, value)


def main(seconds, engines):
    change(state_checkpoints, SIZES)
    change(state_process, CASES)
    imported, started = state_process.import_vllm, state_process.start

    def import_vllm():
        imported()
        stand_in()

    def start(checkpoint, model, engine, options):
        if engine.recipe != "plugin_off":
            tq.contract.register()
        return started(checkpoint, model, engine, options | {"num_gpu_blocks_override": 64 if engine.watched else None})

    state_engine.import_vllm, state_process.start = import_vllm, start
    state_process.busy = lambda *arguments: {}  # there is no GPU
    chosen = [ENGINES[name] for name in engines.split(",")]
    rows = state_engine.all_engines(["qwen3_next"], chosen, float(seconds), lambda rows: None, OPTIONS)
    print("RESULT " + json.dumps({"rows": rows, "failures": failures(rows)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
