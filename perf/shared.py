"""Whether a second output pays: a norm that writes y beside its codes, for readers of both, against vLLM's norm and
then its quantizer; and against the norm that writes codes alone.

    python -m perf.shared [--out FILE] [--schemes fp8_token,fp8_group128] [--sizes 2048,...] [--tokens 1,...]

With a residual, written in place, as in a decoder layer. In bytes of an element: norm and quantizer read x, the
residual and y, and write y, the residual and codes, 11; with both outputs 9; with codes alone 7.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer

import tq
from perf.provenance import gpu_folder, provenance, write
from tq.bench.cases import static_inputs
from tq.bench.peer import Job, job_of
from tq.bench.peers import QUANTIZERS, UNFUSED, run_both, tq_peer, vllm_library
from tq.bench.timing import copies_of, device_time_us
from tq.kernels.plan import Prepared, prepare

SIZES = {2048: "Qwen3-Next-80B", 4096: "Qwen3.5, Nemotron-H", 7168: "DeepSeek-V3"}
BYTES = 11  # of an element, see above


def prepared_call(rows: int, hidden_size: int, scheme: str, both: bool) -> Prepared:
    """A norm of fresh values, rounded where vLLM's CUDA op rounds."""
    x, residual = torch.randn(2, rows, hidden_size, device="cuda").bfloat16()
    weight = (1 + 0.1 * torch.randn(hidden_size, device="cuda")).bfloat16()
    options: dict[str, Any] = {"residual": residual, "residual_out": residual, "rounding": "after_weight"}
    options |= {"round_residual": True, "return_unquantized": both, **static_inputs(scheme, "cuda")}
    return prepare(tq.PRODUCERS["rms_norm"], (x, weight, 1e-6), scheme, options)


def pair(prepared: Prepared) -> tuple[Any, Job, torch.Tensor]:
    """vLLM's norm and its quantizer: (what runs both, what they write, y)."""
    job, scheme = job_of(prepared), prepared.plan.scheme
    y = job.x.clone()
    ops = UNFUSED["_C.(fused_add_)rms_norm"], QUANTIZERS[scheme.quantizer]
    return partial(run_both, vllm_library(), job, y, *ops), job, y


def measure(rows: int, hidden_size: int, scheme: str) -> dict[str, Any]:
    """Microseconds, and elements of y and of codes that differ from vLLM's."""
    count = copies_of(BYTES * rows * hidden_size)
    row: dict[str, Any] = {"scheme": scheme, "rows": rows, "hidden_size": hidden_size}
    both = [prepared_call(rows, hidden_size, scheme, True) for _ in range(count)]
    theirs = pair(both[0])  # copies x and the residual before the first call writes it
    tq_peer(both[0]).call()
    theirs[0]()
    row["y_differ"] = int((both[0].unquantized != theirs[2]).sum())
    row["codes_differ"] = int((both[0].codes.view(torch.uint8) != theirs[1].out.view(torch.uint8)).sum())
    sides = {
        "vllm_pair": [pair(prepared)[0] for prepared in both],
        "tq_both": [tq_peer(prepared).call for prepared in both],
        "tq_codes": [tq_peer(prepared_call(rows, hidden_size, scheme, False)).call for _ in range(count)],
    }
    for name, calls in sides.items():
        time_us, spread = device_time_us(calls)
        row[name], row[f"{name}_spread"] = round(time_us, 3), round(spread, 3)
    return row


def main(
    out: Path | None = None,
    schemes: str = "fp8_tensor,fp8_token,fp8_group128",
    sizes: str = ",".join(map(str, SIZES)),
    tokens: str = "1,16,64,256,1024,8192",
) -> None:
    """Writes a row for each scheme, size and number of tokens."""
    document = provenance("perf.shared") | {
        "method": "CUDA-graph replay, inputs rotated over 200 MB, median of 12 replays, bf16, microseconds"
    }
    rows: list[dict[str, Any]] = []
    for scheme in schemes.split(","):
        for hidden_size in map(int, sizes.split(",")):
            for count in map(int, tokens.split(",")):
                rows.append(measure(count, hidden_size, scheme))
                row = rows[-1]
                times = " ".join(f"{name} {row[name]}" for name in ("vllm_pair", "tq_both", "tq_codes"))
                print(scheme, hidden_size, count, times, f"differ {row['y_differ']} {row['codes_differ']}", flush=True)
                write(out or gpu_folder() / "shared.json", document, rows)


if __name__ == "__main__":
    typer.run(main)
