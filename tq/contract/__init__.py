"""Contract between tq's producers and a serving engine's linear layers. Importing it does not import vLLM."""

from tq.contract.api import (
    expose_input_quant_key,
    get_input_quant_key,
    get_input_quant_scheme,
    rms_norm_input_quant,
    silu_mul_input_quant,
)
from tq.contract.boundaries import Boundary, Report, observe, report
from tq.contract.plugin import register
from tq.contract.scales import InputQuantScales, get_input_quant_scales

__all__ = [
    "Boundary",
    "InputQuantScales",
    "Report",
    "expose_input_quant_key",
    "get_input_quant_key",
    "get_input_quant_scales",
    "get_input_quant_scheme",
    "observe",
    "register",
    "report",
    "rms_norm_input_quant",
    "silu_mul_input_quant",
]
