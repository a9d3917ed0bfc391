"""The README's examples run, and its figures are those of the committed data."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch
import yaml
from helpers import DEVICE

import tq
import tq.state

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_calls_by_hand():
    (example,) = [text for text in EXAMPLES if "tq.silu_mul" in text]
    x = torch.randn(3, 256, device=DEVICE).bfloat16()
    given = {
        "x": x,
        "residual": torch.randn_like(x),
        "weight": torch.ones(256, device=DEVICE).bfloat16(),
        "scale": torch.tensor([0.02], device=DEVICE),
    }
    residual = given["residual"]
    exec(example, given)
    assert isinstance(given["activation"], tq.QuantizedActivation) and given["activation"].scheme == "fp8_tensor"
    assert torch.equal(given["residual"], (x.float() + residual.float()).bfloat16())


def test_a_producer_of_your_own(tmp_path):
    (example,) = [text for text in EXAMPLES if "register_producer" in text]
    x = torch.randn(3, 256, device=DEVICE).bfloat16()
    path = tmp_path / "relu6_of_the_readme.py"  # triton reads the source of a kernel from its file
    path.write_text(f"import torch\nx = torch.ones(2, 256).to({DEVICE!r})\n{example}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        activation = module.relu6(x, scheme="fp8_token")
        wanted = x.double().clamp(0.0, 6.0)
        assert (
            (activation.dequantize(torch.float64) - wanted).abs() <= wanted / 16 + activation.scale * 2.0**-10
        ).all()
        assert tq.check("relu6", x, scheme="fp8_group128").ok and hasattr(torch.ops.tq, "relu6")
    finally:
        tq.PRODUCERS.pop("relu6", None)


def test_the_recipe_of_packed_states():
    (recipe,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    found = tq.state.parse_recipe(yaml.safe_load(recipe)).options("layers.0.mixer.kda_state_quantizer")
    assert found == tq.state.StateOptions("int8_narrow", "value_channel", packed=True, replay=16)


def test_figures_are_those_of_the_data(monkeypatch):
    from perf import figures

    monkeypatch.chdir(ROOT)
    shown = TEXT.split(figures.BEGIN)[1].split(figures.END)[0]
    assert shown == figures.figures(), "the data changed: run python -m perf.figures"
