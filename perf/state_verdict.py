"""The engines of `perf.state_engine`, and what must hold of what they did."""

from __future__ import annotations

from typing import Any, NamedTuple

CODES = {"int8": "int8_narrow", "fp8": "fp8_e4m3"}
PACKED = "num_bits: 8, type: dynamic, axis: [0, 1, 3], narrow_range: true, packed: true"
RECIPES = {  # rules for GDN and for KDA
    "int8": ("num_bits: 8, type: dynamic, axis: [0, 1], narrow_range: true",) * 2,
    "fp8": ("num_bits: [4, 3], type: dynamic, axis: [0, 1]",) * 2,
    "packed": (PACKED,) * 2,
    "replay": (f"{PACKED}, replay: 16", f"{PACKED}, replay: 8"),
}


class Engine(NamedTuple):
    """recipe: a name in RECIPES, "none", or "plugin_off". mode: "eager", "graphs" (of whole decode steps, without
    Inductor) or "default" (vLLM's own choice). drafts: tokens guessed from the prompt. state: dtype of the states.
    gpus: tensor parallel ranks. apart: decode steps do not round themselves."""

    recipe: str
    mode: str
    drafts: int = 0
    state: str = "float32"
    gpus: int = 1
    apart: bool = False

    @property
    def name(self) -> str:
        parts = [
            self.recipe, self.mode, f"drafts{self.drafts}" * (self.drafts > 0), self.state * (self.state != "float32"),
            f"tp{self.gpus}" * (self.gpus > 1), "apart" * self.apart,
        ]  # fmt: skip
        return "-".join(filter(None, parts))

    @property
    def refused(self) -> str | None:
        """What is said of it where it must not start: drafts with packed states, and rounding of others than fp32."""
        if self.recipe in ("packed", "replay") and self.drafts:
            return "disable speculative decoding"
        return "pass --mamba-ssm-cache-dtype float32" if self.recipe in CODES and self.state != "float32" else None

    @property
    def watched(self) -> bool:
        """Whether all its states are looked at, in one batch of prompts."""
        return self.recipe in CODES and self.mode == "eager"

    @property
    def timed(self) -> bool:
        return not self.drafts and self.gpus == 1 and self.refused is None


ENGINES = {
    engine.name: engine
    for engine in (
        *(Engine(recipe, mode) for mode in ("graphs", "eager") for recipe in ("plugin_off", "none", *RECIPES)),
        Engine("plugin_off", "graphs", state="bfloat16"),
        *(Engine(recipe, "eager", drafts=3) for recipe in (*CODES, "packed")),
        Engine("int8", "eager", state="bfloat16"),
        *(Engine("int8", mode, apart=True) for mode in ("graphs", "eager")),
        *(Engine(recipe, "graphs", gpus=2) for recipe in ("plugin_off", "int8", "packed")),
        *(Engine(recipe, "default") for recipe in ("plugin_off", "int8", "packed", "replay")),
    )
}
FIRST = tuple(name for name, engine in ENGINES.items() if engine.mode != "default" and name != "fp8-eager-drafts3")


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What does not hold, of one model."""
    found = [f"{row['engine']}: {row['error']}" for row in rows if "error" in row]
    for row in rows:
        wanted = ENGINES[row["engine"]].refused
        if "repeats" not in row and wanted is None:
            found.append(f"{row['engine']}: generated nothing")
        if wanted is not None and wanted not in row.get("refused", ""):
            found.append(f"{row['engine']}: was not refused")
    by_name = {row["engine"]: row for row in rows if "repeats" in row}
    for name, row in by_name.items():
        engine = ENGINES[name]
        off, eager = (
            by_name.get(engine._replace(**change).name) for change in ({"recipe": "plugin_off"}, {"mode": "eager"})
        )
        if not row["repeats"]:
            found.append(f"{name}: does not repeat itself")
        if engine.recipe == "none" and off and any(row[batch] != off[batch] for batch in ("mixed", "even")):
            found.append(f"{name}: differs from the engine without the plugin")
        if engine.mode == "graphs" and eager and row["even"] != eager["even"]:
            found.append(f"{name}: differs from eager steps")
        if engine.recipe in RECIPES and off and row["mixed"] == off["mixed"]:
            found.append(f"{name}: rounding makes no difference")
        if engine.recipe == "packed" and off:
            found += [f"{name}: {each}" for each in too_large(row, off)]
        if engine.recipe in CODES and not engine.apart and "kernels" in row:
            kernels = row["kernels"]
            extra = [each for each in kernels if each.startswith(("move_kernel", "fused_recurrent"))]
            if extra or "decode_kernel" not in kernels:
                found.append(f"{name}: decode steps run {', '.join(extra) or 'no decode_kernel'}")
        found += [f"{name}: {each}" for each in unseen(engine, row["watched"])] if "watched" in row else []
    return found


def too_large(packed: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Bytes and slots of packed states beside fp32 ones; slots where it is states that make pages large."""
    found = []
    if "state_bytes" in packed and packed["state_bytes"] > 0.3 * plain["state_bytes"]:
        found.append(f"{packed['state_bytes']} bytes a state, {plain['state_bytes']} of fp32")
    by_states = 2 * plain.get("state_bytes", plain["page_bytes"]) > plain["page_bytes"]
    if by_states and plain["state_slots"] > 0.35 * packed["state_slots"]:
        found.append(f"{packed['state_slots']} slots, {plain['state_slots']} of fp32")
    return found


def unseen(engine: Engine, seen: dict[str, int]) -> list[str]:
    """What a watched engine did that it must not, or did not do."""
    found = [f"{count} {key}" for key, count in seen.items() if key.startswith("wrong_") and count]
    calls = sum(count for key, count in seen.items() if key.startswith("roundings_"))
    inside, before = seen.get("roundings_inside", 0), seen.get("roundings_decode", 0)
    if (inside if engine.apart else before) or not (before if engine.apart else inside or engine.drafts):
        found.append(f"{inside} roundings inside decode steps, {before} before them")
    if seen["layers_inside"] != (0 if engine.apart else seen["layers"]):
        found.append(f"{seen['layers_inside']} of {seen['layers']} layers are reported to round inside decode steps")
    if not seen["layers"] or calls < seen["layers"] * seen["steps"]:
        found.append(f"{calls} roundings in {seen['steps']} steps of {seen['layers']} layers")
    wanted = ["prompts_continued", "nonzero_states_read", *["later_columns"] * (engine.drafts > 0)]
    return found + [f"no {key}" for key in wanted if not seen.get(key)]
