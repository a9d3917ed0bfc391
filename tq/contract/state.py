"""Rounding of recurrent states in vLLM: TQ_STATE_RECIPE=recipe.yaml vllm serve ...

Off unless that names a recipe of ModelOpt. Then each GDN and KDA layer rounds, before every prefill or decode call, the
states that the call reads, in the cache and once; a batch of decodes alone in the decode step, where `state_decode`
knows how. What the layer does besides is vLLM's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial, wraps
from typing import Any, NamedTuple

import torch

from tq.contract import boundaries, state_decode
from tq.state import Recipe, qdq_, read_recipe

VARIABLE = "TQ_STATE_RECIPE"
OP = "state rounding"


class Site(NamedTuple):
    """A class of layers in vLLM 0.32 and 0.33: the name of its quantizer in recipes, and the methods that read states
    first. None of them calls another."""

    quantizer: str
    methods: tuple[str, ...]


_QWEN = ("_forward_core", "_forward_core_decode_spec_fused_norm", "_forward_core_decode_aiter")
SITES = {
    "QwenGatedDeltaNetAttention": Site("gdn_state_quantizer", _QWEN),
    "OlmoHybridGatedDeltaNetAttention": Site("gdn_state_quantizer", ("_forward_core",)),
    "KimiGatedDeltaNetAttention": Site("kda_state_quantizer", ("_forward",)),
    "KimiK3DeltaAttention": Site("kda_state_quantizer", ("_forward",)),
}


class Active(NamedTuple):
    """Requests whose states a call reads: arguments of `tq.state.qdq_`."""

    slots: torch.Tensor
    has_initial_state: torch.Tensor | None
    num_accepted_tokens: torch.Tensor | None


def active_requests(metadata: Any) -> Iterator[Active]:
    """Those of vLLM's `GDNAttentionMetadata`, without a look at any tensor's values."""
    slots = metadata.non_spec_state_indices_tensor
    if metadata.num_prefills > 0:
        # First the decodes, then the prefills, some of which go on with a prompt; padding may follow.
        rows = metadata.num_decodes + metadata.num_prefills
        yield Active(slots[:rows], metadata.has_initial_state[:rows], None)
    elif metadata.num_decodes > 0:
        # One token a request. In a captured graph the padding counts, and has the null slot.
        yield Active(slots[: metadata.num_actual_tokens], None, None)
    if metadata.num_spec_decodes > 0:
        rows = metadata.num_spec_decodes
        yield Active(metadata.spec_state_indices_tensor[:rows], None, metadata.num_accepted_tokens[:rows])


def round_states(layer: Any, metadata: Any) -> None:
    """Round what the call about to run reads; nothing for a layer without options or a run without requests."""
    options, found = getattr(layer, "tq_state_options", None), metadata_of(layer, metadata)
    if options is None or found is None:
        return
    for active in active_requests(found):
        qdq_(layer.kv_cache[1], **active._asdict(), code=options.code, granularity=options.granularity)


def metadata_of(layer: Any, metadata: Any) -> Any:
    """That of the layer, or None."""
    return metadata.get(layer.prefix) if isinstance(metadata, dict) else None


def current_metadata() -> Any:
    """vLLM's metadata of the call about to run, by layer; None while it profiles."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().attn_metadata


def platform_refusal() -> str | None:
    """Why no layer of this process can be served, or None."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cuda_alike() else "vLLM's layers take another way on this platform"


def apply_recipe(model: torch.nn.Module) -> Recipe | None:
    """Give the layers of `model` what the recipe in TQ_STATE_RECIPE says; None without one.

    Returns a recipe of the layers by name, to be saved and followed again; it is empty for a model without states that
    match, such as a draft. Raises ValueError where the recipe cannot be read or followed: to serve without it is not
    what was asked for.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    recipe, chosen = read_recipe(path), []
    for module in model.modules():
        owner, site = site_of(module)
        name = f"{getattr(module, 'prefix', '')}.{site.quantizer}" if site else ""
        options = recipe.options(name) if site else None
        if options is None:
            continue
        reason = platform_refusal() or (why_not_packed if options.packed else why_not)(module)
        if reason is not None:
            raise ValueError(f"{OP}: {name} must be served as {VARIABLE}={path} says, but {reason}")
        chosen.append((name, options, module, owner, site))
    states = []
    for name, options, module, owner, site in chosen:
        states.append(state := boundaries.State(name, options.code, options.granularity, options.packed))
        if options.packed:
            continue
        module.tq_state_options = options  # type: ignore[assignment]
        state.reason = why_apart(module, owner, options, name)
        decode = state_decode.serve(owner, options, state) if state.reason is None else None
        module.tq_decode = decode  # type: ignore[assignment]
        for method in site.methods:
            if hasattr(owner, method):
                hook(owner, method)
    boundaries.record_states(model, states)
    return Recipe(tuple((name, options) for name, options, *_ in chosen))


def site_of(module: Any) -> tuple[Any, Any]:
    """(the class in `SITES` that `module` is of, its site), or twice None."""
    for owner in type(module).__mro__:
        if owner.__name__ in SITES:
            return owner, SITES[owner.__name__]
    return None, None


def why_not(layer: Any) -> str | None:
    """Why the states of a layer cannot be rounded in place, or None."""
    cache = layer.cache_config
    if cache.mamba_cache_mode != "none":
        return f"prefix caching shares its states (mamba_cache_mode {cache.mamba_cache_mode!r}); disable it"
    if getattr(cache, "use_kda_recoverssm", False) or getattr(cache, "use_replayssm", False):
        return "RecoverSSM and ReplaySSM keep states that are not in the cache; disable them"
    dtype = layer.get_state_dtype()[1]
    if dtype != torch.float32:
        return f"its states are {dtype} and ModelOpt rounds float32; pass --mamba-ssm-cache-dtype float32"
    return None


def why_apart(layer: Any, owner: Any, options: Any, name: str) -> str | None:
    """Why the decode steps of a layer do not round its states themselves, or None."""
    native = state_decode.NATIVE.get(owner.__name__)
    if native is not None and boundaries.switched_off(name, native.step):
        return "switched off by TQ_DISABLE_BOUNDARIES"
    return state_decode.why_apart(layer, owner, options)


def why_not_packed(layer: Any) -> str | None:
    """Why the states of a layer are not packed though they should be, or None."""
    if getattr(layer, "tq_template", None) is None:
        return f"{type(layer).__name__} has no packed form"
    return None


def hook(owner: Any, name: str) -> None:
    """owner.name rounds states first, or lets its decode step do so, once; inside what breaks graphs, so that it runs
    in the same part of one."""
    original = owner.__dict__.get(name) or getattr(owner, name)
    inner = getattr(original, "__wrapped__", original)
    if hasattr(inner, "tq_original"):
        return

    @wraps(inner)
    def rounding(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = current_metadata()
        decode, found = getattr(self, "tq_decode", None), metadata_of(self, metadata)
        apart = partial(round_states, self, metadata)
        if decode is not None and found is not None and decode.takes(name, found):
            return decode.run(self, apart, inner, *args, **kwargs)
        apart()
        return inner(self, *args, **kwargs)

    rounding.tq_original = inner  # type: ignore[attr-defined]
    del rounding.__wrapped__
    if inner is original:
        setattr(owner, name, rounding)
        return
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture

    setattr(owner, name, eager_break_during_capture(rounding))
