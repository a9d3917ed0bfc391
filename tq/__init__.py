"""tq: producers that write their result already quantized, as Triton kernels composed from parts written once."""

from tq import state
from tq.activation import QuantizedActivation
from tq.kernels.check import CheckReport, check
from tq.kernels.codes import Code
from tq.kernels.launch import use_reference
from tq.kernels.producer import PRODUCERS, Producer, Reference, register_producer
from tq.kernels.producers import (
    fatrelu_mul,
    gated_rms_norm,
    gelu,
    gelu_mul,
    gemma_rms_norm,
    layer_norm,
    qk_norm_rope,
    quantize,
    relu2,
    rms_norm,
    silu,
    silu_mul,
    swiglu_oai,
)
from tq.kernels.rules import ScaleRule
from tq.kernels.schemes import SCHEMES, Scheme, register_scheme

__version__ = "0.1.0"

__all__ = [
    "PRODUCERS",
    "SCHEMES",
    "CheckReport",
    "Code",
    "Producer",
    "QuantizedActivation",
    "Reference",
    "ScaleRule",
    "Scheme",
    "check",
    "fatrelu_mul",
    "gated_rms_norm",
    "gelu",
    "gelu_mul",
    "gemma_rms_norm",
    "layer_norm",
    "qk_norm_rope",
    "quantize",
    "register_producer",
    "register_scheme",
    "relu2",
    "rms_norm",
    "silu",
    "silu_mul",
    "state",
    "swiglu_oai",
    "use_reference",
]
