"""What is checked on a GPU call by call: vLLM's quantizers, capture, other processes, large tensors, sanitizers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

import tq
from perf.matrix import TOKENS, different, outputs
from tq.bench.cases import static_inputs
from tq.bench.peers import QUANTIZERS, vllm_library, vllm_peer
from tq.kernels.plan import prepare
from tq.kernels.rows import quantize_rows_kernel

LARGE = {"silu_mul": (61682, 2 * 17408), "quantize": (70000, 32768), "rms_norm": (70000, 32768)}
PAIRS = list(
    dict.fromkeys([(name, "fp8_token") for name in tq.PRODUCERS] + [("quantize", name) for name in tq.SCHEMES])
)


def against_vllm() -> list[dict[str, Any]]:
    """Codes and scales in which the identity differs from vLLM's quantizers, on 2^24 values of many magnitudes."""
    rows: list[dict[str, Any]] = []
    if vllm_library() is None:
        return rows
    x = torch.randn(4096, 4096, device="cuda") * torch.logspace(-3, 3, 4096, device="cuda").unsqueeze(-1)
    for scheme in tq.SCHEMES.values():
        if scheme.quantizer not in QUANTIZERS:
            continue
        prepared = prepare(tq.PRODUCERS["quantize"], (x.bfloat16(),), scheme.name, static_inputs(scheme.name, "cuda"))
        theirs = vllm_peer(prepared)
        if theirs is None:
            continue
        theirs.call()
        codes, scales, _ = theirs.outputs()
        ours = tq.quantize(x.bfloat16(), scheme=scheme.name, **static_inputs(scheme.name, "cuda"))
        differ = different(ours.data, codes) + (
            0 if scales is None else different(ours.scale, scales.view_as(ours.scale))
        )
        rows.append({"check": f"{scheme.name} against vLLM's {scheme.quantizer}", "made": x.numel(), "differ": differ})
    return rows


def known_kernels() -> int:
    """Kernels of the template that this process has launched."""
    return len(quantize_rows_kernel.device_caches[torch.cuda.current_device()][0])


def capture(name: str, scheme: str) -> list[dict[str, Any]]:
    """First call inside a graph capture, and replay on other values: equal to eager calls? The first capture must be of
    a kernel that this process has never launched, the second of one that it has."""
    rows, producer = [], tq.PRODUCERS[name]
    arguments, options = producer.example(7, 1024, torch.bfloat16, "cuda")  # type: ignore[misc]
    options |= {"scheme": scheme} | static_inputs(scheme, "cuda")
    for state, new_kernels in (("cold", 1), ("warm", 0)):
        graph, before = torch.cuda.CUDAGraph(), known_kernels()
        with torch.cuda.graph(graph):
            captured = outputs(producer(*arguments, **options))
        rows.append({"check": f"kernels met in the capture, {state}: {name} {scheme}"})
        rows[-1]["differ"] = known_kernels() - before - new_kernels
        differ = 0
        for _ in range(2):
            graph.replay()
            eager = outputs(producer(*arguments, **options))
            differ += different(captured[0].data, eager[0].data) + different(captured[0].scale, eager[0].scale)
            arguments[0].copy_(torch.randn_like(arguments[0]))
        rows.append({"check": f"graph capture, {state}: {name} {scheme}", "differ": differ})
    return rows


def chain(tokens: int) -> list[dict[str, Any]]:
    """Calls that each read what the one before has written, and write it again, torch's between them: does any begin
    too early? All at once in a graph, against one after the other with the GPU idle between."""
    given, x = torch.randn(2, tokens, 4096, device="cuda").bfloat16()
    weight, scale = torch.ones_like(x[0]), torch.tensor([0.02], device="cuda")
    residual = torch.empty_like(given)

    def calls(between: Callable[[], None]) -> list[torch.Tensor]:
        codes, wide = [], torch.cat([given, given], -1)
        residual.copy_(given)
        for i in range(24):
            normed, _ = tq.rms_norm(
                x, weight, 1e-6, scheme="fp8_tensor", scale=scale, residual=residual, residual_out=residual
            )
            between()
            wide[:, 4096:] = residual
            between()
            activated = tq.silu_mul(wide, scheme="fp8_token")
            between()
            if i % 2:
                residual.mul_(0.5)
            between()
            codes += [normed.data, activated.data, activated.scale, tq.quantize(residual, scheme="fp8_group128").data]
            between()
        return codes

    alone = calls(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = calls(lambda: None)
    differ = 0
    for _ in range(8):
        graph.replay()
        differ += sum(different(a, b) for a, b in zip(alone, together, strict=True))
    return [{"check": f"a chain of 72 dependent calls of {tokens} tokens", "differ": differ}]


BATCHES = TOKENS[1:]


def digests(
    backward: bool, device: str = "cuda", hidden_size: int = 5120, batches: tuple[int, ...] = BATCHES
) -> dict[str, str]:
    """Digests of one token's codes and scales as the last row of batches of every size, the calls in one order or the
    other. In another process and order they must be the same, and the same for every size."""
    made, most = {}, max(batches)
    calls = [(name, scheme, tokens) for name, scheme in PAIRS for tokens in batches]
    for name, scheme, tokens in reversed(calls) if backward else calls:
        producer = tq.PRODUCERS[name]
        torch.manual_seed(0)
        arguments, options = producer.example(most, hidden_size, torch.bfloat16, device)  # type: ignore[misc]
        arguments = tuple(last_rows(value, most, tokens) for value in arguments)
        options = {key: last_rows(value, most, tokens) for key, value in options.items()}
        activation = outputs(producer(*arguments, scheme=scheme, **options, **static_inputs(scheme, device)))[0]
        scales = activation.scales()[-1] if tq.SCHEMES[scheme].dynamic else activation.scale
        bits = b"".join(part.cpu().numpy().tobytes() for part in (activation.data.view(torch.uint8)[-1], scales))
        made[f"{name} {scheme} {tokens}"] = hashlib.sha256(bits).hexdigest()
    return made


def last_rows(value: Any, most: int, tokens: int) -> Any:
    """The last `tokens` of the `most` rows of a tensor that has so many; other values as they are."""
    return value[-tokens:] if isinstance(value, torch.Tensor) and value.shape[:1] == (most,) else value


def same_digests(forward: dict[str, str], backward: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each kind of call: how many digests are not that of one token alone in the first process."""
    rows = []
    for name, scheme in PAIRS:
        call = f"{name} {scheme} "
        of_pair = [made[key] for made in (forward, backward) for key in made if key.startswith(call)]
        differ = sum(digest != forward[f"{call}1"] for digest in of_pair)
        rows.append({"check": f"a token in {len(of_pair)} batches of two processes: {name} {scheme}", "differ": differ})
    return rows


NAN, INF, TINY = float("nan"), float("inf"), 2.0**-149
SPECIALS = (NAN, -NAN, INF, -INF, 3.4e38, -3.4e38, 1e38, 1e30, 1.0, -1.0, 1e-30, 1e-38, -TINY, TINY, 0.0, -0.0)


def specials(scheme: str) -> list[dict[str, Any]]:
    """Rows in which ordinary values meet each special one, alone and all of them: bit-equal to torch, with every scale
    and bound that there may be."""
    rows, rule = [], tq.SCHEMES[scheme].rule
    x = torch.randn(2 * len(SPECIALS) + 1, 1024, device="cuda")
    values = torch.tensor(SPECIALS, device="cuda")
    for i, value in enumerate(SPECIALS):
        x[2 * i, 5], x[2 * i + 1] = value, value
    x[-1] = values.repeat(1024 // len(values))
    numbers = [name for name in rule.needs if name != "zero_point"]
    calls = [dict.fromkeys(numbers, number) for number in (1.0, 1e-4, 1e30)] if numbers else [{}]
    if "scale_ub" in rule.takes:
        calls += [{"scale_ub": bound} for bound in (1e-30, 1e-3, 1.0)]
    for given in calls:
        tensors = {name: torch.tensor([number], device="cuda") for name, number in given.items()}
        options = {**static_inputs(scheme, "cuda"), **tensors}
        ours = tq.quantize(x, scheme=scheme, **options)
        with tq.use_reference():
            theirs = tq.quantize(x, scheme=scheme, **options)
        differ = different(ours.data, theirs.data) + different(ours.scales(), theirs.scales())
        rows.append({"check": f"special values, {given or 'no bounds'}: {scheme}", "differ": differ})
    return rows


def large(name: str) -> list[dict[str, Any]]:
    """First and last row of tensors whose offsets leave 32 bits: equal to the row alone? The rows between are zero."""
    rows, (tokens, columns) = [], LARGE[name]
    x = torch.zeros(tokens, columns, dtype=torch.bfloat16, device="cuda")
    x[0], x[-1] = torch.randn(2, columns, device="cuda").bfloat16()
    rest = (torch.ones(columns, device="cuda", dtype=torch.bfloat16), 1e-6) if name == "rms_norm" else ()
    for scheme in ("fp8_tensor", "fp8_token", "fp8_group128", "fp8_group128_ue8m0", "mxfp8", "nvfp4"):
        inputs, producer = static_inputs(scheme, "cuda"), tq.PRODUCERS[name]
        made = producer(x, *rest, scheme=scheme, **inputs)
        data, scales, differ = made.data.view(torch.uint8), made.scales(), 0
        for row in (0, tokens - 1):
            alone = producer(x[row : row + 1], *rest, scheme=scheme, **inputs)
            differ += different(data[row : row + 1], alone.data.view(torch.uint8))
            if made.scale.numel() > 1:
                differ += different(scales[row : row + 1], alone.scales())
        differ += int(data[1:-1].count_nonzero())
        rows.append({"check": f"{x.numel()} elements: {name} {scheme}", "differ": differ})
    return rows


TEMPLATES = (("fp8_tensor", "row_major"), ("int8_token_azp", "row_major"), ("fp8_group128_ue8m0", "packed"))
TEMPLATES += (("nvfp4", "swizzled_128x4"), ("mxfp8", "swizzled_8x4"), ("fp8_group128", "tma_aligned"))


def templates() -> None:
    """One small run of every template, with schemes of every kind of code, scale and layout, for the sanitizer."""
    for scheme, layout in TEMPLATES:
        x, more = torch.randn(5, 384, device="cuda").bfloat16(), static_inputs(scheme, "cuda")
        tq.check("quantize", x, scheme=scheme, layout=layout, **more)
    weight, counts = torch.ones(384, device="cuda"), torch.tensor([3, 0], device="cuda")
    tq.rms_norm(x, weight, residual=x, scheme="nvfp4", **static_inputs("nvfp4", "cuda"))
    x = torch.randn(2, 4, 768, device="cuda")
    tq.silu_mul(x, scheme="mxfp8", tokens_per_expert=counts, return_unquantized=True)
    torch.cuda.synchronize()
