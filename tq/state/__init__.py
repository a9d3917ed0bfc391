"""Recurrent states of GDN and KDA: rounded in the cache, on the way from or to it, or inside a decode step;
or kept as codes and scales."""

from tq.state.commit import commit_, flush_
from tq.state.decode import gdn_decode, kda_decode
from tq.state.decode_packed import gdn_decode_packed, kda_decode_packed
from tq.state.formats import FORMATS, GRANULARITIES
from tq.state.packed import PackedState, copy_, pack_, unpack
from tq.state.qdq import gather, qdq_, scatter_
from tq.state.recipe import Recipe, StateOptions, parse_quantizer_state, parse_recipe, read_recipe
from tq.state.report import StateReport, check
from tq.state.ring import Ring

__all__ = [
    "FORMATS",
    "GRANULARITIES",
    "PackedState",
    "Recipe",
    "Ring",
    "StateOptions",
    "StateReport",
    "check",
    "commit_",
    "copy_",
    "flush_",
    "gather",
    "gdn_decode",
    "gdn_decode_packed",
    "kda_decode",
    "kda_decode_packed",
    "pack_",
    "parse_quantizer_state",
    "parse_recipe",
    "qdq_",
    "read_recipe",
    "scatter_",
    "unpack",
]
