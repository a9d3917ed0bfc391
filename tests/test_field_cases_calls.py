"""Bugs that were reported of kernels like these, as tests: those of batches, calls, compiled graphs and devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl
from comparing import assert_codes, assert_same_bits
from helpers import (
    DEVICE,
    ONE_EACH,
    ORACLES,
    Case,
    float32,
    format_of,
    given_of,
    in_nan_memory,
    quantized_by_oracle,
    static_options,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import tq
from perf.calls import digests, same_digests
from tq.bench.cases import static_inputs
from tq.kernels import cut, launch, plan
from tq.kernels.target import cuda_target

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("scheme", ["fp8_token", "fp8_group128", "int8_token_azp", "mxfp8", "nvfp4"])
def test_o18_the_same_row_in_another_batch(scheme):
    row, residual, options = *torch.randn(2, 1, 288).bfloat16().to(DEVICE), static_options(scheme)
    size = 256 if tq.SCHEMES[scheme].group == 128 else 288
    row, residual, weight = row[:, :size], residual[:, :size], torch.randn(size, device=DEVICE).bfloat16()
    want, wanted = tq.rms_norm(row.contiguous(), weight, residual=residual.contiguous(), scheme=scheme, **options)
    for M in (2, 17, 255, 257):
        for position in {0, M // 2, M - 1}:
            x, before = torch.randn(2, M, size, device=DEVICE).bfloat16()
            x[position], before[position] = row[0], residual[0]
            plan._plans.clear()
            got, total = tq.rms_norm(x, weight, residual=before, scheme=scheme, **options)
            assert_same_bits(got.data.view(torch.uint8)[position], want.data.view(torch.uint8)[0])
            assert_same_bits(got.scales()[position], want.scales()[0])
            assert_same_bits(total[position], wanted[0])


def test_o18_a_configuration_that_sums_does_not_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(cut, "INTERPRETED", tl.constexpr(False))
    for size in (32, 576, 2880, 4096, 7168, 14336, 32768):
        for scheme in ("fp8_tensor", "fp8_token", *(("fp8_group128",) if size % 128 == 0 else ())):
            chosen = set()
            for rows in (1, 2, 17, 256, 1024, 1 << 16):
                x, weight = torch.empty(rows, size, device="meta"), torch.empty(size, device="meta")
                inputs = static_inputs(scheme, "meta")
                prepared = plan.prepare(tq.PRODUCERS["rms_norm"], (x, weight, 1e-6), scheme, inputs)
                whole_row = cut.needs_whole_row(prepared.plan.producer, prepared.plan.scheme)
                tiling, config = cut.cut(prepared, whole_row)
                chosen.add((tiling._replace(EARLY=None), config))  # when a weight is read; see test_compile.py
            assert len(chosen) == 1


OTHER_PROCESS = "import json; from perf.calls import digests; print(json.dumps(digests(True, {!r}, 256, (1, 5, 33))))"


def test_o18_the_same_bits_in_a_new_process():
    """Every producer and every scheme: a token alone and as the last of others, in two processes with the calls in
    opposite orders, each batch first seen after another one."""
    command = [sys.executable, "-c", OTHER_PROCESS.format(DEVICE)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        here = digests(False, DEVICE, 256, (1, 5, 33))
        output, errors = other.communicate(timeout=300)
    assert other.returncode == 0, errors[-2000:]
    rows = same_digests(here, json.loads(output))
    assert {row["differ"] for row in rows} == {0} and len(rows) >= len(tq.SCHEMES) + len(tq.PRODUCERS) - 1
    assert len(set(here.values())) > len(rows) / 2


FIRST_CALL = """
import torch, tq
x, residual = torch.randn(2, 5, 256).bfloat16()
before = residual.clone()
weight = torch.ones(256, dtype=torch.bfloat16)
activation, total = tq.rms_norm(x, weight, residual=residual, residual_out=residual, scheme="fp8_group128")
assert total is residual and torch.equal(residual, (x.float() + before.float()).bfloat16())
"""


@pytest.mark.skipif(DEVICE != "cpu", reason="the GPU's own test is below")
def test_o19_the_first_call_in_a_process_writes_in_place_once():
    """No search for a configuration runs the kernel more than once."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]


def test_o19_no_call_launches_more_than_one_kernel(monkeypatch):
    launched = []
    kernel = launch.quantize_rows_kernel

    class Counting:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append(grid) or kernel[grid](*arguments, **options)

    monkeypatch.setattr(launch, "quantize_rows_kernel", Counting())
    for producer, scheme in ONE_EACH:
        plan._plans.clear()
        launched.clear()
        Case(tq.PRODUCERS[producer], tq.SCHEMES[scheme], 3, 256).run()
        assert len(launched) == 1, (producer, scheme)


@needs_gpu
@pytest.mark.gpu
def test_o19_a_graph_captured_after_one_call():
    """No number of rows compiles anything new, so that one call before the capture is enough for all."""
    weight = torch.ones(512, dtype=torch.bfloat16, device="cuda")
    tq.rms_norm(torch.randn(3, 512, device="cuda").bfloat16(), weight, scheme="fp8_token")
    for rows in (1, 7, 256):
        x = torch.randn(rows, 512, device="cuda").bfloat16()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = tq.rms_norm(x, weight, scheme="fp8_token")
        x.copy_(torch.randn_like(x))
        graph.replay()
        want = tq.rms_norm(x, weight, scheme="fp8_token")
        assert_same_bits(got.data.view(torch.uint8), want.data.view(torch.uint8))


