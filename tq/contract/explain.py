"""What tq would fuse in a model: built by vLLM from its configuration, on the meta device. No weights are read."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from tq.contract import boundaries, pairing, vllm
from tq.contract.boundaries import Report


def explain(model: Path) -> Report:
    """Boundaries of the model in a folder with a `config.json` (or of that file), as this machine would run it.

    vLLM chooses the linear kernels for the platform it runs on. What depends on loaded weights (a scale that is
    missing, say) is not seen. Raises FileNotFoundError where there is no such file, RuntimeError where tq does not
    support the installed vLLM, and what vLLM raises for a model that it cannot build.
    """
    folder = model if model.is_dir() else model.parent
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"explain: model must be a folder with a config.json, got {model}")
    unsupported = vllm.unsupported_version()
    if unsupported is not None:
        raise RuntimeError(f"explain: a supported vLLM must be installed: {unsupported}")
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=str(folder), load_format="dummy", skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        built = _build(config)
        vllm.load_adapter()
        found = pairing.pair_model(built, vllm.norms_stand_aside())
    return Report(tuple(replace(boundary) for boundary in found), boundaries.report(built).disabled)


def _build(config: object) -> torch.nn.Module:
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    made = not parallel_state.model_parallel_is_initialized()
    if not torch.distributed.is_initialized():
        parallel_state.init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/tq", 0, "gloo")
    parallel_state.ensure_model_parallel_initialized(1, 1)
    try:
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):  # type: ignore[attr-defined]
            return initialize_model(config)
    finally:
        if made:  # which groups there are depends on the model
            parallel_state.destroy_model_parallel()
