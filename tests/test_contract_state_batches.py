"""Which states are rounded, for batches as vLLM's own builder of metadata describes them: the state of every request
that has one, in the slot that the next call reads, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from comparing import assert_same_bits
from helpers import DEVICE
from state_helpers import cache, rounded

from tq.contract import packed_layers, state
from tq.state import StateOptions

gdn_attn = pytest.importorskip("vllm.v1.attention.backends.gdn_attn")
pytestmark = pytest.mark.vllm
SLOTS = 40
FRESH = -1  # drafts of a request that is not decoding yet


def builder(drafts: int, graphs: bool):
    """vLLM's, for layers with such drafts."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import MambaSpec

    mode = CUDAGraphMode.FULL if graphs else CUDAGraphMode.NONE
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=64),
        speculative_config=speculative,
        additional_config={},
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        use_v2_model_runner=True,
    )
    spec = MambaSpec(shapes=((1,), (1,)), dtypes=(torch.float32,) * 2, block_size=2048, num_speculative_blocks=drafts)
    return gdn_attn.GDNAttentionMetadataBuilder(spec, ["layer"], config, torch.device(DEVICE))


def numbers(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def metadata(rows, drafts=0, padding=0, graphs=False):
    """Of rows (tokens before, tokens now, slots, drafts, accepted), then empty rows of the null slot."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    rows = [*rows, *[(0, 0, [0] * (drafts + 1), FRESH, 1)] * padding]
    before, now, slots, guessed, accepted = map(list, zip(*rows, strict=True))
    bounds = numbers([0, *now]).cumsum(0, dtype=torch.int32)
    lengths = numbers(before) + numbers(now)
    tokens = len(rows) if padding else int(bounds[-1])  # graphs are captured for a number of tokens
    common = CommonAttentionMetadata(
        query_start_loc=bounds.to(DEVICE),
        query_start_loc_cpu=bounds,
        seq_lens=lengths.to(DEVICE),
        num_reqs=len(rows),
        num_actual_tokens=tokens,
        max_query_len=max(now),
        max_seq_len=int(lengths.max()),
        block_table_tensor=numbers([[*row, 9, 9] for row in slots]).to(DEVICE),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
        seq_lens_cpu_upper_bound=lengths,
        is_prefilling=numbers([guess == FRESH and count > 0 for guess, count in zip(guessed, now, strict=True)]).bool(),
    )
    return builder(drafts, graphs).build(0, common, numbers(accepted).to(DEVICE), numbers(guessed) if drafts else None)


def plain(before, now, slot):
    return before, now, [slot], FRESH if before == 0 or now > 1 else 0, 1


BATCHES = {
    "decodes": ([plain(9, 1, 3), plain(70, 1, 12)], {}),
    "decodes in a captured graph": ([plain(9, 1, 3), plain(70, 1, 12), plain(2, 1, 8)], {"padding": 1, "graphs": True}),
    "a first chunk of one token": ([plain(9, 1, 3), plain(0, 1, 4)], {}),
    "a later chunk of one token": ([plain(9, 1, 3), (64, 1, [4], FRESH, 1)], {}),
    "first chunks": ([plain(0, 40, 3), plain(0, 7, 12)], {}),
    "later chunks": ([plain(64, 40, 3), plain(128, 7, 12)], {}),
    "all kinds": ([plain(9, 1, 3), plain(5, 1, 12), plain(64, 20, 7), plain(0, 7, 8), plain(64, 3, 20)], {}),
    "drafts": ([(9, 4, [3, 4, 5, 6], 3, 4), (20, 4, [8, 9, 10, 11], 3, 1)], {"drafts": 3}),
    "fewer drafts than there could be": ([(9, 2, [3, 4, 5, 6], 1, 3), (20, 1, [8, 9, 10, 11], 0, 2)], {"drafts": 3}),
    "drafts and chunks": (
        [(9, 4, [3, 4, 5, 6], 3, 2), (64, 20, [8, 9, 10, 11], FRESH, 1), (0, 7, [12, 13, 14, 15], FRESH, 1)],
        {"drafts": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES)
def test_the_states_that_a_call_reads(batch):
    rows, changes = BATCHES[batch]
    layer = SimpleNamespace(prefix="layer", kv_cache=(None, cache(SLOTS, 1, 8, 8)[0]))
    layer.tq_state_options = StateOptions("int8_narrow", "head")
    read = [slots[accepted - 1] for before, _, slots, _, accepted in rows if before > 0]
    want = layer.kv_cache[1].clone()
    for slot in read:
        want[slot] = rounded(want[slot], "int8_narrow")
    state.round_states(layer, {"layer": metadata(rows, **changes)})
    assert_same_bits(layer.kv_cache[1], want)


def test_metadata_of_a_packed_layer(monkeypatch):
    """It finds its own among those of other layers, and nothing while vLLM profiles."""
    for found, want in (({"a": 1, "b": 2}, 2), (None, None), ([{"b": 2}], None), ({"a": 1}, None)):
        monkeypatch.setattr(packed_layers, "current_metadata", lambda found=found: found)
        assert packed_layers.metadata_of(SimpleNamespace(prefix="b")) == want
