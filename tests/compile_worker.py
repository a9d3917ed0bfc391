"""Compiles launches for GPUs that are not there: a list of combinations from stdin, a line for each to stdout, in JSON.

A process of its own, because Triton either compiles or interprets. Run by test_compile.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from compile_only import compile_for
from triton.backends.compiler import GPUTarget

import tq
from tq.bench.cases import static_inputs
from tq.kernels import check as check_module
from tq.kernels import launch as launch_module
from tq.kernels.plan import prepare
from tq.kernels.rows import quantize_rows_kernel
from tq.kernels.rows_check import check_rows_kernel
from tq.kernels.target import Target, cuda_target


def targets_of(name: str) -> tuple[GPUTarget, Target]:
    """Triton's name and tq's facts of a GPU like "sm_90" or "gfx942"."""
    if name.startswith("sm_"):
        capability = int(name[3:])
        return GPUTarget("cuda", capability, 32), cuda_target(capability // 10, capability % 10)
    return GPUTarget("hip", name, 64), Target(name)


class Compiling:
    """Stands where a kernel stands: compiles for `target` what it would have launched."""

    def __init__(self, kernel: Any, target: GPUTarget) -> None:
        self.kernel, self.target, self.compiled = kernel, target, None

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.compiled = compile_for(self.target, self.kernel, *arguments, **options)


def compile_one(
    target: str, producer: str, scheme: str, dtype: str, hidden_size: int, check: bool = False, tokens: int = 1024
) -> Any:
    """The compiled kernel of a call, or of its check, with the arguments of the producer's example."""
    gpu, facts = targets_of(target)
    module, name = (check_module, "check_rows_kernel") if check else (launch_module, "quantize_rows_kernel")
    standing = Compiling(check_rows_kernel if check else quantize_rows_kernel, gpu)
    setattr(module, name, standing)
    launch_module.target_of, module.check_device = lambda device: facts, lambda op, device: None
    arguments, options = tq.PRODUCERS[producer].example(tokens, hidden_size, getattr(torch, dtype), "cpu")
    options |= static_inputs(scheme, "cpu")
    if check:
        with tq.use_reference():
            tq.check(producer, *arguments, scheme=scheme, **options)
    else:
        launch_module.launch(prepare(tq.PRODUCERS[producer], arguments, scheme, options))
    return standing.compiled


def facts_of(compiled: Any) -> dict[str, Any]:
    """What the tests ask of a binary: conversions by the code they make, bytes of every load and store, spills."""
    if "ptx" not in compiled.asm:
        assembly = compiled.asm["amdgcn"]
        spills = re.findall(r"\.vgpr_spill_count:\s*(\d+)", assembly)
        conversions = re.findall(r"v_cvt_\w*(fp8|bf8|fp4)", assembly)
        return {
            "conversions": dict(Counter(conversions)),
            "loads": words_of("load", assembly),
            "stores": words_of("store", assembly),
            "spills": sum(map(int, spills)),
        }
    ptx, sass = compiled.asm["ptx"], compiled.asm["sass"]
    return {
        "conversions": dict(Counter(re.findall(r"\bcvt\.rn\.satfinite\.(e4m3|e5m2|e2m1)x2\.f32\b", ptx))),
        "loads": bytes_of("ld", ptx),
        "stores": bytes_of("st", ptx),
        "spills": len(re.findall(r"\bSTL\b", sass)),
        "contracted": len(re.findall(r"\bFFMA\b[^;]*\b12582912\b", sass)),
        "barriers": len(re.findall(r"\bBAR\.SYNC\b", sass)),
        "order": re.findall(r"\b(ACQBULK|PREEXIT|LDG|STG)\b", sass),
        "reductions": reductions_of(compiled.asm["ttgir"]),
    }


def reductions_of(ttgir: str) -> list[str]:
    """Shape and register layout of what each reduction is over, in the order of the kernel: what its order of adding
    depends on."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    found = re.findall(r"\}\) : \((tensor<[^>]*, #[^>]*(?:<\{[^}]*\}>)?>)\) ->", ttgir)
    return [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), each) for each in found]


WORDS = {"byte": 1, "ubyte": 1, "sbyte": 1, "short": 2, "ushort": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12}
WORDS |= {"dwordx4": 16}


def words_of(kind: str, assembly: str) -> list[int]:
    """`bytes_of` for AMD's GPUs."""
    return [WORDS[word] for word in re.findall(rf"\b(?:global|buffer|flat)_{kind}_([a-z]+(?:x\d)?)\b", assembly)]


def bytes_of(instruction: str, ptx: str) -> list[int]:
    """Bytes that every global load or store of a thread moves."""
    found = re.findall(rf"\b{instruction}\.global(?:\.\w+(?:::\w+)*)*?(?:\.v(\d))?\.[busf](\d+)", ptx)
    return [int(vector or 1) * int(size) // 8 for vector, size in found]


def main(compile_one: Callable[..., Any] = compile_one) -> None:
    for combination in json.load(sys.stdin):
        try:
            found = facts_of(compile_one(**combination))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        print(json.dumps({**combination, **found}), flush=True)


if __name__ == "__main__":
    main()
