"""What `tq check` found, what of it is a failure, and its tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tq

# A y that lies within an fp32 rounding of a bf16 boundary may round to the neighbour of what float64 rounds to, and
# where two roundings follow each other to the one after: 2^-7 of y each, by which the error grows.
BF16_STEPS = 2 * 2.0**-7
# With some eight fp32 roundings of 2^-24 on the way, against 2^-8 from one bf16 boundary to the next, that happens to
# 2^-13 of the elements, and moves the code of 2^-8 of those for each step that the code has.
DIFFERENCES_PER_STEP = 2.0**-21


ADDED = (
    "calls", "codes", "wrong_codes", "wrong_scales", "nonfinite_scales", "saturated", "differ", "residual_differ",
)  # fmt: skip


@dataclass
class Finding:
    """What was found over all calls of one source, producer and scheme.

    worst_ulps: largest |decoded - y| over elements in range, y in float64, in units of the code's spacing. wrong_codes,
    wrong_scales, nonfinite_scales: by the check kernel. differ: codes other than those of the float64 y.
    residual_differ: elements of the new residual other than float64's, rounded once.
    """

    source: str
    producer: str
    scheme: str
    calls: int = 0
    codes: int = 0
    worst_ulps: float = 0.0
    snr_db: float = float("inf")
    wrong_codes: int = 0
    wrong_scales: int = 0
    nonfinite_scales: int = 0
    saturated: int = 0
    differ: int = 0
    residual_differ: int = 0
    time_us: float | None = None
    bandwidth_share: float | None = None
    vllm_us: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Findings of one key are one."""
        return self.source, self.producer, self.scheme

    def add(self, other: Finding) -> None:
        """Adds what another call found."""
        for name in ADDED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst_ulps = max(self.worst_ulps, other.worst_ulps)
        self.snr_db = min(self.snr_db, other.snr_db)

    @property
    def failures(self) -> list[str]:
        """What is not as it must be."""
        code = tq.SCHEMES[self.scheme].code
        found = {
            "wrong codes": self.wrong_codes,
            "wrong scales": self.wrong_scales,
            "non-finite scales": self.nonfinite_scales,
            "residual differs": self.residual_differ,
            "error too large": self.worst_ulps > 0.5 + BF16_STEPS * code.steps + 1e-5,
            "too many codes differ": self.differ > 3 + self.codes * DIFFERENCES_PER_STEP * code.steps,
        }
        return [name for name, wrong in found.items() if wrong]


def show_matrix(console: Console, title: str, findings: list[Finding], cell: Callable[[list[Finding]], str]) -> None:
    """A line for each scheme, a column for each producer, as many side by side as the console has room for."""
    of_pair: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        of_pair.setdefault((finding.scheme, finding.producer), []).append(finding)
    producers = list(dict.fromkeys(producer for _, producer in of_pair))
    schemes = [name for name in tq.SCHEMES if any(name == scheme for scheme, _ in of_pair)]
    room = max((console.width - 22) // 9, 1)
    for i in range(0, len(producers), room):
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title if i == 0 else None, title_justify="left")
        table.add_column("scheme", no_wrap=True)
        for producer in producers[i : i + room]:
            header = producer.replace("_", "_\n").replace("+", "\n+")
            table.add_column(header, justify="right", no_wrap=True, min_width=8)
        for scheme in schemes:
            cells = []
            for producer in producers[i : i + room]:
                found = of_pair.get((scheme, producer), [])
                bad = any(finding.failures for finding in found)
                cells.append(Text(cell(found) if found else "", style="red" if bad else ""))
            table.add_row(scheme, *cells)
        console.print(table)


def show(console: Console, findings: list[Finding], measured_tokens: int) -> None:
    """The tables. measured_tokens: those that were timed."""
    for source in dict.fromkeys(finding.source for finding in findings):
        of_source = [finding for finding in findings if finding.source == source]
        title = f"Worst error on {source} activations, in units of the code's spacing (0.5: perfect)"
        show_matrix(console, title, of_source, lambda found: f"{max(f.worst_ulps for f in found):.3f}")
    timed = [finding for finding in findings if finding.time_us]
    if timed:
        show_matrix(
            console,
            f"Microseconds for {measured_tokens} tokens, and the share of the memory bandwidth",
            timed,
            lambda found: f"{found[0].time_us:.0f} {100 * (found[0].bandwidth_share or 0):.0f}%",
        )
    compared = [finding for finding in timed if finding.vllm_us]
    if compared:
        show_matrix(
            console,
            "Times faster than vLLM's op, or its two",
            compared,
            lambda found: f"{(found[0].vllm_us or 0) / (found[0].time_us or 1):.2f}",
        )
    wrong = sum(f.wrong_codes + f.wrong_scales + f.nonfinite_scales + f.residual_differ for f in findings)
    console.print(
        f"{sum(f.codes for f in findings):,} bytes of codes in {sum(f.calls for f in findings)} calls: {wrong} codes, "
        f"scales or residuals wrong; {sum(f.differ for f in findings)} differ from float64's, where fp32 and float64 "
        f"round y to different bf16 values",
        style="dim",
    )
    for f in findings:
        if f.failures:
            console.print(f"FAILED {f.producer} {f.scheme} {f.source}: {', '.join(f.failures)}", style="bold red")
