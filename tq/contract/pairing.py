"""Pair each producer of a loaded model with the linear layer it feeds."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch

import tq
from tq.contract import boundaries
from tq.contract.boundaries import Boundary
from tq.contract.consumers import NOT_LISTED, find_attached, forget_attached
from tq.contract.repeat import Repeats
from tq.contract.route import FUSIONS, SILU_MUL, Adapter, Fusion, plan, route, state
from tq.contract.scales import Seen, attribute, implementation
from tq.contract.sites import BY_SHA, USUAL_PRODUCERS, Forward

NORMS = ("rms_norm", "gemma_rms_norm")


class Site(NamedTuple):
    """Producer `name` of a module feeds the linear layer at `path` from there, and the modules at `shares`, which take
    the same tensor unquantized; refusal: why that does not hold."""

    name: str
    path: tuple[str, ...] = ()
    refusal: str | None = None
    shares: tuple[tuple[str, ...], ...] = ()


def pair_model(model: torch.nn.Module, norms_stand_aside: str | None = None) -> list[Boundary]:
    """Route every boundary of `model` that can be fused; returns all boundaries. May be called again after a reload.

    norms_stand_aside: why norms must stay plain in this model, or `None`.
    """
    adapter = state.adapter
    if adapter is None:
        raise RuntimeError("pair_model: an adapter must be loaded, got none; call tq.contract.vllm.load_adapter()")
    placed = [(prefix, parent, site) for prefix, parent in model.named_modules() for site in sites(adapter, parent)]
    found = [_pair(adapter, site, prefix, parent, norms_stand_aside) for prefix, parent, site in _apart(placed)]
    boundaries.record(model, found)
    return found


def _apart(placed: list[tuple[str, Any, Site]]) -> Iterator[tuple[str, Any, Site]]:
    """The sites of (prefix, parent, site), each with a producer of its own.

    vLLM makes some activations once for all layers: without parameters, which a copy for each layer may replace. A
    shared producer with parameters stays as it is, everywhere.
    """
    owners = Counter(id(getattr(parent, site.name)) for _, parent, site in placed)
    for prefix, parent, site in placed:
        module = getattr(parent, site.name)
        if owners[id(module)] > 1 and site.refusal is None:
            if next(chain(module.parameters(), module.buffers()), None) is None:
                setattr(parent, site.name, _copy(module))
            else:
                site = site._replace(refusal="the module is shared by two parents")
        yield prefix, parent, site


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    """A module of the same class and settings, routed nowhere."""
    made = copy(module)
    unpair(made)
    return made


def sites(adapter: Adapter, parent: torch.nn.Module) -> Iterator[Site]:
    """Sites of which `parent` owns the producer. Of a module that was not read, those whose names are usual ones."""
    forward = forward_of(parent)
    if forward is None:
        refusal = f"the forward of {type(parent).__name__} is not a known one"
        for name in sorted(USUAL_PRODUCERS):
            if adapter.producer_of(getattr(parent, name, None)) is not None:
                yield Site(name, (), refusal)
        return
    for name, linear in forward.feeds.items():
        if isinstance(getattr(parent, name, None), torch.nn.Module):
            yield Site(name, (linear,), forward.refusal(name, parent), _readers(forward, name, (), parent))
    for name, children in forward.hands.items():
        if isinstance(getattr(parent, name, None), torch.nn.Module):
            yield _handed(name, (_present(parent, children),), parent, forward.refusal(name, parent))


def _present(parent: Any, children: str) -> str:
    """The name among `children` that `parent` has; the first if it has none."""
    names = children.split()
    return next((name for name in names if getattr(parent, name, None) is not None), names[0])


def _handed(name: str, path: tuple[str, ...], parent: Any, refusal: str | None) -> Site:
    """Site of a producer of `parent` whose output enters the module at `path`."""
    module = _resolve(parent, path)
    if module is None:
        return Site(name, path, refusal or f"the layer has no {path[-1]}")
    forward = forward_of(module)
    if forward is not None and forward.passes:
        return _handed(name, (*path, forward.passes), parent, refusal)
    if forward is None or not forward.enters:
        return Site(name, path, refusal or f"the forward of {type(module).__name__} is not a known one")
    refusal = refusal or forward.refusal(forward.enters, module)
    return Site(name, (*path, forward.enters), refusal, _readers(forward, forward.enters, path, module))


def _readers(forward: Forward, name: str, path: tuple[str, ...], module: Any) -> tuple[tuple[str, ...], ...]:
    """Paths of what takes the same tensor as the consumer, in the module at `path`."""
    return tuple((*path, other) for other in forward.shared.get(name, ()) if getattr(module, other, None) is not None)


def _pair(
    adapter: Adapter, site: Site, prefix: str, parent: torch.nn.Module, norms_stand_aside: str | None
) -> Boundary:
    def named(*parts: str) -> str:
        return ".".join(filter(None, (prefix, *parts)))

    module: Any = getattr(parent, site.name)
    linear = _resolve(parent, site.path) if site.refusal is None else None
    producer = adapter.producer_of(module)
    boundary = Boundary(named(site.name), producer or _class_name(module), named(*site.path) if site.path else "")
    reason = site.refusal
    if reason is None and switched_off(boundary):
        reason = "switched off by TQ_DISABLE_BOUNDARIES"
    if reason is None and producer in NORMS:
        reason = norms_stand_aside
    if reason is None and producer not in tq.PRODUCERS:
        reason = f"no producer for {_class_name(module)}"
    boundary.shares = tuple(named(*path) for path in site.shares)
    if linear is not None:
        boundary.kernel = implementation(linear)
        linear.tq_off = reason == "switched off by TQ_DISABLE_BOUNDARIES"
    if reason is None:
        reason = _fuse(adapter, FUSIONS[str(producer)], site, parent, module, linear, boundary)
    boundary.reason = reason
    if reason is not None:
        unpair(module)
        if linear is not None:
            adapter.withdraw(linear)
            forget_attached(linear)
    return boundary


def _fuse(
    adapter: Adapter, fusion: Fusion, site: Site, parent: torch.nn.Module, module: Any, linear: Any, boundary: Boundary
) -> str | None:
    """Let the consumer take a quantized input and route the producer; why that cannot be, or `None`."""
    refusal = None if linear is None else adapter.accept(linear)
    planned = refusal or plan(fusion, module, linear)
    if isinstance(planned, str):
        return f"{planned} ({boundary.kernel})" if planned == NOT_LISTED else planned
    boundary.scheme, boundary.layout = planned.reads.scheme, planned.reads.layout
    (find_attached if site.shares else forget_attached)(linear)
    _swap(fusion, site.path, parent, module, boundary)
    return None


def switched_off(boundary: Boundary) -> bool:
    """Whether a pattern of `TQ_DISABLE_BOUNDARIES` fits the boundary.

    A pattern is compared with the producer's module name, with the consumer's and with the kind of producer:
    "model.layers.0.*", "*.down_proj", "silu_mul".
    """
    return boundaries.switched_off(boundary.name, boundary.consumer, boundary.producer)


def _class_name(module: Any) -> str:
    kind = type(module)
    return getattr(kind, "tq_base", kind).__name__


def forward_of(module: Any) -> Forward | None:
    """What was read of the forward of `module`, if it was."""
    found = BY_SHA.get(forward_hash(module))
    if found is None or all(forward_hash(module, name) in hashes for name, hashes in found.through.items()):
        return found
    return None


def forward_hash(module: Any, name: str = "forward") -> str:
    """Hash of the source of a method of `module`; "" when there is none to read or it is wrapped."""
    forward = getattr(module, name, None)
    function = getattr(forward, "__func__", forward)
    return "" if function is None or hasattr(function, "__wrapped__") else _source_hash(function)


@lru_cache(maxsize=1024)
def _source_hash(function: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _resolve(parent: Any, path: tuple[str, ...], seen: Seen | None = None) -> Any:
    for name in path:
        if parent is not None:
            parent = attribute(parent, name, seen)
    return parent


@cache
def _routed_class(base: Any, fusion: Fusion) -> type:
    """Subclass of `base` whose forward routes; the consumer is looked up by name at each call.

    LoRA replaces `parent.<consumer>` after loading. A reference kept here would still see the base layer and its key.
    """

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if torch.compiler.is_compiling():
            return decided(self, x, residual, None)
        repeated = self.tq_repeats.run(x, residual)
        return decided(self, x, residual, Seen()) if repeated is None else repeated

    def decided(self: Any, x: torch.Tensor, residual: torch.Tensor | None, seen: Seen | None) -> Any:
        linear = _resolve(self.tq_parent, self.tq_path, seen)
        plain, repeats = self.tq_plain_forward, self.tq_repeats
        return route(fusion, self, x, residual, linear, plain, self.tq_boundary, repeats, seen)

    def tq_plain_forward(self: Any, *args: Any) -> Any:
        return base.forward(self, *args)

    members = {"forward": forward, "tq_plain_forward": tq_plain_forward, "tq_base": base, "__module__": __name__}
    return type(f"Tq{base.__name__}", (base,), members)


def _swap(fusion: Fusion, path: tuple[str, ...], parent: torch.nn.Module, module: Any, boundary: Boundary) -> None:
    # Past nn.Module.__setattr__, which would register the parent as a child of its own child.
    object.__setattr__(module, "tq_parent", parent)
    object.__setattr__(module, "tq_path", path)
    object.__setattr__(module, "tq_boundary", boundary)
    object.__setattr__(module, "tq_repeats", Repeats(state.adapter, tq.PRODUCERS[fusion.producer], boundary))
    base: Any = getattr(type(module), "tq_base", type(module))
    module.__class__ = _routed_class(base, fusion)


def unpair(module: Any) -> None:
    """Undo the routing of `module`, if any."""
    base = getattr(type(module), "tq_base", None)
    if base is not None:
        module.__class__ = base
        for name in ("tq_parent", "tq_path", "tq_boundary", "tq_repeats"):
            object.__delattr__(module, name)


def act_row(own: Callable[..., Any] | None) -> Callable[..., Any]:
    """Row of vLLM's table of fused activations, for acts that are not routed; `own` is the one that was there."""

    def row(x: torch.Tensor, linear: Any) -> Any:
        def plain(x: torch.Tensor) -> Any:
            if own is None:
                raise RuntimeError("silu_mul: the consumer must stay the same during a call; run the layer again")
            return own(x, linear)

        return route(SILU_MUL, None, x, None, linear, plain)

    return row


def act_row_supports(own: Callable[..., Any] | None, own_supports: Callable[..., bool] | None) -> Callable[..., bool]:
    """Whether the row has something to call."""

    def supports(act: Any, x: torch.Tensor, linear: Any) -> bool:
        if not isinstance(plan(SILU_MUL, act, linear, x), str):
            return True
        return own is not None and (own_supports is None or own_supports(act, x, linear))

    return supports
