"""Recipes in ModelOpt's YAML form: what they come to, and that nothing in them is passed over."""

from __future__ import annotations

import re

import pytest
import yaml

from tq.state import StateOptions, parse_quantizer_state, parse_recipe, read_recipe

# The one that ModelOpt's example for vLLM uses.
SEED = """
quantize:
  quant_cfg:
    - quantizer_name: '*'
      enable: false
    - quantizer_name: '*gdn_state_quantizer'
      cfg: {num_bits: 8, type: dynamic, axis: [0, 1], unsigned: false, narrow_range: true}
    - quantizer_name: '*kda_state_quantizer'
      cfg: {num_bits: [4, 3], type: dynamic, axis: [0, 1]}
  algorithm:
"""


def with_cfg(**changes):
    """A recipe of one rule whose attributes are changed; None leaves one out."""
    cfg = {"num_bits": 8, "type": "dynamic", "axis": [0, 1], **changes}
    cfg = {key: value for key, value in cfg.items() if value is not None}
    return {"quantize": {"quant_cfg": [{"quantizer_name": "*state_quantizer", "cfg": cfg}]}}


def test_the_seed_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(SEED)
    recipe = read_recipe(path)
    assert recipe.options("model.layers.3.linear_attn.gdn_state_quantizer") == StateOptions("int8_narrow", "head")
    assert recipe.options("model.layers.0.self_attn.kda_state_quantizer") == StateOptions("fp8_e4m3", "head")
    assert recipe.options("model.layers.3.linear_attn.in_proj.weight_quantizer") is None
    assert parse_recipe(recipe.document()) == recipe


