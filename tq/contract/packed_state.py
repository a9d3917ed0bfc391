"""Packed recurrent states in vLLM: GDN and KDA layers whose cache holds codes, scales and rings.

vLLM makes an object of a registered subclass wherever a model asks for one of its layers. These say what a slot holds,
from which vLLM computes its memory; prefills unpack the states they go on from and pack those they end with; decode
steps read and write packed states. Everything else in a layer is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tq.state import PackedState, Ring, StateOptions, gdn_decode_packed, kda_decode_packed, pack_, unpack

OP = "packed states"


def template_of(options: StateOptions, heads: int, values: int, keys: int, key_heads: int, gate: str) -> PackedState:
    """One slot of such states, on no device: what a slot holds, in order."""
    ring = None
    if options.replay:
        ring = Ring.zeros(1, heads, values, keys, length=options.replay, gate=gate, key_heads=key_heads, device="meta")
    code = "fp8_e4m3" if options.code == "fp8_e4m3" else "int8"  # no state has the code -128, in either range
    return PackedState.zeros(
        1,
        heads,
        values,
        keys,
        code=code,
        granularity=options.granularity,
        device="meta",
        ring=ring,
        residual=options.residual,
        hadamard=options.hadamard,
    )


def slot_shapes(template: PackedState) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape[1:]) for tensor in template.tensors)


def slot_dtypes(template: PackedState) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in template.tensors)


def packed_view(template: PackedState, tensors: Sequence[torch.Tensor]) -> PackedState:
    """The states in a cache, whose tensors are those of the template in order."""
    codes, scales, *rest = tensors
    residuals = None if template.residuals is None else rest.pop(0)
    ring = None
    if template.ring is not None:
        keys, updates, decays, counts = rest
        ring = Ring(keys, updates, decays, counts, template.ring.drafts)
    return PackedState(codes, scales, template.granularity, ring, residuals, template.hadamard)


class PackedCache:
    """Before a layer of vLLM among the bases of its packed form; where `tq_template` is None, nothing is packed.

    tq_warming: while vLLM tries its prefill, which is given states as `unpack` makes them."""

    tq_template: PackedState | None = None
    tq_state: PackedState
    tq_warming = False

    def get_state_shape(self) -> Any:
        shapes = super().get_state_shape()  # type: ignore[misc]
        return shapes if self.tq_template is None else (shapes[0], *slot_shapes(self.tq_template))

    def get_state_dtype(self) -> Any:
        dtypes = super().get_state_dtype()  # type: ignore[misc]
        if self.tq_warming:
            return dtypes[0], torch.float32
        return dtypes if self.tq_template is None else (dtypes[0], *slot_dtypes(self.tq_template))

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        super().bind_kv_cache(kv_cache)  # type: ignore[misc]
        if self.tq_template is not None:
            self.tq_state = packed_view(self.tq_template, self.kv_cache[1:])  # type: ignore[attr-defined]


def why_not_packed(layer: Any, vllm_config: Any) -> str | None:
    """Why the states of a layer cannot be kept packed, or None."""
    cache = vllm_config.cache_config
    if cache.mamba_cache_mode != "none":
        return f"prefix caching copies states (mamba_cache_mode {cache.mamba_cache_mode!r}); disable it"
    if layer.num_spec:
        return f"drafts are verified on states in {layer.num_spec + 1} slots; disable speculative decoding"
    if getattr(cache, "use_kda_recoverssm", False) or getattr(cache, "use_replayssm", False):
        return "RecoverSSM and ReplaySSM keep states of their own; disable them"
    if vllm_config.kv_transfer_config is not None:
        return "states would be sent to engines that may not read them; disable KV transfer"
    if cache.mamba_ssm_cache_dtype not in ("auto", "float32"):
        return f"--mamba-ssm-cache-dtype {cache.mamba_ssm_cache_dtype} asks for something else; leave it out"
    return None


def conv_state_of(layer: Any, native: Any) -> torch.Tensor:
    """[slots, channels, taps - 1], as vLLM's kernels take it."""
    state = layer.kv_cache[0]
    return state if native.is_conv_state_dim_first() else state.transpose(-1, -2)


def conv_weights_of(layer: Any) -> torch.Tensor:
    return layer.conv1d.weight.view(layer.conv1d.weight.size(0), layer.conv1d.weight.size(2))


