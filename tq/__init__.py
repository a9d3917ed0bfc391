"""tq: producers that write their result already quantized, as Triton kernels composed from parts written once."""

from tq import state
from tq.activation import QuantizedActivation
from tq.kernels.check import CheckReport, check
from tq.kernels.codes import Code
from tq.kernels.launch import use_reference
from tq.kernels.producer import PRODUCERS, Producer, Reference, register_producer
from tq.kernels.producers import quantize, rms_norm, silu_mul
from tq.kernels.schemes import SCHEMES, ScaleRule, Scheme, register_scheme

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
    "quantize",
    "register_producer",
    "register_scheme",
    "rms_norm",
    "silu_mul",
    "state",
    "use_reference",
]
