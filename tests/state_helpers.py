"""For the tests of recurrent states: rounding and a decode step by numpy, and caches that show what was touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comparing import bits
from formulas import float64
from helpers import DEVICE, FORMATS

LARGEST = {"int8": 127, "int8_narrow": 127, "fp8_e4m3": 448}
# Keys and values that share a scale; None is all of them.
SHARED = {
    "head": (None, None),
    "value_channel": (None, 1),
    "key_channel": (1, None),
    "tile": (None, 64),
    "group16": (1, 16),
    "group32": (1, 32),
    "group64": (1, 64),
}
TINY = np.float32(2.0**-24)
HEADS, VALUES, KEYS = 2, 80, 24  # no powers of two; more values than a tile has
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = {"value_first": (VALUES, KEYS), "key_first": (KEYS, VALUES)}
# Every granularity in both layouts, codes and dtypes in turn so that all pairs of them come.
FORMS = [
    (granularity, layout, list(LARGEST)[(i + j) % 3], DTYPES[(i + 2 * j) % 3])
    for i, granularity in enumerate(SHARED)
    for j, layout in enumerate(LAYOUTS)
]


def round_group(x: np.ndarray, code: str) -> np.ndarray:
    """fp32 elements of one scale, quantized and dequantized as ModelOpt writes it down, in fp32 numpy."""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max()
        if not np.isfinite(amax):
            return np.full_like(x, np.nan)
        if amax <= TINY:
            return np.copysign(np.float32(0), x)
        if code == "fp8_e4m3":
            e4m3, one = FORMATS["e4m3"], np.float32(1)
            scale = one / amax * np.float32(LARGEST[code])  # torch's number / tensor
            return e4m3.decode(e4m3.encode(x * scale)).astype(np.float32) * (one / scale)
        scale = np.float32(LARGEST[code]) / amax
        scaled = x * scale
        low = -127 if code == "int8_narrow" else -128
        return np.copysign(np.clip(np.rint(scaled), low, 127) / scale, x).astype(np.float32)


def rounded_head(x: np.ndarray, code: str, granularity: str, layout: str) -> np.ndarray:
    """A [rows, columns] head, group by group."""
    shared = SHARED[granularity] if layout == "key_first" else SHARED[granularity][::-1]
    rows, cols = (size or whole for size, whole in zip(shared, x.shape, strict=True))
    out = np.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], cols):
            out[i : i + rows, j : j + cols] = round_group(x[i : i + rows, j : j + cols], code)
    return out


def rounded(state: torch.Tensor, code: str, granularity: str = "head", layout: str = "value_first") -> torch.Tensor:
    """[..., rows, columns], rounded and in the dtype it came in."""
    heads = state.detach().cpu().float().numpy().reshape(-1, *state.shape[-2:])
    made = np.stack([rounded_head(head, code, granularity, layout) for head in heads])
    return torch.from_numpy(made).reshape(state.shape).to(state.dtype).to(state.device)


def scales_of(state: Any) -> np.ndarray:
    """Of a packed state, the scale of every element, [slots, heads, values, keys] in float64."""
    keys, values = SHARED[state.granularity]
    by_value = np.repeat(float64(state.scales), values or state.codes.shape[2], 2)
    return np.repeat(by_value, keys or state.codes.shape[3], 3)[:, :, : state.codes.shape[2], : state.codes.shape[3]]


def assert_same_states(got: torch.Tensor, want: torch.Tensor, label: Any = "") -> None:
    """Bit for bit, but that a NaN is like any other."""
    assert got.shape == want.shape and got.dtype == want.dtype, f"{label}: {got.dtype} {tuple(got.shape)}"
    wrong = ((bits(got) != bits(want)) & ~(got.isnan() & want.isnan())).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        values = f"{got[first]!r} in place of {want[first]!r}"
        raise AssertionError(f"{label}: {len(wrong)} of {got.numel()} differ, first at {first}: {values}")


def cache(slots: int, heads: int, rows: int, cols: int, dtype: torch.dtype = torch.float32, pad: int = 0):
    """(cache, memory): slots of unit normal states with `pad` NaN after each and a slot of NaN before and behind."""
    size = heads * rows * cols
    memory = torch.full((slots + 2, size + pad), torch.nan, dtype=dtype, device=DEVICE)
    view = memory[1:-1, :size].unflatten(1, (heads, rows, cols))
    view.copy_(torch.randn(view.shape).to(dtype))
    return view, memory


def indices(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def step(state, q, k, v, log_decay, beta, scale, normalize=True) -> tuple[np.ndarray, np.ndarray]:
    """(new state [V, K], output [V]) of one head in float64; log_decay: a number, or one for each key channel."""
    if normalize:
        q, k = (x / np.sqrt((x * x).sum() + 1e-6) for x in (q, k))
    state = state * np.exp(log_decay)
    state = state + np.outer(beta * (v - state @ k), k)
    return state, scale * (state @ q)


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def softplus(x: Any) -> Any:
    return np.log1p(np.exp(x))


def numbers(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [float64(tensor) for tensor in tensors]
