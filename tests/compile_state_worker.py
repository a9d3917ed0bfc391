"""As compile_worker.py, for the kernels of recurrent states."""

from __future__ import annotations

from typing import Any

import torch
from compile_worker import Compiling, main, targets_of

import tq.state
from tq.state import bind, decode, qdq, report

SLOTS, BATCH, HEADS, KEY_HEADS, SIZE = 8, 4, 4, 2, 128


def call_gdn(state: torch.Tensor, slots: torch.Tensor, options: dict[str, Any]) -> None:
    qkv = torch.zeros(BATCH, (2 * KEY_HEADS + HEADS) * SIZE, dtype=torch.bfloat16)
    a, vector = torch.zeros(BATCH, HEADS, dtype=torch.bfloat16), torch.zeros(HEADS)
    out = torch.zeros(BATCH, 1, HEADS, SIZE, dtype=torch.bfloat16)
    tq.state.gdn_decode(qkv, a, a, vector, vector, SIZE**-0.5, state, out, slots, True, **options)


def call_kda(state: torch.Tensor, slots: torch.Tensor, options: dict[str, Any]) -> None:
    qkv = torch.zeros(BATCH, 3 * HEADS * SIZE, dtype=torch.bfloat16)
    gate, beta = torch.zeros(1, BATCH, HEADS, SIZE, dtype=torch.bfloat16), torch.zeros(1, BATCH, HEADS)
    vectors = torch.zeros(HEADS), torch.zeros(HEADS * SIZE)
    tq.state.kda_decode(qkv, gate, beta, *vectors, None, state, slots, **options)


# Of each kernel: the module and name it is launched by, the kernel, and a call.
KERNELS = {
    "qdq": (qdq, "move_kernel", qdq.move_kernel, lambda s, i, o: tq.state.qdq_(s, i, **o)),
    "gather": (qdq, "move_kernel", qdq.move_kernel, lambda s, i, o: tq.state.gather(s, i, **o)),
    "check": (report, "check_kernel", report.check_kernel, lambda s, i, o: tq.state.check(s, i, quantized=s, **o)),
    "gdn_decode": (decode, "decode_kernel", decode.decode_kernel, call_gdn),
    "kda_decode": (decode, "decode_kernel", decode.decode_kernel, call_kda),
}


def compile_one(target: str, kernel: str, dtype: str = "float32", **options: Any) -> Any:
    """The compiled kernel of a call on heads of 128 x 128."""
    gpu, facts = targets_of(target)
    bind.target_of, bind.check_device = lambda device: facts, lambda op, device: None
    bind.device_format.cache_clear()
    module, name, found, call = KERNELS[kernel]
    standing = Compiling(found, gpu)
    setattr(module, name, standing)
    state = torch.zeros(SLOTS, HEADS, SIZE, SIZE, dtype=getattr(torch, dtype))
    call(state, torch.ones(BATCH, dtype=torch.int32), options)
    return standing.compiled


if __name__ == "__main__":
    main(compile_one)
