"""Recurrent states of GDN and KDA: rounded in the cache, on the way from or to it, or inside a decode step."""

from tq.state.decode import gdn_decode, kda_decode
from tq.state.formats import FORMATS, GRANULARITIES
from tq.state.qdq import gather, qdq_, scatter_
from tq.state.recipe import Recipe, StateOptions, parse_quantizer_state, parse_recipe, read_recipe
from tq.state.report import StateReport, check

__all__ = [
    "FORMATS",
    "GRANULARITIES",
    "Recipe",
    "StateOptions",
    "StateReport",
    "check",
    "gather",
    "gdn_decode",
    "kda_decode",
    "parse_quantizer_state",
    "parse_recipe",
    "qdq_",
    "read_recipe",
    "scatter_",
]
