"""What every producer computes, in float64, rounded nowhere: written from the definitions, not from tq."""

from __future__ import annotations

import math

import numpy as np
import torch


def float64(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values, exactly."""
    return tensor.detach().cpu().to(torch.float64).numpy()


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def sigmoid(x):
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x))


def gelu_of(x, approximate="none"):
    """The erf form by erfc and the tanh form by a sigmoid: no difference of near numbers."""
    if approximate == "tanh":
        return x * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * x * _erfc(-x / math.sqrt(2.0))


def halves(x):
    return np.split(float64(x), 2, -1)


def silu(x):
    return float64(x) * sigmoid(float64(x))


def silu_mul(x):
    gate, up = halves(x)
    return gate / (1.0 + np.exp(-gate)) * up


def gelu(x, approximate="none"):
    return gelu_of(float64(x), approximate)


def gelu_mul(x, approximate="none"):
    gate, up = halves(x)
    return gelu_of(gate, approximate) * up


def fatrelu_mul(x, threshold=0.0):
    gate, up = halves(x)
    return np.where(gate > threshold, gate, 0.0) * up


def swiglu_oai(x, limit=7.0, alpha=1.702, interleaved=True):
    values = float64(x)
    gate, up = (values[..., ::2], values[..., 1::2]) if interleaved else halves(x)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1.0) * gate * sigmoid(alpha * gate)


def relu2(x):
    return np.maximum(float64(x), 0.0) ** 2


def summed(x, residual):
    return float64(x) if residual is None else float64(x) + float64(residual)


def rms_norm(x, weight, eps=1e-6, residual=None):
    z = summed(x, residual)
    return z / np.sqrt(np.mean(z * z, -1, keepdims=True) + eps) * float64(weight)


def gemma_rms_norm(x, weight, eps=1e-6, residual=None):
    z = summed(x, residual)
    return z / np.sqrt(np.mean(z * z, -1, keepdims=True) + eps) * (1.0 + float64(weight))


def layer_norm(x, weight, eps=1e-5, bias=None, residual=None):
    z = summed(x, residual)
    y = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + eps) * float64(weight)
    return y if bias is None else y + float64(bias)


def gated_rms_norm(x, gate, weight, eps=1e-6, group_size=None, norm_before_gate=True, activation="silu"):
    x, gate, size = float64(x), float64(gate), x.shape[-1]
    factor = sigmoid(gate) * (gate if activation == "silu" else 1.0)
    z = x if norm_before_gate else x * factor
    groups = z.reshape(*z.shape[:-1], -1, group_size or size)
    normed = (groups / np.sqrt((groups**2).mean(-1, keepdims=True) + eps)).reshape(z.shape)
    y = normed * np.tile(float64(weight), size // len(weight))
    return y * factor if norm_before_gate else y


def qk_norm_rope(x, q_weight, k_weight, positions, cos_sin_cache, eps=1e-6, q_heads=None, interleaved=False):
    """By complex numbers: a pair a + ib times cos + i sin."""
    size, rotary = len(q_weight), cos_sin_cache.shape[1]
    heads = float64(x).reshape(-1, x.shape[-1] // size, size)
    weights = np.stack([float64(q_weight if i < (q_heads or 0) or k_weight is None else k_weight)
                        for i in range(heads.shape[1])])  # fmt: skip
    y = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + eps) * weights
    table = float64(cos_sin_cache)[positions.flatten().cpu().numpy()][:, None, :]
    first = np.arange(rotary // 2) * (2 if interleaved else 1)
    second = first + (1 if interleaved else rotary // 2)
    turned = (y[..., first] + 1j * y[..., second]) * (table[..., : rotary // 2] + 1j * table[..., rotary // 2 :])
    y[..., first], y[..., second] = turned.real, turned.imag
    return y.reshape(x.shape)


FORMULAS = {
    "quantize": float64,
    "fatrelu_mul": fatrelu_mul,
    "gated_rms_norm": gated_rms_norm,
    "gelu": gelu,
    "gelu_mul": gelu_mul,
    "gemma_rms_norm": gemma_rms_norm,
    "layer_norm": layer_norm,
    "qk_norm_rope": qk_norm_rope,
    "relu2": relu2,
    "rms_norm": rms_norm,
    "silu": silu,
    "silu_mul": silu_mul,
    "swiglu_oai": swiglu_oai,
}
