"""What the contract takes for known of vLLM, in its sources: the installed ones, and those in the folder (a package
`vllm` unpacked) that `TQ_VLLM_SOURCES` names. Nothing is imported from them."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import textwrap
from functools import cache
from pathlib import Path

import pytest

from tq.contract.sites import BY_SHA, FORWARDS

pytestmark = pytest.mark.vllm


def sources():
    found = {}
    named = os.environ.get("TQ_VLLM_SOURCES")
    installed = importlib.util.find_spec("vllm")
    for package in (
        Path(named) / "vllm" if named else None,
        installed and Path(installed.submodule_search_locations[0]),
    ):
        if package:
            version = re.search(r"version = '([^']*)'", (package / "_version.py").read_text())
            found[version.group(1)] = package
    return found


SOURCES = sources()
if not SOURCES:
    pytest.skip("vLLM is not installed", allow_module_level=True)
in_each = pytest.mark.parametrize("version", SOURCES)
LINEAR = "model_executor/kernels/linear"


@cache
def methods(path):
    """(class, method) -> source, of one file."""
    lines = path.read_text().splitlines(keepends=True)
    found = {}
    for owner in ast.walk(ast.parse("".join(lines))):
        for node in owner.body if isinstance(owner, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[owner.name, node.name] = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
    return found


def sha(source):
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@in_each
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.classes.split()[0])
def test_forward_is_the_one_that_was_read(version, forward):
    for name in forward.classes.split():
        *place, owner = name.split(".")
        path = SOURCES[version] / "model_executor/layers" / f"{'/'.join(place)}.py"
        found = methods(path if path.exists() else SOURCES[version] / "model_executor/models" / f"{place[0]}.py")
        source = found[owner, "forward"]
        assert sha(source) == forward.sha, name
        bodies = [source]
        for attribute, hashes in forward.through.items():
            bodies = [method for (kind, _), method in found.items() if kind == owner and sha(method) in hashes]
            assert len(bodies) == len(hashes) and f"self.{attribute}(" in source
        for body in bodies:
            assert_names_are_in(forward, body)


def assert_names_are_in(forward, source):
    """What the table names: each producer is called, the layer that is entered takes the input."""
    for producer in (*forward.hands, *forward.feeds):
        assert f"self.{producer}(" in source or f"maybe_fused_act_quant(self.{producer}, " in source
    hands = " ".join(forward.hands.values()).split()
    shared = [name for names in forward.shared.values() for name in names]
    for child in (*hands, *forward.feeds.values(), *shared, *filter(None, [forward.enters, forward.passes])):
        assert f"self.{child}(" in source or f" = self.{child}\n" in source
    for attribute in (unless.attribute for named in forward.unless.values() for unless in named):
        assert f"self.{attribute}" in source


def test_no_forward_is_listed_twice():
    assert len(BY_SHA) == len(FORWARDS)


# The methods whose work after the quantization a consumer does in their place, or that hand on the quantized input
# themselves: (file, class, method) -> hash of those that were read.
READ = {
    ("scaled_mm/ScaledMMLinearKernel.py", "FP8ScaledMMLinearKernel", "apply_weights"): {"ebd297aca4bf8290"},
    ("scaled_mm/BlockScaledMMLinearKernel.py", "Fp8BlockScaledMMLinearKernel", "apply_weights"): {"e00cce7cf3cb7f27"},
    ("scaled_mm/cutlass.py", "CutlassInt8ScaledMMLinearKernel", "apply_weights"): {"f58601e188457a5f"},
    # In 0.32 the product is not an op; there this kernel is on no platform that is supported.
    ("scaled_mm/triton.py", "TritonInt8ScaledMMLinearKernel", "apply_weights"): {
        "d550a24075adfcfd",
        "0fda75fb9170f8a6",
    },
    ("nvfp4/cutlass.py", "CutlassNvFp4LinearKernel", "apply_weights"): {"e401021d1bede201"},
    ("scaled_mm/cpu.py", "CPUInt8ScaledMMLinearKernel", "_apply_weights_onednn"): {"817be2ae1e9ce914"},
}


@in_each
@pytest.mark.parametrize("place", READ, ids="-".join)
def test_kernel_is_the_one_that_was_read(version, place):
    file, owner, method = place
    assert sha(methods(SOURCES[version] / LINEAR / file)[owner, method]) in READ[place]


@in_each
def test_the_quantizer_says_how_it_stores_scales(version):
    """`tq.contract.kernels.reads_groups` goes by these attributes and by the condition of the packed scales."""
    found = methods(SOURCES[version] / "model_executor/layers/quantization/input_quant_fp8.py")
    for name in ("group_size", "column_major_scales", "tma_aligned_scales", "use_ue8m0", "use_deep_gemm_supported"):
        assert f"self.{name} = " in found["QuantFP8", "__init__"]
    packed = re.search(r"if \((.*?)\):\s+return fp8_utils\.(\w+)", found["QuantFP8", "forward_cuda"], re.DOTALL)
    assert packed.group(2) == "per_token_group_quant_fp8_packed_for_deepgemm"
    assert [line.strip() for line in packed.group(1).strip().splitlines()] == [
        "self.is_group_quant",
        "and self.use_ue8m0",
        "and self.use_deep_gemm_supported",
        "and not self.static",
        "and self.group_size == 128",
        "and (DeepGemmQuantScaleFMT.from_oracle() == DeepGemmQuantScaleFMT.UE8M0)",
    ]
