"""Every producer with every scheme against torch, on a GPU: which combinations are run, and what counts as wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch

import tq
from tq.bench import search
from tq.bench.cases import static_inputs
from tq.cli.tune import cases_of
from tq.kernels import tables

TOKENS = (0, 1, 7, 33, 128, 129, 4096)
MANY_TOKENS = (*TOKENS, 8192)
SIZES = (576, 4096, 5120)
DTYPES = ("bfloat16", "float16", "float32")


class Combination(NamedTuple):
    """One kernel, to be tried with every number of tokens. checked: also by `tq.check`, whose kernel takes twice as
    long to compile. left_out: options of the producer's example that are not given."""

    producer: str
    scheme: str
    layout: str
    dtype: str
    hidden_size: int
    tokens: tuple[int, ...]
    checked: bool
    left_out: tuple[str, ...] = ()


def combinations(every_size: Sequence[int] = SIZES) -> Iterator[Combination]:
    """Every producer and scheme at every size in bf16; every layout and dtype of a scheme with the producers in turn,
    so that each producer and each scheme meets each dtype.

    Where sums are made torch need not have the same bits: two pairs of three are checked, in rows of the most even
    size, which compile fastest. Of the others all with the identity and one in three, at the sizes in turn; of both
    kinds those in fp16 and fp32."""
    producers = list(tq.PRODUCERS)
    turns = {dtype: count() for dtype in DTYPES}
    for i, scheme in enumerate(tq.SCHEMES.values()):
        sizes = [size for size in every_size if not scheme.group or size % scheme.group == 0]
        default = scheme.layouts[0].name
        for j, producer in enumerate(producers):
            if tq.PRODUCERS[producer].moments:
                checked_size = 0 if (i + j) % 3 == 0 else max(sizes, key=lambda size: size & -size)
            else:
                checked_size = sizes[(i + j) % len(sizes)] if producer == "quantize" or (i + j // 3) % 3 == 0 else 0
            for size in sizes:
                yield Combination(producer, scheme.name, default, "bfloat16", size, TOKENS, size == checked_size)
        for layout in scheme.layouts:
            for dtype, turn in turns.items():
                n = next(turn)
                producer, size = producers[n % len(producers)], sizes[n % len(sizes)]
                checked = layout is scheme.layouts[0] and dtype != "bfloat16"
                yield Combination(producer, scheme.name, layout.name, dtype, size, MANY_TOKENS, checked)


def against_reference(combination: Combination) -> list[dict[str, Any]]:
    """What differs from torch and what the check finds, over all numbers of tokens."""
    producer, scheme = tq.PRODUCERS[combination.producer], tq.SCHEMES[combination.scheme]
    row: dict[str, Any] = {**combination._asdict(), "codes": 0, "codes_differ": 0, "scales_differ": 0}
    row |= {"side_outputs_differ": 0} | ({"wrong": 0, "worst_ulps": 0.0} if combination.checked else {})
    for tokens in combination.tokens:
        torch.manual_seed(tokens + combination.hidden_size)
        dtype = getattr(torch, combination.dtype)
        arguments, options = producer.example(tokens, combination.hidden_size, dtype, "cuda")  # type: ignore[misc]
        options = {name: value for name, value in options.items() if name not in combination.left_out}
        options |= {"layout": combination.layout, "scheme": scheme.name} | static_inputs(scheme.name, "cuda")
        ours = outputs(producer(*arguments, **options))
        with tq.use_reference():
            theirs = outputs(producer(*arguments, **options))
        row["codes"] += ours[0].data.numel()
        row["codes_differ"] += different(ours[0].data, theirs[0].data)
        row["scales_differ"] += different(ours[0].scale, theirs[0].scale)
        row["side_outputs_differ"] += sum(different(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))
        if combination.checked:
            report = tq.check(producer, *arguments, activation=ours[0], **options)
            row["wrong"] += report.wrong_codes + report.wrong_scales + report.nonfinite_scales
            row["worst_ulps"] = max(row["worst_ulps"], round(report.worst_ulps, 6))
    return [row]


def in_table(gpu: str) -> Iterator[Combination]:
    """A call for each line of a GPU's table, with the numbers of tokens that it is for. It is cut as the line says."""
    left = set(tables.table(tables.FOLDER / f"{gpu}.json"))
    for case in cases_of((), (), sorted({key.hidden_size for key in left}), (8192, 1)):
        key, _ = search.describe(case)
        if key in left:
            left.remove(key)
            layout, tokens = tq.SCHEMES[case.scheme].layouts[0].name, tuple(search.tokens_of(key))
            kind = case.producer.name, case.scheme, layout, "bfloat16"
            yield Combination(*kind, case.hidden_size, tokens, False, case.left_out)


def outputs(made: Any) -> tuple:
    """What a call returned, as a tuple."""
    return made if isinstance(made, tuple) else (made,)


def different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bytes differ."""
    if a.element_size() == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return int((a != b).sum())


def wrong(row: dict[str, Any]) -> bool:
    """Exact where y is: identity and residual. Elsewhere y may differ in its last bit, and a code in 10^5 with it."""
    if "check" in row:
        return row["differ"] != 0
    exact = row["side_outputs_differ"] == 0
    if row["producer"] == "quantize":
        exact = exact and row["codes_differ"] == row["scales_differ"] == 0
    if row["checked"]:
        rounding = 8 * 2.0**-24 * tq.SCHEMES[row["scheme"]].code.steps  # of the quotient and the decoded product
        exact = exact and row["wrong"] == 0 and row["worst_ulps"] <= 0.5 + rounding + 1e-6
    return not exact or row["codes_differ"] > 2 + row["codes"] // 10**5
