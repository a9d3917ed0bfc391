"""The kernels of recurrent states compiled for GPUs that need not be there."""

from __future__ import annotations

import pytest
import triton
from packaging.version import Version
from test_compile import compile_all, name_of, native_codes


def combination(target, kernel, code, granularity="head", **options):
    return {"target": target, "kernel": kernel, "code": code, "granularity": granularity, **options}


CHOSEN = [
    combination("sm_90", "qdq", "int8"),
    combination("sm_90", "qdq", "fp8_e4m3"),
    combination("sm_90", "qdq", "int8_narrow", "key_channel"),
    combination("sm_90", "qdq", "int8", "group32"),
    combination("sm_90", "qdq", "int8", "tile", layout="key_first"),
    combination("sm_90", "gather", "fp8_e4m3", "value_channel", dtype="bfloat16"),
    combination("sm_90", "gather", None),
    combination("sm_90", "check", "int8", "tile"),
    combination("sm_90", "gdn_decode", "int8"),
    combination("sm_90", "gdn_decode", None),
    combination("sm_90", "gdn_decode", "int8", quantize="outgoing"),
    combination("sm_90", "kda_decode", "fp8_e4m3"),
    combination("sm_90", "kda_decode", "int8_narrow"),
    combination("sm_90", "kda_decode", "int8_narrow", "key_channel"),
    combination("sm_90", "pack", "int8", "value_channel", ring=16),
    combination("sm_90", "unpack", "int8", "value_channel"),
    combination("sm_90", "unpack", "fp8_e4m3", "group32", ring=16),
    combination("sm_90", "copy", "int8", "value_channel"),
    combination("sm_90", "gdn_decode_packed", "int8", "value_channel"),
    combination("sm_90", "gdn_decode_packed", "int8", "group32"),
    combination("sm_90", "gdn_decode_packed", "int8", "value_channel", ring=16),
    combination("sm_90", "gdn_decode_packed", "int8", "value_channel", ring=16, verify=4),
    combination("sm_90", "kda_decode_packed", "int8", "value_channel"),
    combination("sm_90", "kda_decode_packed", "fp8_e4m3", "value_channel"),
    combination("sm_90", "kda_decode_packed", "int8", "value_channel", ring=8),
    combination("sm_90", "gdn_decode_packed", "int8", "value_channel", joined="joined"),
    combination("sm_90", "gdn_decode_packed", "fp8_e4m3", "value_channel", joined="joined"),
    combination("sm_90", "gdn_decode_packed", "int8", "value_channel", ring=16, joined="joined"),
    combination("sm_90", "kda_decode_packed", "int8", "value_channel", joined="joined"),
    combination("sm_90", "commit", "int8", "value_channel", ring=16),
    combination("sm_90", "gdn_decode_packed", "int8", "value_channel", residual=True),
    combination("sm_90", "kda_decode_packed", "int8", "value_channel", residual=True, hadamard=32, ring=8),
    combination("sm_90", "pack", "int8", "group32", residual=True, hadamard=32),
    combination("sm_90", "unpack", "fp8_e4m3", "value_channel", hadamard=128),
    combination("sm_80", "gdn_decode_packed", "int8", "value_channel", ring=16),
    combination("sm_80", "kda_decode_packed", "fp8_e4m3", "value_channel", ring=8),
    combination("sm_80", "pack", "fp8_e4m3", "value_channel", dtype="bfloat16"),
    combination("gfx942", "gdn_decode_packed", "int8", "value_channel", ring=16),
    combination("gfx942", "kda_decode_packed", "int8", "value_channel"),
    combination("gfx942", "unpack", "fp8_e4m3", "group32"),
    combination("sm_80", "qdq", "fp8_e4m3"),
    combination("sm_80", "gdn_decode", "int8", dtype="bfloat16"),
    combination("sm_80", "check", "fp8_e4m3", "group16"),
    combination("gfx942", "qdq", "fp8_e4m3", "value_channel"),
    combination("gfx942", "gather", "int8", dtype="float16"),
    combination("gfx942", "check", "int8"),
    combination("gfx942", "kda_decode", "int8"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    found = compile_all(CHOSEN, tmp_path_factory.mktemp("triton"), "compile_state_worker.py")
    return lambda chosen: found[name_of(chosen)]


# Held to 128 registers a thread. Decode steps, replays and KDA's heads in one warp gain more by that on an H200 than
# their spills cost (perf/notes.md); a replay spills where it rounds, once in a window. For commit, and for sm_80, which
# has no conversion instruction, that is not measured. GDN's heads in one warp spill with Triton newer than 3.6 alone.
STEPS = "gdn_decode", "kda_decode"
SPILLING = ("check", *STEPS, "commit")


def may_spill(chosen):
    newer = Version(triton.__version__) >= Version("3.7")
    one_warp = chosen["code"] == "int8" and "joined" in chosen and (newer or chosen["kernel"].startswith("kda"))
    return chosen["kernel"] in SPILLING or one_warp or "ring" in chosen or chosen["target"] == "sm_80"


@pytest.mark.parametrize("chosen", CHOSEN, ids=name_of)
def test_compiles(compiled, chosen):
    """With the conversion instruction where it rounds as E4M3 says, and nothing spilled but by what gains from it."""
    facts = compiled(chosen)
    assert "error" not in facts, facts["error"]
    code = {"e4m3"} if chosen["code"] == "fp8_e4m3" and chosen["kernel"] != "unpack" else set()
    assert set(facts["conversions"]) == code & native_codes(chosen["target"])
    assert facts["spills"] == 0 or may_spill(chosen)
    waits = [each for each in facts.get("order", []) if each in ("ACQBULK", "PREEXIT")]
    if chosen["target"] == "sm_90":  # it waits for the kernel ahead before it reads or writes, then the next may come
        assert facts["order"][0] == "ACQBULK" and waits == ["ACQBULK", "PREEXIT"]
    else:
        assert not waits


@pytest.mark.parametrize(
    "chosen",
    [each for each in CHOSEN if each["target"].startswith("sm_") and each["kernel"] in ("qdq", *STEPS)],
    ids=name_of,
)
def test_products_are_rounded_before_they_become_codes(compiled, chosen):
    """As `qdq_` rounds and ModelOpt does, in steps too, whose other products are contracted with sums."""
    assert compiled(chosen)["contracted"] == 0


@pytest.mark.parametrize(
    "chosen",
    [each for each in CHOSEN if each["target"] == "sm_90" and each["kernel"] in ("qdq", "gather")],
    ids=name_of,
)
def test_sm_90_moves_states_in_words_of_16_bytes(compiled, chosen):
    """Slots are numbers of 4 bytes."""
    facts = compiled(chosen)
    assert set(facts["loads"]) == {4, 16} and set(facts["stores"]) == {16}


@pytest.mark.parametrize(
    "chosen",
    [each for each in CHOSEN if each["target"] == "sm_90" and each["kernel"].endswith("_decode_packed")],
    ids=name_of,
)
def test_sm_90_moves_codes_in_words_of_16_bytes(compiled, chosen):
    """Of each thread: four words of a block of one warp, one block after the other; two of one of four warps, eight of
    a head or four where a ring is folded into it, and one of residuals for two of codes. Not stored where tokens are
    drafts."""
    facts = compiled(chosen)
    if "ring" in chosen:
        words = 0 if "verify" in chosen else 4 if "joined" in chosen else 2
    elif "residual" in chosen or chosen["code"] == "fp8_e4m3" or chosen["granularity"] == "group32":
        words = 8 if "joined" in chosen else 2
    else:
        words = 4
    assert facts["stores"].count(16) == words + ("residual" in chosen) * (words // 2)
    if words != 4 or "joined" not in chosen:  # else they come by way of shared memory
        assert facts["loads"].count(16) >= words
