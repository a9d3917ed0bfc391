"""Entry point of the `vllm.general_plugins` group."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import tq
from tq.contract import boundaries, hooks, packed_layers, pairing, vllm
from tq.contract.state import apply_recipe

_registered = False


def register() -> None:
    """Let tq serve vLLM in this process: fuse what can be fused in every model loaded from now on.

    Called by vLLM in each of its processes, and callable by hand; the second call does nothing. Never raises: on any
    failure tq logs it and stays out. `TQ_DISABLE=1` in the environment does the same without a message;
    `TQ_DISABLE_BOUNDARIES` names boundaries to leave alone (`pairing.switched_off`). Does not initialise a device.
    """
    global _registered
    if _registered:
        return
    _registered = True
    if os.environ.get("TQ_DISABLE", "0") == "1":
        boundaries.disable("TQ_DISABLE=1")
        return
    try:
        unsupported = vllm.unsupported_version()
        if unsupported is not None:
            boundaries.disable(unsupported)
            vllm.logger.warning("tq is disabled: %s", unsupported)
            return
        hooks.hook_cache_identity(fingerprint)
        hooks.supply_missing_quantizer()
        hooks.hook_model_building(packed_layers.prepare_layers, packed_layers.declare_pages)
        hooks.hook_model_loading(_after_loading)
    except Exception as error:  # a plugin must not stop the engine
        boundaries.disable(f"registration failed: {error}")
        vllm.logger.exception("tq is disabled: registration failed")


def _after_loading(model: torch.nn.Module) -> None:
    recipe = apply_recipe(model)  # raises where it cannot be followed: it was asked for by name
    if recipe is not None:
        states = boundaries.states_summary(type(model).__name__, boundaries.report(model).states)
        vllm.logger.info("tq %s: %s", tq.__version__, states)
    try:
        vllm.load_adapter()
        found = pairing.pair_model(model, vllm.norms_stand_aside())
    except Exception as error:  # a plugin must not stop the engine
        for module in model.modules():
            pairing.unpair(module)
        boundaries.disable(f"pairing failed: {error}")
        vllm.logger.exception("tq: pairing failed, the model runs unfused")
        return
    vllm.logger.info(
        "tq %s: %s; ask why: llm.apply_model(tq.contract.report)", tq.__version__, boundaries.summary(found)
    )


SETTINGS = ("TQ_DISABLE_BOUNDARIES", "TQ_REFERENCE")


def fingerprint() -> str:
    """'<version>:<hash of every source file of tq, and of the settings that change what is fused>'"""
    digest = _sources().copy()
    for name in SETTINGS:
        digest.update(f"{name}={os.environ.get(name, '')}\n".encode())
    return f"{tq.__version__}:{digest.hexdigest()[:16]}"


@lru_cache(maxsize=1)
def _sources() -> Any:
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest
