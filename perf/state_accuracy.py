"""What rounding a recurrent state costs after thousands of steps: the recurrence in float64, with and without rounding.

    python -m perf.state_accuracy [--out perf/results/state_accuracy.json] [--steps 4096] [--seeds 1,2,3]

No kernel runs here. Four heads of 128 x 128 for each gate and seed; a format rounds the state after every m-th step, as
a cache in that format does, and its outputs are compared with those of the state that is never rounded. Data are made,
not captured: tokens of 96 noisy clusters, projected, convolved causally over 4 tokens, SiLU; channels with log-normal
gains (0.6 of keys, 0.8 of values); q and k normalized, q an earlier key at a log-uniform lag of up to 2000; beta the
sigmoid of a normal number. GDN decays at mean rates of 0.1, 0.01, 0.001 and 0.0001 (one a head), KDA at rates
log-uniform in 5e-5 to 0.5 (one a key channel) times 4, 1, 1/4 and 1/16 (one a head), both with noise a token.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from perf.provenance import write

HEADS, SIZE, CLUSTERS, WIDTH, TAPS, LAG = 4, 128, 96, 256, 4, 2000
ENDS = (16, 64, 256, 1024, 4096)
# Key and value channels that share a scale; 0 is all of them.
SHARED = {"head": (0, 0), "value_channel": (0, 1), "key_channel": (1, 0), "group32": (1, 32)}


def window_of(end: int) -> range:
    """The tokens whose outputs count at `end`."""
    return range(end - min(32, end // 2), end)


def hadamard(size: int) -> torch.Tensor:
    """Orthonormal, of blocks of `size` along SIZE channels."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < size:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)]) / 2**0.5
    return torch.block_diag(*[block] * (SIZE // size))


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 number of float64 values within 448."""
    split = x * (2.0**49 + 1.0)  # leaves 4 significant bits
    normal = split - (split - x)
    subnormal = (x + 1.5 * 2.0**43) - 1.5 * 2.0**43  # multiples of 2^-9
    return torch.where(x.abs() < 2.0**-6, subnormal, normal)


@dataclass(frozen=True)
class Format:
    """code: "bf16", "fp16", "int8", "fp8" or None. every: steps between roundings. rotation: size of the Hadamard
    blocks that turn the values, 0 for none. ring: steps not yet rounded are kept as bf16 k and u."""

    code: str | None
    granularity: str = ""
    every: int = 1
    rotation: int = 0
    ring: bool = False

    @property
    def name(self) -> str:
        parts = [self.code or "exact", self.granularity, f"hadamard{self.rotation}" if self.rotation else ""]
        parts += [f"every {self.every}" if self.every > 1 else "", "bf16 ring" if self.ring else ""]
        return " ".join(part for part in parts if part)

    @cached_property
    def groups(self) -> tuple[int, int]:
        keys, values = (size or SIZE for size in SHARED[self.granularity])
        return values, keys

    def round_(self, state: torch.Tensor) -> None:
        """Rounds [HEADS, values, keys] in place."""
        if self.code in ("bf16", "fp16"):
            state.copy_(state.to(torch.bfloat16 if self.code == "bf16" else torch.float16))
            return
        values, keys = self.groups
        groups = state.view(HEADS, SIZE // values, values, SIZE // keys, keys)
        scale = groups.abs().amax((2, 4), keepdim=True).clamp_(min=1e-30) / (127.0 if self.code == "int8" else 448.0)
        groups /= scale
        if self.code == "int8":
            groups.round_()
        else:
            groups.copy_(round_e4m3(groups))
        groups *= scale


FORMATS = [
    Format(None),
    Format("bf16"),
    Format("fp16"),
    *(Format(code, granularity) for code in ("int8", "fp8") for granularity in SHARED),
    *(Format("int8", "value_channel", every) for every in (4, 8, 16)),
    Format("int8", "value_channel", 16, ring=True),
    Format("fp8", "value_channel", 16),
    Format("int8", "key_channel", 16),
    Format("int8", "group32", 16),
    Format("int8", "key_channel", 1, 128),
    Format("int8", "key_channel", 16, 128),
    Format("int8", "group32", 1, 32),
    Format("int8", "group32", 16, 32),
]


@dataclass(frozen=True)
class Stream:
    """q, k, v [T, HEADS, SIZE], decay [T, HEADS, 1 or SIZE], beta [T, HEADS]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


def make_stream(kind: str, seed: int, steps: int) -> Stream:
    """The data of this module's first lines."""
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((CLUSTERS, WIDTH))
    # Noise of half a cluster's spread: a token's key is near those of its cluster, and is none of them.
    tokens = centers[rng.integers(CLUSTERS, size=steps)] + 0.5 * rng.standard_normal((steps, WIDTH))

    def project(gain: float) -> np.ndarray:
        made = tokens @ (rng.standard_normal((WIDTH, HEADS * SIZE)) / WIDTH**0.5)
        taps = rng.standard_normal((TAPS, HEADS * SIZE)) / TAPS**0.5
        taps[0] += 1.0
        wide = np.concatenate([np.zeros((TAPS - 1, HEADS * SIZE)), made])
        convolved = sum(taps[i] * wide[TAPS - 1 - i : TAPS - 1 - i + steps] for i in range(TAPS))
        gains = np.exp(gain * rng.standard_normal(HEADS * SIZE))
        return (convolved / (1.0 + np.exp(-convolved)) * gains).reshape(steps, HEADS, SIZE)

    k, v = project(0.6), project(0.8)
    k /= np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    lag = np.exp(rng.uniform(0.0, np.log(LAG), size=steps)).astype(int)
    earlier = np.maximum(np.arange(steps) - lag, 0)
    q = k[earlier] + 0.1 / SIZE**0.5 * rng.standard_normal(k.shape)
    q /= np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6)
    beta = 1.0 / (1.0 + np.exp(-rng.standard_normal((steps, HEADS))))
    noise = np.log1p(np.exp(rng.standard_normal((steps, HEADS, 1))))
    if kind == "gdn":
        rate = np.array([0.1, 0.01, 0.001, 0.0001])[:, None]
    else:
        rate = np.exp(rng.uniform(np.log(5e-5), np.log(0.5), (HEADS, SIZE))) * np.array([4, 1, 0.25, 0.0625])[:, None]
    decay = np.exp(-rate * noise / noise.mean())
    return Stream(*map(torch.from_numpy, (q, k, v, decay, beta)))


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).double()


