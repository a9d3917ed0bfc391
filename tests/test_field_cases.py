"""Bugs that were reported of kernels like these, as tests: those of places, shapes, calls and devices. The kind of a
bug, not its witness alone; test_field_cases_values.py has those of values."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl
from helpers import (
    DEVICE,
    FORMATS,
    ONE_EACH,
    ORACLES,
    SCHEME_LAYOUTS,
    Case,
    assert_codes,
    assert_equal_results,
    assert_same_bits,
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

ROOT = Path(__file__).parents[1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
E4M3 = FORMATS["e4m3"]
SWIZZLED = [(scheme, layout) for scheme, layout in SCHEME_LAYOUTS if layout.startswith("swizzled")]


def raw(scale: torch.Tensor) -> np.ndarray:
    """Every byte of the storage."""
    return torch.empty(0, dtype=torch.uint8, device=scale.device).set_(scale.untyped_storage()).cpu().numpy()


def tile_offset(layout: str, m: np.ndarray, g: np.ndarray, G: int) -> np.ndarray:
    """Byte of the scale of token m and group g among G, from the documented order of the tensor cores' tiles."""
    across = -(-G // 4)
    if layout == "swizzled_8x4":
        return (m // 8 * across + g // 4) * 32 + m % 8 * 4 + g % 4
    return (m // 128 * across + g // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + g % 4


@pytest.mark.parametrize(("scheme", "layout"), SWIZZLED)
def test_o09_padding_of_scales_is_written(scheme, layout):
    """Whatever was in the memory: the poisoned torch.empty of conftest.py; the fake says the padded shape."""
    group = tq.SCHEMES[scheme].group
    for M, G in ((1, 1), (33, 3), (128, 180), (129, 5)):
        x, options = torch.randn(M, G * group, device=DEVICE).bfloat16() + 3.0, static_options(scheme)
        scale = tq.quantize(x, scheme=scheme, layout=layout, **options).scale
        storage = raw(scale)
        places = tile_offset(layout, np.arange(M)[:, None], np.arange(G)[None], G)
        padding = np.delete(storage, places.reshape(-1))
        assert len(padding) == scale.numel() - M * G and (padding == 0).all() and (storage[places] != 0).all()
        with FakeTensorMode() as mode:
            given = {name: mode.from_tensor(tensor) for name, tensor in options.items()}
            fake = torch.ops.tq.quantize(mode.from_tensor(x), scheme=scheme, layout=layout, **given)
        tile = 8 if layout == "swizzled_8x4" else 128
        assert fake[1].shape == scale.shape == (-(-M // tile) * tile, -(-G // 4) * 4)


@pytest.mark.parametrize("layout", ["swizzled_128x4", "swizzled_8x4"])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8", "mxfp4", "mxfp8_e5m2"])
def test_o10_the_address_of_every_scale(scheme, layout):
    """By address: a round trip with the same wrong map would pass."""
    m, g = np.arange(130)[:, None], np.arange(5)[None]
    largest = format_of(scheme).values()[-1]
    amax = largest * 2.0 ** ((3 * m + g) % 7 - 3)
    x = torch.from_numpy(amax).repeat_interleave(tq.SCHEMES[scheme].group, 1).bfloat16().to(DEVICE)
    ones = {"global_scale_inv": torch.ones(1, device=DEVICE)} if scheme == "nvfp4" else {}
    stored = raw(tq.quantize(x, scheme=scheme, layout=layout, **ones).scale)
    scales = amax / largest
    want = E4M3.encode(scales) if scheme == "nvfp4" else (np.log2(scales) + 127).astype(np.uint8)
    assert (stored[tile_offset(layout, m, g, 5)] == want).all()
    if layout == "swizzled_128x4":
        spots = {(0, 0): 0, (0, 4): 512, (1, 0): 16, (32, 0): 4, (127, 3): 511, (128, 0): 1024, (129, 4): 1552}
        for (row, group), byte in spots.items():
            assert stored[byte] == want[row, group]


@pytest.mark.parametrize("layout", ["column_major", "tma_aligned", "packed"])
def test_o12_strided_scales_by_index_and_by_storage(layout):
    scheme = "fp8_group128_ue8m0" if layout == "packed" else "fp8_group128_pow2"
    for M, G in ((1, 1), (3, 5), (129, 40)):
        exponents = (np.arange(M)[:, None] * 3 + np.arange(G)) % 9 - 4
        x = torch.from_numpy(448.0 * np.exp2(exponents)).repeat_interleave(128, 1).bfloat16().to(DEVICE)
        activation = tq.quantize(x, scheme=scheme, layout=layout)
        assert (np.log2(float32(activation.scales())) == exponents).all()
        aligned = M if layout == "column_major" else -(-M // 4) * 4
        m, g = np.arange(M)[:, None], np.arange(G)[None]
        if layout == "packed":
            words = -(-G // 4)
            wanted = np.zeros(words * aligned * 4, np.uint8)
            wanted[(g // 4 * aligned + m) * 4 + g % 4] = exponents + 127
            assert activation.scale.dtype == torch.int32 and activation.scale.shape == (M, words)
            assert (raw(activation.scale)[: len(wanted)] == wanted).all()
        else:
            wanted = np.zeros(aligned * G, np.float32)
            wanted[g * aligned + m] = np.exp2(exponents)
            assert (raw(activation.scale).view(np.float32) == wanted).all()
        assert M == 1 or G == 1 or activation.scale.stride() == (1, aligned)


@pytest.mark.parametrize(("producer", "scheme"), ONE_EACH)
def test_o13_strided_and_three_dimensional_inputs(producer, scheme):
    """Views of a wider tensor give what their copies do; what one stride cannot walk is refused."""
    found, size = tq.SCHEMES[scheme], max(2 * tq.SCHEMES[scheme].group, 96)
    case = Case(tq.PRODUCERS[producer], found, 10, size)
    want = case.run()
    case.change_rows(lambda rows: torch.cat([rows + 1, rows, rows - 1], 1)[:, rows.shape[1] : 2 * rows.shape[1]])
    assert_equal_results(case.run(), want)
    case.change_rows(lambda rows: rows.unflatten(0, (2, 5)))
    got = case.run()
    assert got.activation.orig_shape == (2, 5, size) and got.activation.data.is_contiguous()
    assert_same_bits(got.codes.flatten(0, 1), want.codes)
    x, *rest = case.arguments
    width = x.shape[-1]
    for wrong in (
        torch.ones(2, 8, width, dtype=x.dtype, device=DEVICE)[:, :5],
        torch.ones(width, 7, dtype=x.dtype, device=DEVICE).t(),
        torch.ones(7, 2 * width, dtype=x.dtype, device=DEVICE)[:, ::2],
    ):
        with pytest.raises(ValueError, match=r"stride.*contiguous\(\)"):
            case.producer(wrong, *rest, scheme=scheme, **static_options(scheme))


def test_o14_offsets_beyond_32_bits():
    """Rows 2^31 elements apart, read and written; the memory between them is asked for and never touched."""
    stride, size = (1 << 30) + 8, 256

    def far(values: torch.Tensor) -> torch.Tensor:
        memory = torch.UntypedStorage(2 * (2 * stride + values.shape[1]), device=DEVICE)
        view = torch.empty(0, dtype=torch.bfloat16, device=DEVICE).set_(memory, 0, values.shape, (stride, 1))
        return view.copy_(values)

    gate_up = torch.randn(3, 2 * size, device=DEVICE).bfloat16()
    for scheme in ("fp8_group128", "mxfp4", "int8_token_azp"):
        got, want = (tq.silu_mul(x, scheme=scheme, **static_options(scheme)) for x in (far(gate_up), gate_up))
        assert_same_bits(got.data.view(torch.uint8), want.data.view(torch.uint8))
        assert_same_bits(got.scales(), want.scales())
    x, residual = torch.randn(2, 3, size, device=DEVICE).bfloat16()
    weight, place = torch.ones(size, dtype=torch.bfloat16, device=DEVICE), far(residual)
    got, total = tq.rms_norm(x, weight, residual=place, residual_out=place, scheme="fp8_token")
    want, wanted = tq.rms_norm(x, weight, residual=residual, scheme="fp8_token")
    assert total is place
    assert_same_bits(total.contiguous(), wanted)
    assert_same_bits(got.data.view(torch.uint8), want.data.view(torch.uint8))


@needs_gpu
@pytest.mark.gpu
def test_o14_more_than_2_to_the_31_elements():
    x = torch.zeros(61682, 2 * 17408, dtype=torch.bfloat16, device="cuda")
    x[0], x[-1] = torch.randn(2, 2 * 17408, device="cuda").bfloat16()
    for scheme in ("fp8_token", "fp8_group128", "mxfp4"):
        got = tq.silu_mul(x, scheme=scheme)
        for row in (0, -1):
            alone = tq.silu_mul(x[row][None], scheme=scheme)
            assert_same_bits(got.data[row].view(torch.uint8), alone.data[0].view(torch.uint8))
        assert (got.data[1:-1].view(torch.uint8) == 0).all()


@pytest.mark.parametrize(("producer", "scheme"), ONE_EACH)
def test_o15_no_rows(producer, scheme, monkeypatch):
    """No launch, and the dtypes, shapes and strides of any other call, in the fake too."""
    monkeypatch.setattr(launch, "quantize_rows_kernel", None)
    found = tq.SCHEMES[scheme]
    for layout in found.layouts:
        for shape in ((0,), (2, 0)):
            case = Case(tq.PRODUCERS[producer], found, 0, 256, layout=layout.name)
            case.change_rows(lambda rows, shape=shape: rows.reshape(*shape, rows.shape[-1]))
            activation, *sides = (got := case.run()).activation, *got.side_outputs
            assert activation.data.shape == (*shape, 256 // found.code.per_byte)
            assert activation.data.dtype == found.code.torch_dtype and all(s.shape == (*shape, 256) for s in sides)
            assert activation.dequantize().shape == (*shape, 256)
            if found.dynamic:
                G = found.groups(256)
                columns = {"packed": -(-G // 4)}.get(layout.name, G)
                columns = -(-G // 4) * 4 if layout.name.startswith("swizzled") else columns
                assert activation.scale.shape == (0, columns) and activation.scales().shape == (0, G)
            options = {name: value for name, value in case.call_options().items() if value is not None}
            with FakeTensorMode(allow_non_fake_inputs=True):
                op = getattr(torch.ops.tq, producer)
                made = [activation.data, *([activation.scale] if found.dynamic else [])]
                for fake, real in zip(op(*case.arguments, scheme=scheme, **options), made, strict=False):
                    assert (fake.shape, fake.stride()) == (real.shape, real.stride())


@pytest.mark.parametrize("scheme", ["fp8_token", "fp8_group128", "mxfp8", "nvfp4", "int8_token_azp"])
def test_o16_hidden_sizes_that_are_not_nice(scheme):
    """Multiples of the group, with NaN behind every row, are the oracle's; the others are refused before a launch."""
    found, options = tq.SCHEMES[scheme], static_options(scheme)
    unit = max(found.group, found.code.per_byte)
    for size in (32, 48, 100, 128, 1376, 2112, 2880, 5120, 6144, 7168, 12288, 16384, 28672):
        if size > 7168 and scheme not in ("fp8_token", "fp8_group128"):
            continue  # several seconds each when interpreted, for groups that are small
        x = in_nan_memory(torch.randn(2, size, device=DEVICE).bfloat16())
        if size % unit:
            with pytest.raises(ValueError, match=rf"multiple of {unit} for {scheme}, got {size}"):
                tq.quantize(x, scheme=scheme, **options)
            continue
        got, want = tq.quantize(x, scheme=scheme, **options), quantized_by_oracle(scheme, float32(x), given_of(options))
        assert_codes(found, got.data.view(torch.uint8), want.codes, want.scales, f"{scheme} {size}")
        assert (float32(got.scales()) == want.scales).all()


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
                chosen.add(cut.cut(prepared, whole_row))
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