COMMON = {
    "data_width": lambda size, unit: {"data_width": size + 2 * unit},
    "unquantized": lambda size, unit: {"return_unquantized": True},
    "smooth": lambda size, unit: {"smooth_scale": torch.rand(size, device=DEVICE) + 0.5},
    "experts": lambda size, unit: {"tokens_per_expert": torch.tensor([5, 5], dtype=torch.int32, device=DEVICE)},
}


@pytest.mark.parametrize("option", COMMON)
@pytest.mark.parametrize("scheme", ["fp8_group128", "int8_token_azp", "mxfp8", "nvfp4"])
def test_o20_the_fake_and_a_compiled_graph_agree_with_the_call(scheme, option):
    """5 rows an expert: no multiple of what anything is aligned to. Strides, storage, and no output is an input."""
    found, size = tq.SCHEMES[scheme], 256
    options = {**static_options(scheme), **COMMON[option](size, max(found.group, 1))}
    x = in_nan_memory(torch.randn(10, size, device=DEVICE).bfloat16()).unflatten(0, (2, 5))
    layout = found.layouts[-1].name
    torch.library.opcheck(torch.ops.tq.quantize.default, (x,), {"scheme": scheme, "layout": layout, **options})
    real = torch.ops.tq.quantize(x, scheme=scheme, layout=layout, **options)
    with FakeTensorMode() as mode:
        given = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        fake = torch.ops.tq.quantize(mode.from_tensor(x), scheme=scheme, layout=layout, **given)
    assert len(real) == len(fake)
    inputs = {x.untyped_storage().data_ptr(), *(options[k].data_ptr() for k in options if hasattr(options[k], "dim"))}
    for mine, theirs in zip(real, fake, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert mine.storage_offset() == theirs.storage_offset()
        assert mine.untyped_storage().data_ptr() not in inputs
    torch._dynamo.reset()

    def call(x):
        made = tq.quantize(x, scheme=scheme, layout=layout, **options)
        activation, *y = made if isinstance(made, tuple) else (made,)
        return activation.data, activation.scale, *y

    for mine, theirs in zip(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x), strict=True):
        assert_same_bits(mine, theirs)
        assert mine.stride() == theirs.stride()


def test_o20_experts_leave_other_rows_alone():
    """Codes, scales, zero points and y of the rows that an expert does not have are what the memory held."""
    counts = torch.tensor([3, 0, 5], device=DEVICE)
    for scheme in ("fp8_group128", "int8_token_azp", "mxfp8", "nvfp4"):
        x, options = torch.randn(3, 5, 256, device=DEVICE).bfloat16(), static_options(scheme)
        for expert, count in enumerate(counts.tolist()):
            x[expert, count:] = torch.nan
        activation, y = tq.quantize(
            x, scheme=scheme, layout="row_major", tokens_per_expert=counts, return_unquantized=True, **options
        )
        codes, form = activation.data.view(torch.uint8), format_of(scheme)
        for expert, count in enumerate(counts.tolist()):
            want = quantized_by_oracle(scheme, float32(x[expert, :count]), given_of(options)) if count else None
            assert (codes[expert, count:] == 0xAB).all() and y[expert, count:].isnan().all()
            if count:
                label = f"{scheme}, expert {expert}"
                assert_codes(tq.SCHEMES[scheme], codes[expert, :count], want.codes, want.scales, label)
                scales = float32(activation.scales()).reshape(3, 5, -1)[expert, :count]
                assert (scales == want.scales).all() and form.values()[-1] > 0
                assert_same_bits(y[expert, :count], x[expert, :count])


@pytest.mark.parametrize("scheme", ORACLES)
def test_o26_a_gpu_without_the_type(scheme):
    """There the byte is made by integer arithmetic; nothing asks for a conversion that the target lacks."""
    code = tq.SCHEMES[scheme].code
    expected = {"e4m3": (9, 0), "e5m2": (9, 0), "e2m1": (10, 0)}.get(code.name, (99, 0))
    for capability in ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)):
        chosen = code.device(cuda_target(*capability)).encode
        assert chosen is (code.encode_native if capability >= expected else code.encode)


def test_o26_devices_that_differ_are_refused_before_a_launch(monkeypatch):
    monkeypatch.setattr(launch, "launch", lambda prepared: pytest.fail("launched"))
    x = torch.randn(2, 256, device=DEVICE)
    for scheme in ORACLES:
        for name, tensor in static_options(scheme).items():
            options = {**static_options(scheme), name: tensor.to("meta")}
            with pytest.raises(ValueError, match=f"^quantize: {name} must be on {DEVICE}.*got meta"):
                tq.quantize(x, scheme=scheme, **options)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.gpu
def test_o26_a_gpu_that_is_not_the_current_one():
    x = torch.randn(5, 256).bfloat16()
    with torch.cuda.device(0):
        first, second = (tq.quantize(x.to(f"cuda:{i}"), scheme="fp8_token") for i in (0, 1))
        assert torch.cuda.current_device() == 0
    assert second.data.device.index == second.scale.device.index == 1
    assert_same_bits(first.data.view(torch.uint8).cpu(), second.data.view(torch.uint8).cpu())
    assert_same_bits(first.scale.cpu(), second.scale.cpu())
