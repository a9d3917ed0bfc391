"""Pair each producer of a loaded model with the linear layer it feeds."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from tq.contract import boundaries
from tq.contract.boundaries import Boundary
from tq.contract.route import NO_KEY, RMS_NORM, SILU_MUL, Fusion, plan, route, state
from tq.contract.scales import attribute, implementation

# SHA-256 (first 16 hex digits) of the source of forward methods whose data flow was read: the producer's output
# reaches nothing but the consumer. The same in vLLM 0.32 and 0.33. A subclass with the same forward is covered; one
# that overrides it, or another release that changes it, is not, and stays unfused.
KNOWN_DECODERS = {
    "71daafe15adcfe3d",  # LlamaDecoderLayer
    "432f56af86f4d7de",  # MistralDecoderLayer
    "ed1f90a51dab0fe3",  # Qwen2DecoderLayer, Qwen3DecoderLayer
}
KNOWN_ATTENTIONS = {
    "4408c421cfca87e3",  # LlamaAttention
    "e9ab3a3ad35f47cb",  # MistralAttention
    "ba0c8dad0d653295",  # Qwen2Attention
    "0cd83a1ca6e0b9d9",  # Qwen3Attention
}
MLPS_CALLING_ACT = {
    "643e2a950d96a35c",  # MistralMLP
    "42d88f10393524ea",  # Qwen2MLP, Qwen3MLP
}
MLPS_CALLING_TABLE = {
    # LlamaMLP: calls maybe_fused_act_quant, which calls a module whose type is not in its table, as a routed one's.
    "33cd5706cd8a0f90",
}


@dataclass(frozen=True)
class Site:
    """Producer `module` of a parent feeds parent.<path>; parent and the owner of the linear must be known forwards."""

    fusion: Fusion
    module: str
    path: tuple[str, ...]
    known_parents: frozenset[str]
    known_owners: frozenset[str] = frozenset()


SITES = (
    Site(
        RMS_NORM,
        "input_layernorm",
        ("self_attn", "qkv_proj"),
        frozenset(KNOWN_DECODERS),
        frozenset(KNOWN_ATTENTIONS),
    ),
    Site(
        RMS_NORM,
        "post_attention_layernorm",
        ("mlp", "gate_up_proj"),
        frozenset(KNOWN_DECODERS),
        frozenset(MLPS_CALLING_ACT | MLPS_CALLING_TABLE),
    ),
    Site(SILU_MUL, "act_fn", ("down_proj",), frozenset(MLPS_CALLING_ACT | MLPS_CALLING_TABLE)),
)


def pair_model(model: torch.nn.Module, norms_stand_aside: str | None = None) -> list[Boundary]:
    """Route every boundary of `model` that can be fused; returns all boundaries. May be called again after a reload.

    norms_stand_aside: why norms must stay plain in this model, or `None`.
    """
    found = []
    for prefix, parent in model.named_modules():
        for site in SITES:
            module = getattr(parent, site.module, None)
            if isinstance(module, torch.nn.Module):
                aside = norms_stand_aside if site.fusion is RMS_NORM else None
                found.append(_pair(site, prefix, parent, module, aside))
    boundaries.record(model, found)
    return found


def _pair(site: Site, prefix: str, parent: torch.nn.Module, module: Any, stand_aside: str | None) -> Boundary:
    def named(*parts: str) -> str:
        return ".".join(filter(None, (prefix, *parts)))

    boundary = Boundary(named(site.module), site.fusion.producer, named(*site.path))
    reason = stand_aside or _structure_refusal(site, parent, module)
    if reason is None:
        consumer = _resolve(parent, site.path)
        planned = plan(site.fusion, module, consumer)
        if isinstance(planned, str):
            reason = f"{planned} ({implementation(consumer)})" if planned == NO_KEY else planned
        else:
            boundary.scheme = planned.options["scheme"]
    boundary.reason = reason
    if reason is not None:
        unpair(module)
    else:
        _swap(site, parent, module, boundary)
    return boundary


def _structure_refusal(site: Site, parent: torch.nn.Module, module: Any) -> str | None:
    if forward_hash(parent) not in site.known_parents:
        return f"the forward of {type(parent).__name__} is not a known one"
    owner = _resolve(parent, site.path[:-1])
    if site.known_owners and forward_hash(owner) not in site.known_owners:
        return f"the forward of {type(owner).__name__} is not a known one"
    if site.module == "post_attention_layernorm" and getattr(parent, "ada_rms_norm_t_cond", None) is not None:
        return "the norm's output is multiplied before the consumer"
    if getattr(module, "tq_parent", parent) is not parent:
        return "the module is shared by two parents"
    return None


def forward_hash(module: Any) -> str:
    """Hash of the source of `module.forward`; "" when there is none to read or it is wrapped."""
    forward = getattr(module, "forward", None)
    function = getattr(forward, "__func__", forward)
    return "" if function is None or hasattr(function, "__wrapped__") else _source_hash(function)


@lru_cache(maxsize=1024)
def _source_hash(function: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _resolve(parent: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if parent is not None:
            parent = attribute(parent, name)
    return parent


@cache
def _routed_class(base: Any, fusion: Fusion) -> type:
    """Subclass of `base` whose forward routes; the consumer is looked up by name at each call.

    LoRA replaces `parent.<consumer>` after loading. A reference kept here would still see the base layer and its key.
    """

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        linear = _resolve(self.tq_parent, self.tq_path)
        return route(fusion, self, x, residual, linear, self.tq_plain_forward, self.tq_boundary)

    def tq_plain_forward(self: Any, *args: Any) -> Any:
        return base.forward(self, *args)

    members = {"forward": forward, "tq_plain_forward": tq_plain_forward, "tq_base": base, "__module__": __name__}
    return type(f"Tq{base.__name__}", (base,), members)


def _swap(site: Site, parent: torch.nn.Module, module: Any, boundary: Boundary) -> None:
    # Past nn.Module.__setattr__, which would register the parent as a child of its own child.
    object.__setattr__(module, "tq_parent", parent)
    object.__setattr__(module, "tq_path", site.path)
    object.__setattr__(module, "tq_boundary", boundary)
    base: Any = getattr(type(module), "tq_base", type(module))
    module.__class__ = _routed_class(base, site.fusion)


def unpair(module: Any) -> None:
    """Undo the routing of `module`, if any."""
    base = getattr(type(module), "tq_base", None)
    if base is not None:
        module.__class__ = base
        for name in ("tq_parent", "tq_path", "tq_boundary"):
            object.__delattr__(module, name)


def act_row(x: torch.Tensor, linear: Any) -> Any:
    """Row of vLLM's table of fused activations, for acts that are not routed, where `act_row_supports` holds."""
    return route(SILU_MUL, None, x, None, linear, _no_plain_form)


def act_row_supports(act: Any, x: torch.Tensor, linear: Any) -> bool:
    return state.adapter is not None and not isinstance(plan(SILU_MUL, act, linear, x), str)


def _no_plain_form(*args: Any) -> Any:
    raise RuntimeError("silu_mul: the consumer changed between the support check and the call; run the layer again")
