"""What the plugin puts into an installed vLLM: hooks, a missing quantizer, its name in the compile cache."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from tq.contract import hooks, vllm

pytestmark = pytest.mark.vllm
if vllm.unsupported_version() is not None:
    pytest.skip(vllm.unsupported_version(), allow_module_level=True)


@pytest.mark.parametrize("shape", [(5, 256), (300, 512)])  # below and above the size for the reference
def test_quantizer_for_builds_without_one(shape):
    from tq.contract.cpu_quantizer import scaled_fp8_quant

    x = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    scale = torch.tensor(0.5)
    codes, same = scaled_fp8_quant(x, scale, num_token_padding=17)
    assert same is scale and codes.shape[0] == max(17, shape[0])
    expected = (x.float() / 0.5).to(torch.float8_e4m3fn)
    assert torch.equal(codes[: shape[0]].view(torch.uint8), expected.view(torch.uint8))
    codes, amax_scale = scaled_fp8_quant(x)
    assert torch.equal(amax_scale, x.abs().amax().float().reshape(1) / 448)
    codes, rows = scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    assert torch.equal(rows, x.abs().amax(-1, keepdim=True).float() / 448)
    with pytest.raises(NotImplementedError, match="scaled_fp8_quant: scale"):
        scaled_fp8_quant(x, torch.ones(2))


@pytest.mark.parametrize("loader", hooks.LOADERS)
def test_a_model_is_seen_once_its_weights_are_final_whichever_loader_ran(monkeypatch, loader):
    events = []
    modules = {name: importlib.import_module(f"vllm.model_executor.model_loader.{name}") for name in hooks.LOADERS}
    for module in modules.values():
        monkeypatch.setattr(module, "process_weights_after_loading", lambda *args: events.append(("final", args)))
    for _ in range(2):
        hooks.hook_model_loading(lambda model: events.append(("seen", model)))
    modules[loader].process_weights_after_loading("model", "config", "device")
    assert events == [("final", ("model", "config", "device")), ("seen", "model")]


@pytest.mark.parametrize("given", [{}, {"theirs": 1}])
def test_the_key_of_the_compile_cache_tells_builds_of_tq_apart(monkeypatch, given):
    """What is compiled is looked up by the hash of the configuration."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    def create(arguments):
        return VllmConfig(additional_config=arguments.additional_config).compute_hash()

    monkeypatch.setattr(EngineArgs, "create_engine_config", create)
    prints = ["0.1.0:a", "0.1.0:a", "0.1.0:b"]
    for _ in range(2):  # installing twice is harmless
        hooks.hook_cache_identity(lambda: prints[0])
    found = [create(SimpleNamespace(additional_config=dict(given)))]
    while prints:
        arguments = SimpleNamespace(additional_config=dict(given))
        found.append(EngineArgs.create_engine_config(arguments))
        assert arguments.additional_config == {**given, "tq": prints.pop(0)}
    without, *with_tq = found
    assert with_tq[0] == with_tq[1] and len({without, *with_tq}) == 3
