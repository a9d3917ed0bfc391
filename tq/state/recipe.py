"""ModelOpt's quantization recipes, read for what they say of recurrent states."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from tq.state.formats import GRANULARITIES
from tq.state.ring import LONGEST

OP = "state recipe"


class StateOptions(NamedTuple):
    """The code and granularity of `tq.state.qdq_`; with `packed`, of a `tq.state.PackedState` whose ring has `replay`
    entries, 0 for none, with `residual` and `hadamard` as there."""

    code: str
    granularity: str
    packed: bool = False
    replay: int = 0
    residual: bool = False
    hadamard: int = 0


# The options that are not ModelOpt's, and what they are where a recipe does not have them.
STORAGE = {name: StateOptions._field_defaults[name] for name in ("packed", "replay", "residual", "hadamard")}
MIXED = (0, *(1 << power for power in range(1, 9)))


@dataclass(frozen=True)
class Recipe:
    """Rules in order: a pattern of quantizer names, and the options it sets, None for states left as they are."""

    rules: tuple[tuple[str, StateOptions | None], ...]

    def options(self, quantizer_name: str) -> StateOptions | None:
        """Those of the last rule whose pattern (with *, ?, []) matches, as in ModelOpt; None where none does."""
        found = None
        for pattern, options in self.rules:
            if fnmatchcase(quantizer_name, pattern):
                found = options
        return found

    def document(self) -> dict[str, Any]:
        """The recipe in ModelOpt's form, which `parse_recipe` reads back."""
        return {"quantize": {"quant_cfg": [write_rule(*rule) for rule in self.rules], "algorithm": None}}


def read_recipe(path: str | Path) -> Recipe:
    """The recipe in a YAML file. Raises ValueError naming what is not understood, OSError for no file."""
    try:
        return parse_recipe(yaml.safe_load(Path(path).read_text()))
    except yaml.YAMLError as error:
        raise ValueError(f"{OP}: {path} must be YAML, got: {error}") from None


def parse_recipe(document: Any) -> Recipe:
    """quantize: {quant_cfg: [{quantizer_name, enable, cfg}, ...], algorithm: null} -> its rules.

    cfg of a state: num_bits 8 or [4, 3] (or e4m3); type dynamic; axis [0, 1], [0, 1, 3] or [0, 1, 2] (a scale a head, a
    value channel or a key channel, ModelOpt's states being keys by values) or block_sizes {-1: 16, 32 or 64} (that many
    value channels of a key channel); narrow_range; unsigned false. Four keys are not ModelOpt's: packed true keeps the
    codes in the cache; with it, replay L lets a state be rounded once in L tokens, residual true keeps four bits more
    of an element of INT8, and hadamard mixes that many value channels. Every other key or value is an error that names
    it, so that no recipe is followed by half.
    """
    top = fields("the document", document, ("quantize", "metadata"))
    quantize = fields("quantize", top.get("quantize"), ("quant_cfg", "algorithm"))
    expect("algorithm", quantize.get("algorithm"), (None,), "states are rounded by their own amax")
    entries = quantize.get("quant_cfg")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{OP}: quant_cfg must be a list of rules, got {entries!r}")
    return Recipe(tuple(parse_rule(entry) for entry in entries))


# Attributes of a saved quantizer that could make it compute something else, with the value that does not; and those
# that make no difference to a forward pass.
_PLAIN = {
    "_fake_quant": True, "_if_quant": True, "_if_calib": False, "_rotate": False, "_bias": None, "_learn_amax": False,
    "_constant_amax": None, "_use_constant_amax": False, "_dequantize": False, "_effective_bits": None,
    "_input_dtype": None, "backend": None,
}  # fmt: skip
_UNUSED = (
    "_trt_high_precision_dtype", "_enable_pre_quant_scale", "_pass_through_bwd", "_amax_shape_for_export",
    "backend_extra_args", "_pytorch_state_metadata",
)  # fmt: skip
_READ = ("_disabled", "_dynamic", "_num_bits", "_axis", "_block_sizes", "_narrow_range", "_unsigned")


def parse_quantizer_state(saved: dict[str, dict[str, Any]]) -> Recipe:
    """{quantizer name: attributes}, "quantizer_state" in the metadata of a ModelOpt state file -> a rule a state.

    Quantizers of other things are left out. Raises ValueError naming an attribute that is not understood.
    """
    rules: list[tuple[str, StateOptions | None]] = []
    for name, attributes in saved.items():
        if not name.endswith("_state_quantizer"):
            continue
        given = fields(f"the state of {name}", attributes, (*_PLAIN, *_UNUSED, *_READ))
        if given.get("_disabled", False):
            rules.append((name, None))
            continue
        for key, plain in _PLAIN.items():
            expect(f"{key} of {name}", given.get(key, plain), (plain,))
        cfg = {key.removeprefix("_"): given[key] for key in _READ[2:] if given.get(key) is not None}
        if "block_sizes" in cfg:
            cfg.pop("axis", None)  # of the blocks, set by the first call
        rules.append((name, parse_quantizer(name, {**cfg, "type": "dynamic" if given.get("_dynamic") else "static"})))
    return Recipe(tuple(rules))