def test_the_last_rule_that_matches_counts():
    rules = with_cfg()["quantize"]["quant_cfg"] + [{"quantizer_name": "model.layers.[12].*", "enable": False}]
    recipe = parse_recipe({"quantize": {"quant_cfg": rules}})
    found = [recipe.options(f"model.layers.{i}.gdn_state_quantizer") is None for i in range(4)]
    assert found == [False, True, True, False] and recipe.options("lm_head.weight_quantizer") is None


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, ("int8", "head")),
        ({"narrow_range": True}, ("int8_narrow", "head")),
        ({"narrow_range": False, "unsigned": False}, ("int8", "head")),
        ({"num_bits": "e4m3"}, ("fp8_e4m3", "head")),
        ({"num_bits": (4, 3)}, ("fp8_e4m3", "head")),
        ({"axis": None, "block_sizes": {-1: 16}}, ("int8", "group16")),
        ({"axis": None, "block_sizes": {-1: 32}}, ("int8", "group32")),
        ({"axis": None, "block_sizes": {-1: 64}, "num_bits": [4, 3]}, ("fp8_e4m3", "group64")),
        ({"axis": [0, 1, 3]}, ("int8", "value_channel")),
        ({"axis": (0, 1, 2), "narrow_range": True}, ("int8_narrow", "key_channel")),
        ({"axis": [0, 1, 3], "packed": True}, ("int8", "value_channel", True)),
        ({"axis": [0, 1, 3], "packed": True, "replay": 16}, ("int8", "value_channel", True, 16)),
        ({"packed": False, "replay": 0}, ("int8", "head")),
        ({"packed": True, "residual": True, "hadamard": 32}, ("int8", "head", True, 0, True, 32)),
    ],
)
def test_attributes(changes, options):
    recipe = parse_recipe(with_cfg(**changes))
    assert recipe.options("x.gdn_state_quantizer") == StateOptions(*options)
    assert parse_recipe(yaml.safe_load(yaml.safe_dump(recipe.document()))) == recipe


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (with_cfg(num_bits=4), "num_bits of *state_quantizer must be 8, or [4, 3]; got 4"),
        (with_cfg(num_bits=True), "num_bits of *state_quantizer must be 8, or [4, 3]; got True"),
        (with_cfg(num_bits=[5, 2]), "got [5, 2]"),
        (with_cfg(num_bits=None), "num_bits of *state_quantizer must be 8, or [4, 3]; got None"),
        (with_cfg(num_bits=[4, 3], narrow_range=True), "narrow_range of *state_quantizer must be False"),
        (with_cfg(type="static"), "type of *state_quantizer must be dynamic"),
        (with_cfg(type=None), "got None"),
        (with_cfg(axis=[0]), "axis of *state_quantizer must be [0, 1] or [0, 1, 3] or [0, 1, 2], of slots, heads"),
        (with_cfg(axis=[0, 1, 4]), "of slots, heads, keys and values; got [0, 1, 4]"),
        (with_cfg(packed=1), "packed of *state_quantizer must be True or False; got 1"),
        (with_cfg(replay=16), "replay of *state_quantizer must be 0, a ring's entries, and packed true with one; got"),
        (with_cfg(packed=True, replay=129), "replay of *state_quantizer must be 0 to 128, a ring's entries"),
        (with_cfg(packed=True, replay=True), "got True"),
        (with_cfg(residual=True), "residual of *state_quantizer must be False, and packed true with one; got True"),
        (with_cfg(packed=True, num_bits=[4, 3], residual=True), "must be False, steps of FP8 differ; got True"),
        (with_cfg(hadamard=2), "hadamard of *state_quantizer must be 0, value channels, and packed true with some"),
        (with_cfg(packed=True, hadamard=3), "hadamard of *state_quantizer must be 0 to 256, value channels"),
        (with_cfg(axis=None), "must have either axis or block_sizes, got axis=None and None"),
        (with_cfg(block_sizes={-1: 32}), "must have either axis or block_sizes, got axis=[0, 1]"),
        (with_cfg(axis=None, block_sizes={-1: 128}), "must be {-1: 16, 32 or 64}, got {-1: 128}"),
        (with_cfg(axis=None, block_sizes={-2: 32}), "block_sizes of *state_quantizer must have no -2, only -1"),
        (with_cfg(axis=None, block_sizes={-1: 32, "scale_bits": (8, 0)}), "must have no 'scale_bits'"),
        (with_cfg(unsigned=True), "unsigned of *state_quantizer must be False; got True"),
        (with_cfg(narrow_range=1), "narrow_range of *state_quantizer must be True or False; got 1"),
        (with_cfg(rotate=True), "cfg of *state_quantizer must have no 'rotate'"),
        ({"quantize": {"quant_cfg": [{"quantizer_name": "*"}]}}, "cfg of * must be a mapping, got None"),
        ({"quantize": {"quant_cfg": [{"cfg": {}}]}}, "quantizer_name must be a pattern, got None"),
        ({"quantize": {"quant_cfg": [{"quantizer_name": "*", "enable": "no"}]}}, "enable of * must be True or False"),
        ({"quantize": {"quant_cfg": [{"quantizer_name": "*", "parent_class": "x"}]}}, "must have no 'parent_class'"),
        ({"quantize": {"quant_cfg": []}}, "quant_cfg must be a list of rules, got []"),
        ({"quantize": {"quant_cfg": [], "algorithm": "max"}}, "algorithm must be None"),
        ({"quantize": {"linear_attention": []}}, "quantize must have no 'linear_attention'"),
        ({"imports": {}}, "the document must have no 'imports'"),
        ({}, "quantize must be a mapping, got None"),
        (None, "the document must be a mapping, got None"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named(document, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_recipe(document)
    assert str(caught.value).startswith("state recipe: ")


NAME = "layers.0.linear_attn.kda_state_quantizer"
SAVED = {
    "_num_bits": 8,
    "_axis": (0, 1),
    "_dynamic": True,
    "_narrow_range": True,
    "_block_sizes": None,
    "backend": None,
}


def test_saved_quantizers():
    saved = {
        NAME: SAVED,
        "layers.0.w_quantizer": {"_num_bits": 4},
        NAME.replace("0", "1"): {**SAVED, "_disabled": True},
    }
    recipe = parse_quantizer_state(saved)
    assert recipe.rules == ((NAME, StateOptions("int8_narrow", "head")), (NAME.replace("0", "1"), None))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_rotate": True}, f"_rotate of {NAME} must be False; got True"),
        ({"backend": "serving"}, f"backend of {NAME} must be None; got 'serving'"),
        ({"_dynamic": False}, f"type of {NAME} must be dynamic"),
        ({"_axis": (0,)}, f"axis of {NAME} must be [0, 1] or [0, 1, 3] or [0, 1, 2], of slots, heads, keys and values"),
        ({"_new": 1}, f"the state of {NAME} must have no '_new'"),
    ],
)
def test_saved_quantizers_that_compute_something_else(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_quantizer_state({NAME: {**SAVED, **change}})


def test_a_file_that_is_not_yaml(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("quantize: [")
    with pytest.raises(ValueError, match=r"state recipe: .*recipe.yaml must be YAML"):
        read_recipe(path)
