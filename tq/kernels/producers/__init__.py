"""One file per producer; importing this package registers them."""

from tq.kernels.producers.fatrelu_mul import fatrelu_mul
from tq.kernels.producers.gelu import gelu
from tq.kernels.producers.gelu_mul import gelu_mul
from tq.kernels.producers.quantize import quantize
from tq.kernels.producers.relu2 import relu2
from tq.kernels.producers.rms_norm import rms_norm
from tq.kernels.producers.silu import silu
from tq.kernels.producers.silu_mul import silu_mul
from tq.kernels.producers.swiglu_oai import swiglu_oai

__all__ = ["fatrelu_mul", "gelu", "gelu_mul", "quantize", "relu2", "rms_norm", "silu", "silu_mul", "swiglu_oai"]
