"""Layers with packed states, put in the place of vLLM's where a recipe asks for them. Imports vLLM only when called."""

from __future__ import annotations

import os
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from tq.contract.packed_state import OP, PackedCache, gdn_core, kda_core, template_of, why_not_packed
from tq.contract.state import SITES, VARIABLE, current_metadata, platform_refusal
from tq.state import StateOptions, read_recipe

GDN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
KDA = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
KDA_KERNELS = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
PACKABLE = ("QwenGatedDeltaNetAttention", "KimiGatedDeltaNetAttention")


def wanted() -> bool:
    """Whether the recipe in TQ_STATE_RECIPE keeps any state packed."""
    path = os.environ.get(VARIABLE)
    return path is not None and any(options and options.packed for _, options in read_recipe(path).rules)


def options_of(kind: str, prefix: str) -> StateOptions | None:
    """The options of a packed layer of a class of vLLM, or None for one that is not to be packed."""
    path = os.environ.get(VARIABLE)
    options = read_recipe(path).options(f"{prefix}.{SITES[kind].quantizer}") if path else None
    return options if options is not None and options.packed else None


def metadata_of(layer: Any) -> Any:
    """vLLM's metadata of the call, or None while it profiles."""
    found = current_metadata()
    return found.get(layer.prefix) if isinstance(found, dict) else None


def gdn_layer(native: Any) -> type:
    """The packed form of vLLM's GDN layer of Qwen models, whose module is `native`."""

    class PackedQwenGatedDeltaNetAttention(PackedCache, native.QwenGatedDeltaNetAttention):
        def __init__(self, config: Any, vllm_config: Any, prefix: str = "", *args: Any, **kwargs: Any) -> None:
            super().__init__(config, vllm_config, prefix, *args, **kwargs)
            options = options_of("QwenGatedDeltaNetAttention", prefix)
            if options is not None:
                check(self, vllm_config, prefix)
                heads, key_heads = self.num_v_heads // self.tp_size, self.num_k_heads // self.tp_size
                self.tq_template = template_of(options, heads, self.head_v_dim, self.head_k_dim, key_heads, "head")

        def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
            if self.tq_template is None:
                return super()._forward_core(mixed_qkv, b, a, core_attn_out)
            metadata = metadata_of(self)
            if metadata is None:
                return self._warmup_prefill_kernels(mixed_qkv, 0)
            return gdn_core(self, native, metadata, mixed_qkv, b, a, core_attn_out)

        def _warmup_prefill_kernels(self, *args: Any, **kwargs: Any) -> None:
            self.tq_warming = self.tq_template is not None
            try:
                super()._warmup_prefill_kernels(*args, **kwargs)
            finally:
                self.tq_warming = False

    return PackedQwenGatedDeltaNetAttention


def kda_layer(native: Any, kernels: str = KDA_KERNELS) -> type:
    """The packed form of vLLM's KDA layer of Kimi-Linear, whose module is `native`."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    class PackedKimiGatedDeltaNetAttention(PackedCache, native.KimiGatedDeltaNetAttention):
        def __init__(self, config: Any, vllm_config: Any, prefix: str = "", *args: Any, **kwargs: Any) -> None:
            super().__init__(config, vllm_config, prefix, *args, **kwargs)
            options = options_of("KimiGatedDeltaNetAttention", prefix)
            if options is not None:
                check(self, vllm_config, prefix)
                heads, size = self.local_num_heads, self.head_dim
                self.tq_template = template_of(options, heads, size, size, heads, "key_channel")

        @eager_break_during_capture
        def _forward(self, mixed_qkv: Any, g1: Any, g2: Any, beta: Any, core_attn_out: Any) -> None:
            if self.tq_template is None:
                return super()._forward(mixed_qkv=mixed_qkv, g1=g1, g2=g2, beta=beta, core_attn_out=core_attn_out)
            metadata = metadata_of(self)
            if metadata is None:
                return None
            chunks = import_module(kernels).chunk_kda_with_fused_gate
            functions = SimpleNamespace(
                is_conv_state_dim_first=native.is_conv_state_dim_first,
                causal_conv1d_fn=native.causal_conv1d_fn,
                causal_conv1d_update=native.causal_conv1d_update,
                chunk_kda_with_fused_gate=chunks,
            )
            kda_core(self, functions, metadata, mixed_qkv, g1, beta, core_attn_out)
            core_attn_out.copy_(self.o_norm(core_attn_out, g2))
            return None

    return PackedKimiGatedDeltaNetAttention


def check(layer: Any, vllm_config: Any, prefix: str) -> None:
    """Raises ValueError where the states of a layer cannot be kept packed."""
    reason = platform_refusal() or why_not_packed(layer, vllm_config)
    if reason is not None:
        raise ValueError(f"{OP}: {prefix} must be served as {VARIABLE}={os.environ.get(VARIABLE)} says, but {reason}")


def register_layers() -> None:
    """Let vLLM make packed layers, once; each is a plain one unless the recipe names it.

    Raises ValueError where another plugin has replaced the layer.
    """
    from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot

    for name, module, make in zip(PACKABLE, (GDN, KDA), (gdn_layer, kda_layer), strict=True):
        present = op_registry_oot.get(name)
        if present is not None and issubclass(present, PackedCache):
            continue
        if present is not None:
            raise ValueError(f"{OP}: {name} must be vLLM's own, got {present}; leave that plugin out")
        PluggableLayer.register_oot(make(import_module(module)), name=name)


def prepare_layers() -> None:
    """Before a model is built."""
    if wanted():
        register_layers()


def declare_pages(model: torch.nn.Module) -> None:
    """After a model is built: its class tells vLLM what the slots of its layers hold, from which the sizes of pages and
    of attention blocks follow."""
    if any(getattr(module, "tq_template", None) is not None for module in model.modules()):
        type(model).get_mamba_specs_from_config = classmethod(specs_of_layers)  # type: ignore[attr-defined]


def specs_of_layers(_model: type, vllm_config: Any) -> list[Any]:
    """vLLM's descriptions of the states of the layers that it has built."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.kv_cache_interface import MambaSpec

    layers = get_layers_from_vllm_config(vllm_config, MambaBase).values()  # type: ignore[type-abstract]
    return [
        MambaSpec(shapes=tuple(layer.get_state_shape()), dtypes=tuple(layer.get_state_dtype()), block_size=-1)
        for layer in layers
    ]
