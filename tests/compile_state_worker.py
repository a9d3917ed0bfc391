"""As compile_worker.py, for the kernels of recurrent states."""

from __future__ import annotations

from typing import Any

import torch
from compile_worker import Compiling, main, targets_of

import tq.state
from tq.state import bind, commit, decode, decode_packed, packed, qdq, report

SLOTS, BATCH, HEADS, KEY_HEADS, SIZE = 8, 4, 4, 2, 128


def call_gdn(state: Any, slots: torch.Tensor, options: dict[str, Any]) -> None:
    rows = BATCH * (options.get("verify") or 1)
    qkv = torch.zeros(rows, (2 * KEY_HEADS + HEADS) * SIZE, dtype=torch.bfloat16)
    a, vector = torch.zeros(rows, HEADS, dtype=torch.bfloat16), torch.zeros(HEADS)
    out = torch.zeros(rows, 1, HEADS, SIZE, dtype=torch.bfloat16)
    step = tq.state.gdn_decode if isinstance(state, torch.Tensor) else tq.state.gdn_decode_packed
    step(qkv, a, a, vector, vector, SIZE**-0.5, state, out, slots, True, **options)


def call_kda(state: Any, slots: torch.Tensor, options: dict[str, Any]) -> None:
    rows = BATCH * (options.get("verify") or 1)
    qkv = torch.zeros(rows, 3 * HEADS * SIZE, dtype=torch.bfloat16)
    gate, beta = torch.zeros(1, rows, HEADS, SIZE, dtype=torch.bfloat16), torch.zeros(1, rows, HEADS)
    vectors = torch.zeros(HEADS), torch.zeros(HEADS * SIZE)
    step = tq.state.kda_decode if isinstance(state, torch.Tensor) else tq.state.kda_decode_packed
    step(qkv, gate, beta, *vectors, None, state, slots, **options)


def packed_state(options: dict[str, Any], gate: str = "head") -> tq.state.PackedState:
    """The state that `options` name, with a ring of their length, if any; what is left of them is a call's."""
    length, key_heads = options.pop("ring", 0), KEY_HEADS if gate == "head" else HEADS
    sizes = SLOTS, HEADS, SIZE, SIZE
    made = {"gate": gate, "key_heads": key_heads, "drafts": options.get("verify") or 1}
    ring = tq.state.Ring.zeros(*sizes, length=length, **made) if length else None
    named = {name: options.pop(name) for name in ("code", "granularity")}
    named |= {name: options.pop(name) for name in ("residual", "hadamard") if name in options}
    return tq.state.PackedState.zeros(*sizes, **named, ring=ring)


def call_pack(state: torch.Tensor, slots: torch.Tensor, options: dict[str, Any]) -> None:
    tq.state.pack_(packed_state(options), slots, state[:BATCH])


def call_commit(state: torch.Tensor, slots: torch.Tensor, options: dict[str, Any]) -> None:
    tq.state.commit_(packed_state(options), slots, slots)


# Of each kernel: the module and name it is launched by, the kernel, and a call.
KERNELS = {
    "qdq": (qdq, "move_kernel", qdq.move_kernel, lambda s, i, o: tq.state.qdq_(s, i, **o)),
    "gather": (qdq, "move_kernel", qdq.move_kernel, lambda s, i, o: tq.state.gather(s, i, **o)),
    "check": (report, "check_kernel", report.check_kernel, lambda s, i, o: tq.state.check(s, i, quantized=s, **o)),
    "gdn_decode": (decode, "decode_kernel", decode.decode_kernel, call_gdn),
    "kda_decode": (decode, "decode_kernel", decode.decode_kernel, call_kda),
    "pack": (packed, "pack_kernel", packed.pack_kernel, call_pack),
    "unpack": (packed, "unpack_kernel", packed.unpack_kernel, lambda s, i, o: tq.state.unpack(packed_state(o), i)),
    "copy": (packed, "move_kernel", qdq.move_kernel, lambda s, i, o: tq.state.copy_(packed_state(o), i, i)),
    "gdn_decode_packed": (
        decode_packed,
        "decode_packed_kernel",
        decode_packed.decode_packed_kernel,
        lambda s, i, o: call_gdn(packed_state(o), i, o),
    ),
    "kda_decode_packed": (
        decode_packed,
        "decode_packed_kernel",
        decode_packed.decode_packed_kernel,
        lambda s, i, o: call_kda(packed_state(o, "key_channel"), i, o),
    ),
    "commit": (commit, "commit_kernel", commit.commit_kernel, call_commit),
}


TUNINGS = {name: getattr(bind, name) for name in ("packed_tuning", "wide_tuning", "ring_tuning")}


def compile_one(target: str, kernel: str, dtype: str = "float32", joined: str = "", **options: Any) -> Any:
    """The compiled kernel of a call on heads of 128 x 128. joined: any word for the programs of a large batch."""
    gpu, facts = targets_of(target)
    bind.target_of, bind.check_device = lambda device: facts, lambda op, device: None
    bind.device_format.cache_clear()
    for name, each in TUNINGS.items():
        setattr(bind, name, each._replace(programs=1) if joined else each)
    module, name, found, call = KERNELS[kernel]
    standing = Compiling(found, gpu)
    setattr(module, name, standing)
    state = torch.zeros(SLOTS, HEADS, SIZE, SIZE, dtype=getattr(torch, dtype))
    call(state, torch.ones(BATCH, dtype=torch.int32), options)
    return standing.compiled


if __name__ == "__main__":
    main(compile_one)
