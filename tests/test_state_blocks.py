"""What only states of several blocks show, and products in integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from comparing import assert_same_bits
from formulas import float64
from helpers import DEVICE
from state_helpers import indices
from test_state_decode import KINDS, LIVE, SLOTS, Case, close
from test_state_decode_packed import held, packed_of, redraw, run

import tq.state
from tq.state import bind
from tq.state.digits import digits_of, products, sums


def shaped(monkeypatch, programs: int) -> None:
    """Blocks of 16 rows, joined while there are so many programs."""
    for name in ("packed_tuning", "wide_tuning", "ring_tuning"):
        monkeypatch.setattr(bind, name, bind.Tuning(part=512, programs=programs, looped=name == "packed_tuning"))


@pytest.mark.parametrize(("kind", "bound"), KINDS)
@pytest.mark.parametrize(
    ("code", "granularity", "ring"),
    [
        ("int8", "value_channel", {}),
        ("fp8_e4m3", "group16", {}),
        ("int8", "value_channel", {"length": 2, "dtype": torch.float32}),
        ("fp8_e4m3", "value_channel", {"length": 2}),
    ],
)
def test_blocks_of_a_program_are_those_of_programs(monkeypatch, kind, bound, code, granularity, ring):
    """Three blocks by one program, the last of four missing, bit for bit as by three; outputs are the recurrence's."""
    case = Case(kind, bound, torch.float32)
    alone, together = (packed_of(case, code, granularity, **ring) for _ in range(2))
    for token in range(3):
        old = held(together)
        shaped(monkeypatch, 10**9)
        want = run(case, alone)
        shaped(monkeypatch, 1)
        out = run(case, together)
        assert_same_bits(out, want)
        for request, slot in enumerate(SLOTS):
            for head in range(4) if request in LIVE and token == 2 else ():
                close(out[request, head], case.recurrence(request, head, old[slot, head])[1])
        redraw(case)
    for a, b in zip(alone.tensors[:2], together.tensors[:2], strict=True):
        assert_same_bits(a.view(torch.uint8), b.view(torch.uint8))
    assert_same_bits(held_bits(alone), held_bits(together))


def held_bits(state: tq.state.PackedState) -> torch.Tensor:
    return tq.state.unpack(state, indices([2, 3, 5]))


def test_a_batch_has_as_many_programs_as_asked_for():
    cut = bind.cut_of(32, 128, 128, bind.GRANULARITIES["value_channel"], "value_first", 2048)
    odd = bind.cut_of(4, 80, 32, bind.GRANULARITIES["value_channel"], "value_first", 512)
    wide = bind.cut_of(4, 256, 256, bind.GRANULARITIES["value_channel"], "value_first", 4096)
    larger, looped = bind.Tuning(programs=1024), bind.Tuning(programs=1024, looped=True)

    def shapes(cut: bind.Cut, shape: bind.Tuning, *batches: int, **options: int) -> list[tuple[int, ...]]:
        found = [bind.joined(cut, batch, shape, **options) for batch in batches]
        return [tuple(getattr(each, name).value for name in ("PARTS", "BLOCKS", "BLOCK_ROWS")) for each in found]

    assert shapes(cut, larger, 1, 4, 8, 16, 32, 512) == [(8, 1, 16)] * 2 + [(4, 1, 32), (2, 1, 64)] + [(1, 1, 128)] * 2
    assert shapes(cut, larger, 8, 32, most=bind.FOLDED) == [(4, 1, 32), (2, 1, 64)]
    assert shapes(cut, looped, 1, 4, 8, 16, 32, 512) == [(8, 1, 16)] * 2 + [(4, 2, 16), (2, 4, 16)] + [(1, 8, 16)] * 2
    assert shapes(odd, larger._replace(programs=1), 6) == [(1, 1, 128)]
    assert shapes(odd, looped._replace(programs=1), 6) == [(1, 8, 16)]
    assert shapes(wide, larger, 512) == [(4, 1, 64)]


@triton.jit
def length(vector):
    return tl.sqrt(tl.sum(vector * vector, 0) + 1e-6)


@triton.jit
def products_kernel(codes, k, q, out, ROWS: tl.constexpr, KEYS: tl.constexpr, PIECE: tl.constexpr):
    key, row = tl.arange(0, KEYS), tl.arange(0, ROWS)
    of_k, of_q = tl.load(k + key), tl.load(q + key)
    digits, weights = digits_of(of_k, of_q, length(of_k), length(of_q), PIECE)
    tile = tl.load(codes + row[:, None] * KEYS + key[None, :])
    of_k, of_q = sums(products(tile, digits, weights, PIECE))
    tl.store(out + row, of_k)
    tl.store(out + ROWS + row, of_q)


def by_digits(codes: torch.Tensor, k: torch.Tensor, q: torch.Tensor, piece: int) -> np.ndarray:
    out = torch.empty(2, codes.shape[0], device=DEVICE)
    products_kernel[(1,)](codes, k, q, out, *codes.shape, piece)
    return float64(out)


@pytest.mark.parametrize("piece", [32, 64, 128])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_products_by_digits(spread, piece):
    """k and q of magnitudes 2^+-spread, keys in any order: no further from float64 than fp32 sums of fp32 products may
    be."""
    codes = torch.randint(-128, 128, (32, 128), dtype=torch.int8, device=DEVICE)
    k, q = (torch.randn(128, device=DEVICE) * torch.exp2(spread * torch.randn(128, device=DEVICE)) for _ in range(2))
    exact = float64(codes.float()) @ np.stack([float64(k), float64(q)]).T
    largest = np.abs(np.stack([float64(k), float64(q)])).max(1)
    found = by_digits(codes, k, q, piece)
    # Digits: 128 codes of 128, half a unit of the last place each. fp32: of each of four sums, which are below 2^21.
    bound = 128 * 128 * largest * (2.0**-32 + 2.0**-23)
    assert (np.abs(found.T - exact) <= bound).all()
    assert (np.abs(found.T - exact) <= 1e-5 * np.abs(exact) + 2.0**-20 * largest).all()


def test_products_by_digits_of_what_is_no_number():
    codes = torch.ones(16, 32, dtype=torch.int8, device=DEVICE)
    k, q = torch.ones(32, device=DEVICE), torch.zeros(32, device=DEVICE)
    for bad in (torch.nan, torch.inf):
        k[5] = bad
        found = by_digits(codes, k, q, 32)
        assert np.isnan(found[0]).all() and (found[1] == 0).all()
