"""The template kernels compiled for GPUs that need not be there, by worker processes that do not interpret.

-m compile_all compiles every producer with every scheme, dtype and kernel for every target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import triton
from helpers import PAIRS
from packaging.version import Version

import tq
from tq.kernels.target import cuda_target

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
DTYPES = ("bfloat16", "float16", "float32")
TESTS = Path(__file__).parent


def combination(
    target: str, producer: str, scheme: str, dtype="bfloat16", hidden_size=4096, check=False
) -> dict[str, Any]:
    return {
        "target": target, "producer": producer, "scheme": scheme, "dtype": dtype, "hidden_size": hidden_size,
        "check": check,
    }  # fmt: skip


def name_of(chosen: dict[str, Any]) -> str:
    return "-".join(str(value) for value in chosen.values() if value is not False)


def spread() -> list[dict[str, Any]]:
    """For every target all codes, their schemes, the producers and the dtypes in turn, and one check."""
    codes: dict[str, list[str]] = {}
    for name, scheme in tq.SCHEMES.items():
        codes.setdefault(scheme.code.name, []).append(name)
    producers, chosen = list(tq.PRODUCERS), []
    for i, target in enumerate(TARGETS):
        for j, schemes in enumerate(codes.values()):
            producer, scheme = producers[(i + j) % len(producers)], schemes[(2 * i + j) % len(schemes)]
            chosen.append(combination(target, producer, scheme, DTYPES[(i + 2 * j) % 3]))
        scheme = list(tq.SCHEMES)[(7 * i + 3) % len(tq.SCHEMES)]
        chosen.append(combination(target, producers[i % len(producers)], scheme, check=True))
    return chosen


SPREAD = spread()
# Pairs that cover all on sm_90, and rows of other lengths: short, no power of two, so long that registers are scarce.
HOPPER = [combination("sm_90", producer, scheme) for producer, scheme in PAIRS]
# ptxas may stay below a number of registers for one more program on an SM, and spill: Triton 3.9's, at 78 registers,
# where 90 would do. Triton 3.6's, which is the one that was timed, spills nothing.
SPILLED = {"sm_90-rms_norm-fp8_group128-bfloat16-7168": 4} if Version(triton.__version__) >= Version("3.9") else {}
LENGTHS = [
    combination("sm_90", "rms_norm", "fp8_token", hidden_size=576),
    combination("sm_90", "silu_mul", "fp8_tensor", hidden_size=2880),
    combination("sm_90", "rms_norm", "fp8_group128", hidden_size=7168),
    combination("sm_90", "silu_mul", "fp8_token", hidden_size=16384),
]
BLACKWELL = [
    combination(target, "quantize", scheme)
    for target in ("sm_100", "sm_120")
    for scheme in ("nvfp4", "mxfp4", "mxfp8", "mxfp8_e5m2", "fp8_group128_ue8m0")
]
# Calls that add along their rows, with the checks that must add alike; in fp32, where y hides nothing.
SUMS = [
    combination("sm_90", name, list(tq.SCHEMES)[7 * i % len(tq.SCHEMES)], "float32")
    for i, name in enumerate(name for name, producer in tq.PRODUCERS.items() if producer.moments)
]
SUMS_CHECKED = [{**each, "check": True} for each in SUMS]
SUMS_OF_FEW = [{**each, "tokens": 8} for each in SUMS]
ALL = [
    combination(target, producer, scheme, dtype, 4096, check)
    for target in TARGETS
    for producer in tq.PRODUCERS
    for scheme in tq.SCHEMES
    for dtype in DTYPES
    for check in (False, True)
]


def compile_all(
    chosen: list[dict[str, Any]], folder: Path, worker: str = "compile_worker.py"
) -> dict[str, dict[str, Any]]:
    """What the worker says of each, by name; a worker for each core."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = [str(TESTS.parent), environment.get("PYTHONPATH", "")]
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, path))}

    def work(part: list[dict[str, Any]]) -> list[str]:
        command = [sys.executable, str(TESTS / worker)]
        done = subprocess.run(
            command, input=json.dumps(part), capture_output=True, text=True, env=environment, timeout=3000, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.splitlines()

    workers = min(os.cpu_count() or 1, 16)
    parts = [chosen[i::workers] for i in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        lines = [zip(part, done, strict=True) for part, done in zip(parts, pool.map(work, parts), strict=True)]
    return {name_of(each): json.loads(line) for pairs in lines for each, line in pairs}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Facts of the combinations of this session's selection."""
    chosen = SPREAD + HOPPER + LENGTHS + BLACKWELL + SUMS + SUMS_CHECKED + SUMS_OF_FEW
    found = compile_all(chosen, tmp_path_factory.mktemp("triton"))
    return lambda chosen: found[name_of(chosen)]


@pytest.fixture(scope="module")
def everything_compiled(tmp_path_factory):
    found = compile_all(ALL, tmp_path_factory.mktemp("triton"))
    return lambda chosen: found[name_of(chosen)]


def native_codes(target: str) -> frozenset[str]:
    return cuda_target(*divmod(int(target[3:]), 10)).native_codes if target.startswith("sm_") else frozenset()


def assert_conversions(chosen: dict[str, Any], facts: dict[str, Any]) -> None:
    """It compiles, and the conversion instruction of the scheme's code is where the target has one that rounds as the
    code says; no other is anywhere, and none in a check."""
    assert "error" not in facts, facts["error"]
    code = tq.SCHEMES[chosen["scheme"]].code.name
    expected = set() if chosen["check"] else {code} & native_codes(chosen["target"])
    assert set(facts["conversions"]) == expected


def assert_overlaps(chosen: dict[str, Any], facts: dict[str, Any]) -> None:
    """From sm_90 on a kernel may be launched early: it waits (ACQBULK) before it reads or writes anything, and lets the
    next one come (PREEXIT). Its check, which runs once in a while, does not."""
    order = facts.get("order", [])
    if chosen["target"] in ("sm_90", "sm_100", "sm_120") and not chosen["check"]:
        assert order[0] == "ACQBULK"
        assert (order.count("ACQBULK"), order.count("PREEXIT")) == (1, 1)
    else:
        assert not {"ACQBULK", "PREEXIT"} & set(order)


@pytest.mark.parametrize("chosen", SPREAD + HOPPER + LENGTHS + BLACKWELL, ids=name_of)
def test_compiles_and_converts(compiled, chosen):
    assert_conversions(chosen, compiled(chosen))
    assert_overlaps(chosen, compiled(chosen))


@pytest.mark.parametrize("chosen", [c for c in SPREAD + HOPPER + LENGTHS if not c["check"]], ids=name_of)
def test_moves_wide_words_and_spills_nothing(compiled, chosen):
    """A thread has 8 consecutive elements: 16 bytes of a 16-bit tensor, 8 of codes of a byte, on every target."""
    facts = compiled(chosen)
    assert facts["spills"] <= SPILLED.get(name_of(chosen), 0)
    if chosen["hidden_size"] % 256:
        return
    # Besides scales (4 bytes, or single ones) and zero points, every load is of 16 bytes or more, and no code is stored
    # alone.
    rows = [size for size in facts["loads"] if size != 4]
    if chosen["producer"] == "qk_norm_rope":
        rows = [size for size in rows if size != 8]  # a position: Triton 3.6 asks for it several times, ptxas once
    if chosen["producer"] == "swiglu_oai" and chosen["dtype"] != "float32":
        rows = [16] if not rows else []  # pairs of 4 bytes, and nothing smaller
    assert rows and min(rows) >= (8 if chosen["producer"] == "swiglu_oai" else 16), facts["loads"]
    bytewise = tq.SCHEMES[chosen["scheme"]].rule.stored.itemsize == 1
    codes = [size for size in facts["stores"] if not (bytewise and size == 1)]
    assert codes and min(codes) >= 4, facts["stores"]
    if tq.PRODUCERS[chosen["producer"]].mutates:  # the residual
        assert 16 in codes


@pytest.mark.parametrize("chosen", BLACKWELL, ids=name_of)
def test_every_pair_of_elements_is_one_conversion(compiled, chosen):
    """sm_100 and sm_120 make MX and NVFP4 codes by instruction alone: 4 bytes of bf16 loaded for each."""
    facts = compiled(chosen)
    (converted,) = facts["conversions"].values()
    assert 4 * converted == sum(size for size in facts["loads"] if size == 16)


@pytest.mark.parametrize("chosen", [each for each in HOPPER if tq.SCHEMES[each["scheme"]].group], ids=name_of)
def test_scales_of_groups_stay_where_they_are(compiled, chosen):
    """Warps wait for each other where a row is summed, twice for each sum and once between sums, and nowhere else: a
    group's scale is stored by the threads that have it."""
    moments = len(tq.PRODUCERS[chosen["producer"]].moments)
    assert compiled(chosen)["barriers"] <= max(3 * moments - 1, 0)


@pytest.mark.parametrize("other", [*SUMS_CHECKED, *SUMS_OF_FEW], ids=name_of)
def test_sums_are_made_in_one_order(compiled, other):
    """By a check, else y would differ in its last bit, and right scales and codes would count as wrong; and with few
    tokens, where weights are read earlier, else a token's bits would depend on its batch."""
    (call,) = (each for each in SUMS if each["producer"] == other["producer"])
    moments = len(tq.PRODUCERS[call["producer"]].moments)
    expected, found = (compiled(each)["reductions"][:moments] for each in (call, other))
    assert expected == found and len(expected) == moments


@pytest.mark.compile_all
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("chosen", ALL, ids=name_of)
def test_everything_compiles(everything_compiled, chosen):
    assert_conversions(chosen, everything_compiled(chosen))


@pytest.mark.parametrize(
    ("capability", "triton_version", "native"),
    [
        ((7, 5), "3.9.0", False),
        ((8, 0), "3.9.0", False),
        ((8, 6), "3.9.0", False),
        ((8, 9), "3.6.0", False),
        ((8, 9), "3.8.1", False),
        ((8, 9), "3.9.0", True),
        ((9, 0), "3.6.0", True),
        ((10, 0), "3.6.0", True),
        ((12, 0), "3.9.0", True),
    ],
)
def test_which_targets_round_once(capability, triton_version, native):
    """Before 3.9 Triton goes through fp16 on sm_89. E2M1 has an instruction from sm_100 on; the others never."""
    target = cuda_target(*capability, triton_version)
    assert target.native_codes == ({"e4m3", "e5m2"} if native else set()) | (
        {"e2m1"} if capability >= (10, 0) else set()
    )
    assert target.name == "sm_{}{}".format(*capability)
    assert cuda_target(*capability) == cuda_target(*capability, triton.__version__)