def simulate(stream: Stream, formats: list[Format], progress: Callable[[int], None]) -> dict[int, torch.Tensor]:
    """[formats, tokens of the window, HEADS, SIZE] outputs for each end; all formats step together."""
    count, steps = len(formats), stream.q.shape[0]
    rotations = torch.stack([hadamard(each.rotation or 1) for each in formats])
    rings = [i for i, each in enumerate(formats) if each.ring]
    state = torch.zeros(count, HEADS, SIZE, SIZE, dtype=torch.float64)
    ends = [end for end in ENDS if end <= steps]
    found: dict[int, torch.Tensor] = {end: torch.zeros(count, len(window_of(end)), HEADS, SIZE) for end in ends}
    found = {end: outputs.double() for end, outputs in found.items()}
    for t in range(steps):
        q, k, beta = stream.q[t], stream.k[t], stream.beta[t]
        v = torch.einsum("fvw,hw->fhv", rotations, stream.v[t])
        state *= stream.decay[t][None, :, None, :]
        reads = state @ torch.stack([k, q], -1)
        update = beta[None, :, None] * (v - reads[..., 0])
        out = reads[..., 1] + update * (k * q).sum(-1)[None, :, None]
        keys = k.expand(count, HEADS, SIZE)
        if rings:
            keys = keys.clone()
            keys[rings], update[rings] = bf16(keys[rings]), bf16(update[rings])
        flat = state.view(-1, SIZE, SIZE)
        flat.baddbmm_(update.reshape(-1, SIZE, 1), keys.reshape(-1, 1, SIZE))
        for i, each in enumerate(formats):
            if each.code is not None and (t + 1) % each.every == 0:
                each.round_(state[i])
        for end in ends:
            if t in window_of(end):
                found[end][:, t - window_of(end).start] = torch.einsum("fvw,fhv->fhw", rotations, out)
        progress(t)
    return found


def errors(found: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """|o - o_exact| / |o_exact| over a window, [formats, HEADS] for each end."""
    made = {}
    for end, outputs in found.items():
        difference = (outputs - outputs[:1]).square().sum((1, 3)).sqrt()
        made[end] = difference / outputs[:1].square().sum((1, 3)).sqrt()
    return made


def main(
    out: Path = Path("perf/results/state_accuracy.json"), steps: int = ENDS[-1], seeds: str = "1,2,3", threads: int = 1
) -> None:
    """Simulates, writes and shows: percent, the mean over heads and seeds."""
    torch.set_num_threads(threads)
    console, rows = Console(), []
    numbers = list(map(int, seeds.split(",")))
    for kind in ("gdn", "kda"):
        made = []
        for seed in numbers:
            label = f"{kind}, seed {seed}"
            tick = lambda t, label=label: t % 512 == 511 and console.print(label, t + 1)  # noqa: E731
            made.append(errors(simulate(make_stream(kind, seed, steps), FORMATS, tick)))
        table = Table(f"{kind}: output error, %", *(f"t = {end}" for end in made[0]), "seeds", "worst head")
        for i, each in enumerate(FORMATS[1:], 1):
            by_seed = {end: torch.stack([found[end][i] for found in made]) * 100 for end in made[0]}
            last = by_seed[max(by_seed)]
            row: dict[str, Any] = {"kind": kind, "format": each.name, "code": each.code}
            row |= {"granularity": each.granularity, "every": each.every, "rotation": each.rotation, "ring": each.ring}
            row["error_percent"] = {str(end): round(float(value.mean()), 4) for end, value in by_seed.items()}
            row["by_seed"] = [round(float(value), 4) for value in last.mean(1)]
            row["by_head"] = [round(float(value), 4) for value in last.mean(0)]
            rows.append(row)
            shown = [f"{value:.3g}" for value in row["error_percent"].values()]
            table.add_row(each.name, *shown, " ".join(f"{x:.3g}" for x in row["by_seed"]), f"{max(row['by_head']):.3g}")
        console.print(table)
    document = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "command": f"python -m perf.state_accuracy --steps {steps} --seeds {seeds}",
        "versions": {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "method": "float64; |o - o_exact| / |o_exact| over the last 32 tokens (8 at t = 16), mean of 4 heads and of "
        f"seeds {seeds}; by_seed and by_head at the last t; data are made, not captured",
    }
    write(out, document, rows)


if __name__ == "__main__":
    typer.run(main)
