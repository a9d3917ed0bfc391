"""One file per producer, and what several share; importing this package registers them."""

from tq.kernels.producers.fatrelu_mul import fatrelu_mul
from tq.kernels.producers.gated_rms_norm import gated_rms_norm
from tq.kernels.producers.gelu import gelu
from tq.kernels.producers.gelu_mul import gelu_mul
from tq.kernels.producers.gemma_rms_norm import gemma_rms_norm
from tq.kernels.producers.layer_norm import layer_norm
from tq.kernels.producers.qk_norm_rope import qk_norm_rope
from tq.kernels.producers.quantize import quantize
from tq.kernels.producers.relu2 import relu2
from tq.kernels.producers.rms_norm import rms_norm
from tq.kernels.producers.silu import silu
from tq.kernels.producers.silu_mul import silu_mul
from tq.kernels.producers.swiglu_oai import swiglu_oai

__all__ = [
    "fatrelu_mul",
    "gated_rms_norm",
    "gelu",
    "gelu_mul",
    "gemma_rms_norm",
    "layer_norm",
    "qk_norm_rope",
    "quantize",
    "relu2",
    "rms_norm",
    "silu",
    "silu_mul",
    "swiglu_oai",
]