def parse_rule(entry: Any) -> tuple[str, StateOptions | None]:
    """(pattern, options) of one entry of quant_cfg."""
    given = fields("an entry of quant_cfg", entry, ("quantizer_name", "enable", "cfg"))
    name, enable = given.get("quantizer_name"), given.get("enable", True)
    if not isinstance(name, str):
        raise ValueError(f"{OP}: quantizer_name must be a pattern, got {name!r} in {entry!r}")
    expect(f"enable of {name}", enable, (True, False))
    if not enable:
        return name, None
    return name, parse_quantizer(name, given.get("cfg"))


def parse_quantizer(name: str, cfg: Any) -> StateOptions:
    """The options that a quantizer's attributes come to."""
    keys = ("num_bits", "type", "axis", "block_sizes", "narrow_range", "unsigned", *STORAGE)
    given = fields(f"cfg of {name}", cfg, keys)
    expect(f"type of {name}", given.get("type"), ("dynamic",), "a state has no amax that could be calibrated")
    expect(f"unsigned of {name}", given.get("unsigned", False), (False,))
    narrow = given.get("narrow_range", False)
    expect(f"narrow_range of {name}", narrow, (True, False))
    bits = given.get("num_bits")
    if bits in ([4, 3], (4, 3), "e4m3"):
        expect(f"narrow_range of {name}", narrow, (False,), "FP8 has no other range")
        expect(f"residual of {name}", given.get("residual", False), (False,), "steps of FP8 differ")
        return StateOptions("fp8_e4m3", parse_granularity(name, given), **parse_storage(name, given))
    expect(f"num_bits of {name}", bits, (8,), "or [4, 3]")
    code = "int8_narrow" if narrow else "int8"
    return StateOptions(code, parse_granularity(name, given), **parse_storage(name, given))


def parse_storage(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """How a state is kept: the options of `STORAGE`."""
    found = {key: given.get(key, default) for key, default in STORAGE.items()}
    packed = found["packed"]
    expect(f"packed of {name}", packed, (True, False))
    longest = LONGEST if packed else 0
    expect(
        f"replay of {name}", found["replay"], tuple(range(longest + 1)), "a ring's entries, and packed true with one"
    )
    expect(f"residual of {name}", found["residual"], (True, False) if packed else (False,), "and packed true with one")
    mixed = MIXED if packed else (0,)
    expect(f"hadamard of {name}", found["hadamard"], mixed, "value channels, and packed true with some")
    return found


# Axes kept by ModelOpt, of slots, heads, keys and values.
_AXES = {(0, 1): "head", (0, 1, 3): "value_channel", (0, 1, 2): "key_channel"}


def parse_granularity(name: str, given: dict[str, Any]) -> str:
    axis, blocks = given.get("axis"), given.get("block_sizes")
    if (axis is None) == (blocks is None):
        raise ValueError(f"{OP}: {name} must have either axis or block_sizes, got axis={axis!r} and {blocks!r}")
    if blocks is None:
        kept: Any = list(axis) if isinstance(axis, tuple) else axis
        expect(f"axis of {name}", kept, tuple(map(list, _AXES)), "of slots, heads, keys and values")
        return _AXES[tuple(kept)]
    size = fields(f"block_sizes of {name}", blocks, (-1,)).get(-1)
    if f"group{size}" not in GRANULARITIES:
        raise ValueError(f"{OP}: block_sizes of {name} must be {{-1: 16, 32 or 64}}, got {blocks!r}")
    return f"group{size}"


def write_rule(name: str, options: StateOptions | None) -> dict[str, Any]:
    """An entry of quant_cfg that `parse_rule` reads as these options."""
    if options is None:
        return {"quantizer_name": name, "enable": False}
    axes = {granularity: list(axis) for axis, granularity in _AXES.items()}
    cfg: dict[str, Any] = {"num_bits": 8, "type": "dynamic"}
    if options.granularity in axes:
        cfg["axis"] = axes[options.granularity]
    else:
        cfg["block_sizes"] = {-1: int(options.granularity.removeprefix("group"))}
    if options.code == "fp8_e4m3":
        cfg["num_bits"] = [4, 3]
    else:
        cfg["narrow_range"] = options.code == "int8_narrow"
    if options.packed:
        cfg |= {key: getattr(options, key) for key in STORAGE}
    return {"quantizer_name": name, "cfg": cfg}


def fields(what: str, value: Any, known: tuple) -> dict:
    """`value`, a mapping of known keys; raises ValueError naming the first other one."""
    if not isinstance(value, dict):
        raise ValueError(f"{OP}: {what} must be a mapping, got {value!r}")
    for key in value:
        if key not in known:
            raise ValueError(
                f"{OP}: {what} must have no {key!r}, only {', '.join(map(str, known))}; got {value[key]!r}"
            )
    return value


def expect(what: str, value: Any, allowed: tuple, why: str = "") -> None:
    """Raises ValueError unless `value` is one of `allowed`, of the same type (True is not 1)."""
    if not any(type(value) is type(each) and value == each for each in allowed):
        wanted = " or ".join(map(str, allowed)) if len(allowed) < 8 else f"{allowed[0]} to {allowed[-1]}"
        raise ValueError(f"{OP}: {what} must be {wanted}{', ' + why if why else ''}; got {value!r}")