def gdn_core(
    layer: Any, native: Any, m: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
) -> None:
    """QwenGatedDeltaNetAttention._forward_core on packed states, without speculative decoding.

    native: its module. m: metadata; decodes come before prefills. mixed_qkv [tokens, channels]; a, b [tokens, heads];
    out [tokens, heads, values], of which those of requests are written.
    """
    slots, count = m.non_spec_state_indices_tensor, m.num_actual_tokens
    mixed_qkv, a, b, out = mixed_qkv[:count], a[:count], b[:count], out[:count]
    conv, weights = conv_state_of(layer, native), conv_weights_of(layer)

    def decode(qkv: torch.Tensor, tokens: int) -> None:
        gates = a[:tokens], b[:tokens], layer.A_log, layer.dt_bias, layer.head_k_dim**-0.5
        gdn_decode_packed(qkv, *gates, layer.tq_state, out[:tokens].unsqueeze(1), slots[:tokens], True)

    if m.num_prefills == 0:
        given = mixed_qkv, conv, weights, layer.conv1d.bias, layer.activation
        decode(native.causal_conv1d_update(*given, conv_state_indices=slots[:count], validate_data=False), count)
        return
    mixed_qkv = native.causal_conv1d_fn(
        mixed_qkv.transpose(0, 1),
        weights,
        layer.conv1d.bias,
        activation=layer.activation,
        conv_states=conv,
        has_initial_state=m.has_initial_state,
        cache_indices=slots,
        query_start_loc=m.non_spec_query_start_loc,
        metadata=m,
    ).transpose(0, 1)
    first = m.num_decode_tokens
    if m.num_decodes:
        decode(mixed_qkv[:first], first)
    prepared = native.fused_post_conv_prep(
        conv_output=mixed_qkv[first:],
        a=a[first:],
        b=b[first:],
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        num_k_heads=layer.num_k_heads // layer.tp_size,
        head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim,
        apply_l2norm=True,
        output_g_exp=False,
    )
    q, k, v, log_decay, beta = (each.unsqueeze(0) for each in prepared)
    states = unpack(layer.tq_state, m.prefill_state_indices, has_initial_state=m.prefill_has_initial_state)
    result, states = layer.chunk_gated_delta_rule(
        q=q,
        k=k,
        v=v,
        g=log_decay,
        beta=beta,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=m.prefill_query_start_loc,
        chunk_indices=m.chunk_indices,
        chunk_offsets=m.chunk_offsets,
        use_qk_l2norm_in_kernel=False,
    )
    pack_(layer.tq_state, m.prefill_state_indices, states)
    out[first:] = result.squeeze(0)


def kda_core(
    layer: Any, native: Any, m: Any, mixed_qkv: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, out: torch.Tensor
) -> None:
    """KimiGatedDeltaNetAttention._forward on packed states, up to its norm and without speculative decoding.

    native: its module, with `chunk_kda_with_fused_gate`. mixed_qkv [tokens, channels]; gate [1, tokens, heads, keys];
    beta [1, tokens, heads]; out [1, tokens, heads, values]. As in vLLM, decodes that meet prefills are chunks too.
    """
    slots, count = m.non_spec_state_indices_tensor, m.num_actual_tokens
    mixed_qkv, gate, beta, out = mixed_qkv[:count], gate[:, :count], beta[:, :count], out[:, :count]
    conv, weights = conv_state_of(layer, native), conv_weights_of(layer)
    if m.num_prefills == 0:
        qkv = native.causal_conv1d_update(
            mixed_qkv,
            conv,
            weights,
            layer.conv1d.bias,
            activation="silu",
            conv_state_indices=slots[:count],
            validate_data=True,
            out=torch.empty(mixed_qkv.shape, dtype=mixed_qkv.dtype, device=mixed_qkv.device),
        )
        gates = gate, beta, layer.A_log, layer.dt_bias, layer.gate_lower_bound
        kda_decode_packed(qkv, *gates, layer.tq_state, slots[:count], out=out)
        return

    def convolved(part: int) -> torch.Tensor:
        channels = slice(part * layer.local_projection_size, (part + 1) * layer.local_projection_size)
        made = native.causal_conv1d_fn(
            mixed_qkv[:, channels].transpose(0, 1),
            weights[channels],
            None,
            activation="silu",
            conv_states=conv[:, channels],
            has_initial_state=m.has_initial_state,
            cache_indices=slots,
            query_start_loc=m.non_spec_query_start_loc,
            metadata=m,
        ).transpose(0, 1)
        return made.unflatten(-1, (-1, layer.head_dim)).unsqueeze(0)

    q, k, v = map(convolved, range(3))
    states = unpack(layer.tq_state, slots, has_initial_state=m.has_initial_state)
    result, states = native.chunk_kda_with_fused_gate(
        q=q,
        k=k,
        v=v,
        raw_g=gate,
        raw_beta=beta,
        A_log=layer.A_log,
        g_bias=layer.dt_bias,
        lower_bound=layer.gate_lower_bound,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=m.non_spec_query_start_loc,
    )
    pack_(layer.tq_state, slots, states)
    out[0] = result[0, :count]
