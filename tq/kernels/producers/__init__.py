"""One file per producer; importing this package registers them."""

from tq.kernels.producers.quantize import quantize
from tq.kernels.producers.rms_norm import rms_norm
from tq.kernels.producers.silu_mul import silu_mul

__all__ = ["quantize", "rms_norm", "silu_mul"]
