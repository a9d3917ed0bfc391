"""Where tq is called by vLLM, and what it supplies there. Imports vLLM only when called."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch

from tq.contract.vllm import logger, on_cpu

# Modules of loaders that finish a model's weights: most inherit the first.
LOADERS = ("base_loader", "weight_cache.ipc_loader")


def hook_model_loading(after: Callable[[torch.nn.Module], None]) -> None:
    """Call `after(model)` once the weights of a model are in their final form.

    That is before profiling, compilation and LoRA. The name is replaced where the loaders have imported it.
    """

    def process(original: Callable[..., Any], model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        after(model)
        return result

    for loader in LOADERS:
        _wrap(import_module(f"vllm.model_executor.model_loader.{loader}"), "process_weights_after_loading", process)


def hook_model_building(before: Callable[[], None], after: Callable[[torch.nn.Module], None]) -> None:
    """Call `before()` and `after(model)` around the building of a model, whose weights are not there yet."""

    def build(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before()
        model = original(*args, **kwargs)
        after(model)
        return model

    for loader in LOADERS:
        _wrap(import_module(f"vllm.model_executor.model_loader.{loader}"), "initialize_model", build)


def hook_cache_identity(fingerprint: Callable[[], str]) -> None:
    """Put tq's fingerprint into every `VllmConfig`, whose hash names the compile cache.

    vLLM looks compiled artifacts up by configuration and compares only the sources traced into the artifact: one
    made without tq would be found, and used, with it.
    """
    from vllm.engine.arg_utils import EngineArgs

    def create(original: Callable[..., Any], arguments: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(arguments.additional_config, dict):
            arguments.additional_config = {**arguments.additional_config, "tq": fingerprint()}
        else:
            logger.warning("tq: additional_config is not a dict; clear the compile cache when tq is added or updated")
        return original(arguments, *args, **kwargs)

    _wrap(EngineArgs, "create_engine_config", create)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """owner.name(...) becomes wrapper(<the original>, ...), once."""
    original = getattr(owner, name)
    if hasattr(original, "tq_original"):
        return

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.tq_original = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def supply_missing_quantizer() -> None:
    """Serve `scaled_fp8_quant` from tq on CPU builds, where the operator behind it is only a placeholder."""
    if not on_cpu():
        return
    from vllm import _custom_ops

    operator = getattr(torch.ops._C, "static_scaled_fp8_quant", None)
    if operator is None or not operator.default._schema.arguments:
        from tq.contract.cpu_quantizer import scaled_fp8_quant

        _custom_ops.scaled_fp8_quant = scaled_fp8_quant
