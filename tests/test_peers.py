"""What tq is measured against, as far as it can be told without a GPU."""

from __future__ import annotations

import pytest
import torch

import tq
from tq.bench import ahead, peers
from tq.bench.cases import TOKENS, Case, cases


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_token", "fp8_group128"])
@pytest.mark.parametrize("producer", ["quantize", "rms_norm", "silu_mul"])
def test_inductor_compiles_once_for_any_number_of_tokens_above_one(monkeypatch, producer, scheme):
    torch._dynamo.reset()
    compiled, compile_by = [], torch.compile

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_by(function, backend=backend, **options))
    for rows, graphs in ((5, 1), (9, 1), (1, 2), (300, 2)):
        prepared = Case(tq.PRODUCERS[producer], (), scheme, rows, 256).prepare(torch.bfloat16, "cpu")
        peer = peers.inductor_dynamic_peer(prepared)
        theirs, ours = peer.outputs(), peers.tq_peer(prepared)
        assert len(compiled) == graphs
        with tq.use_reference():
            ours.call()
        for a, b in zip(ours.outputs(), theirs, strict=True):
            assert (a is None) == (b is None) and (a is None or torch.equal(a.view(b.shape), b))
        assert not any(hasattr(each, "_dynamo_dynamic_indices") for each in prepared.arguments)


@pytest.mark.parametrize("peer", ["inductor", "inductor_dynamic"])
@torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2)
def test_a_process_compiles_for_more_shapes_than_torch_does_by_default(monkeypatch, peer):
    torch._dynamo.reset()
    compile_by = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_by(function, backend="eager", **options))
    for hidden_size in (64, 128, 192, 256, 320):
        prepared = Case(tq.PRODUCERS["quantize"], (), "fp8_token", 3, hidden_size).prepare(torch.bfloat16, "cpu")
        made = peers.PEERS[peer](prepared)
        assert made is not None and made.outputs()[0].shape == (3, hidden_size)


def test_what_is_not_installed_or_not_here_is_no_peer():
    prepared = Case(tq.PRODUCERS["rms_norm"], ("residual",), "fp8_tensor", 3, 256).prepare(torch.bfloat16, "cpu")
    assert peers.vllm_peer(prepared) is peers.helion_peer(prepared) is peers.flashinfer_peer(prepared) is None


def test_what_each_peer_has_to_compile():
    every = [case for case in cases() if case.scheme in ("fp8_token", "fp8_group128")]
    needed = ahead.needed(every, list(peers.PEERS))
    assert len(set(needed)) == len(needed)
    for peer in "inductor", "helion":
        assert {ahead.describe(case, peer=peer) for case in every} == {each for each in needed if each.peer == peer}
    for peer in "tq", "inductor_dynamic":
        mine = [each for each in needed if each.peer == peer]
        assert len(mine) == 2 * len(every) / len(TOKENS)
        assert {each.rows for each in mine} == {min(TOKENS), max(TOKENS)}
    assert {each.peer for each in needed} == {*ahead.OF_FEW_AND_MANY, *ahead.OF_EACH}
