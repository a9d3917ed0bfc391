"""Decode calls in vLLM whose step itself rounds the states it reads: `tq.state.gdn_decode` and `kda_decode` in the
place of vLLM's packed kernels, in batches of decodes alone.

What is put in their place is the name by which a layer's code looks the kernel up; it does nothing but inside a call
that has left its rounding to the step. The other way, a layer of our own, would repeat the convolution and what becomes
of the output, which change from one vLLM to the next; a name and the four conditions below do not, and are looked at
before a layer is served so. Whether the call really came is looked at after it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

from tq.contract.boundaries import State
from tq.state import FORMATS, GRANULARITIES, StateOptions, gdn_decode, kda_decode

logger = logging.getLogger("vllm.tq")

# Looked up in every call.
STEPS: dict[str, Callable[..., Any]] = {"gdn_decode": gdn_decode, "kda_decode": kda_decode}
STATE = "initial_state"  # by which name each kernel is given the cache


class Native(NamedTuple):
    """Where a class of layers of vLLM 0.32 and 0.33 decodes. entry: the method that rounds states first. caller: the
    one that calls `kernel`, looked up in `module`, None for that of the class. settings: attributes of a layer that
    goes that way. step: what is put in the kernel's place, of STEPS. slow: granularities with which it was not faster
    than a pass of its own and vLLM's kernel (perf/notes.md)."""

    entry: str
    caller: str
    kernel: str
    module: str | None
    settings: dict[str, Any]
    step: str
    slow: tuple[str, ...] = ()


_SLOW = "key_channel", "group16", "group32", "group64"
_KDA = "fused_recurrent_kda_packed_decode", "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
NATIVE = {
    "QwenGatedDeltaNetAttention": Native(
        "_forward_core",
        "_forward_core_decode_non_spec",
        "fused_recurrent_gated_delta_rule_packed_decode",
        None,
        {"enable_packed_recurrent_decode": True},  # VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE, which is on
        "gdn_decode",
    ),
    "KimiGatedDeltaNetAttention": Native("_forward", "_forward", *_KDA, {}, "kda_decode", _SLOW),
    # With its other backends one kernel does the convolution, the step and the norm.
    "KimiK3DeltaAttention": Native(
        "_forward", "_forward", *_KDA, {"kda_decode_backend": "triton"}, "kda_decode", _SLOW
    ),
}


def why_apart(layer: Any, owner: type, options: StateOptions) -> str | None:
    """Why the states of a layer are rounded by a pass of their own before each decode step, or None."""
    native = NATIVE.get(owner.__name__)
    if native is None:
        return f"{owner.__name__} decodes by a kernel that takes something else"
    if options.code not in FORMATS or options.granularity not in GRANULARITIES:
        return f"{native.step} does not round to {options.code} with a scale a {options.granularity}"
    if options.granularity in native.slow:
        return f"a scale a {options.granularity} makes {native.step} no faster than that"
    for name, wanted in native.settings.items():
        found = getattr(layer, name, None)
        if type(found) is not type(wanted) or found != wanted:
            return f"its {name} is {found!r}, not {wanted!r}"
    if on_rocm():
        return "vLLM's layers call other kernels on ROCm"
    if not {native.kernel, *filter(None, [native.module])} <= names_in(getattr(owner, native.caller, None)):
        return f"{owner.__name__}.{native.caller} calls no {native.kernel}"
    if not callable(getattr(module_of(owner), native.kernel, None)):
        return f"{module_of(owner).__name__} has no {native.kernel}"
    return None


def names_in(function: Any) -> set[str]:
    """Those of globals, attributes and modules in the code of a function, hooked or not; none without code."""
    while (inner := getattr(function, "tq_original", None) or getattr(function, "__wrapped__", None)) is not None:
        function = inner
    return set(getattr(getattr(function, "__code__", None), "co_names", ()))


def on_rocm() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_rocm()


def module_of(owner: type) -> Any:
    """In which the layers of a class of `NATIVE` look their kernel up."""
    name = NATIVE[owner.__name__].module
    return sys.modules[owner.__module__] if name is None else import_module(name)


class Call:
    """A call of a layer that has left its rounding to the step."""

    __slots__ = ("apart", "came", "layer")

    def __init__(self, layer: Any, apart: Callable[[], None]) -> None:
        self.layer, self.apart, self.came = layer, apart, False

    def step(self, name: str, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ours; where it does not take what it is given, the rounding and then vLLM's, from now on."""
        self.came = True
        decode: FusedDecode = self.layer.tq_decode
        if kwargs.get(STATE) is self.layer.kv_cache[1]:
            try:
                return STEPS[name](*args, **kwargs, code=decode.options.code, granularity=decode.options.granularity)
            except (TypeError, ValueError, NotImplementedError) as error:  # raised before anything is launched
                decode.give_up(str(error))
        else:
            decode.give_up(f"{name} is given states that are not those of the layer's cache")
        self.apart()
        return native(*args, **kwargs)


# A variable of the context, so that a thread that works on another batch has its own.
running: ContextVar[Call | None] = ContextVar("tq_state_decode", default=None)


class FusedDecode:
    """A layer's decode steps, and what is reported of them."""

    def __init__(self, native: Native, options: StateOptions, state: State) -> None:
        self.native, self.options, self.state = native, options, state

    def takes(self, method: str, metadata: Any) -> bool:
        """Whether a call of a method of the layer decodes alone, one token a request."""
        return (
            self.state.reason is None
            and method == self.native.entry
            and metadata.num_prefills == 0
            and metadata.num_decodes > 0
            and metadata.num_spec_decodes == 0
            and getattr(metadata, "spec_sequence_masks", None) is None
        )

    def give_up(self, reason: str) -> None:
        self.state.reason = reason
        logger.warning("tq: states of %s are rounded apart from the decode step: %s", self.state.name, reason)

    def run(self, layer: Any, apart: Callable[[], None], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """method(layer, ...), in which the step rounds. apart: rounds the same states in a pass of its own.

        Raises RuntimeError where the layer has decoded in another way, from states that were not rounded.
        """
        call = Call(layer, apart)
        token = running.set(call)
        try:
            result = method(layer, *args, **kwargs)
        finally:
            running.reset(token)
        if not call.came:
            raise RuntimeError(
                f"state rounding: {self.state.name} must decode by {self.native.kernel}, but did not; "
                f"set TQ_DISABLE_BOUNDARIES={self.native.step}"
            )
        return result


def serve(owner: type, options: StateOptions, state: State) -> FusedDecode:
    """What lets the decode steps of a layer, of which `why_apart` has nothing to say, round its states."""
    native = NATIVE[owner.__name__]
    put_in_place(module_of(owner), native.kernel, native.step)
    return FusedDecode(native, options, state)


def put_in_place(module: Any, kernel: str, name: str) -> None:
    """module.kernel asks the running call what is to be done, once; without one it is vLLM's own."""
    found = getattr(module, kernel)
    if hasattr(found, "tq_original"):
        return

    @wraps(found)
    def step(*args: Any, **kwargs: Any) -> Any:
        call = running.get()
        native = step.tq_original  # type: ignore[attr-defined]
        return native(*args, **kwargs) if call is None else call.step(name, native, args, kwargs)

    step.tq_original = found  # type: ignore[attr-defined]
    setattr(module, kernel, step)
