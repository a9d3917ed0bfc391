"""Layers with packed states in vLLM: what their slots hold, and what each kind of call does to them. vLLM's layers are
stood in for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import DEVICE
from packed_fakes import (
    HEADS,
    SIZE,
    SLOTS,
)
from state_helpers import indices, numbers, sigmoid, softplus, step

from tq import state as tq_state
from tq.contract import packed_layers


def call(monkeypatch, layer, decodes, prompts, seed):
    """One step: decodes [slot], then prompts [(slot, tokens, whether it goes on)] -> (outputs, inputs by name).

    A padded token follows, and a padded request where there are prompts.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [1] * len(decodes) + [length for _, length, _ in prompts]
    tokens, rows = sum(lengths), [*decodes, *(slot for slot, _, _ in prompts)]
    channels, gates = layer.conv1d.weight.shape[0], layer.dt_bias.numel()
    shapes = {"qkv": (channels,), "gate": (gates,), "beta": (HEADS,), "out_gate": (HEADS, SIZE)}
    given = {name: torch.randn(tokens + 1, *shape, generator=generator).to(DEVICE) for name, shape in shapes.items()}
    bounds = indices([0, *np.cumsum(lengths), tokens] if prompts else [0, *np.cumsum(lengths)])
    goes_on = [True] * len(decodes) + [continued for _, _, continued in prompts] + [False]
    m = SimpleNamespace(
        num_actual_tokens=tokens, num_prefills=len(prompts), num_decodes=len(decodes), num_decode_tokens=len(decodes),
        non_spec_state_indices_tensor=indices([*rows, 0] if prompts else rows), non_spec_query_start_loc=bounds,
        has_initial_state=torch.tensor(goes_on, device=DEVICE), chunk_indices=None, chunk_offsets=None,
    )  # fmt: skip
    first = len(decodes)
    m.prefill_state_indices = m.non_spec_state_indices_tensor[first:]
    m.prefill_has_initial_state = m.has_initial_state[first:]
    m.prefill_query_start_loc = bounds[first:] - first
    monkeypatch.setattr(packed_layers, "current_metadata", lambda: {layer.prefix: m})
    if layer.kda:
        out = torch.full((1, tokens + 1, HEADS, SIZE), 3.0, device=DEVICE)
        gate = given["gate"].unflatten(1, (HEADS, SIZE))[None]
        layer._forward(given["qkv"], gate, torch.ones_like(out[0]), given["beta"][None], out)
        return out[0, :tokens], given
    out = torch.full((tokens + 1, HEADS, SIZE), 3.0, device=DEVICE)
    layer._forward_core(given["qkv"], given["beta"], given["gate"], out)
    assert (out[tokens:] == 3.0).all()
    return out[:tokens], given


def unpacked(layer, slot):
    """The state in a slot, [heads, values, keys]."""
    return tq_state.unpack(layer.tq_state, indices([slot]))[0]


def expected_step(layer, before, given, token):
    """(new state, output) of one token in float64."""
    qkv, gate, beta, A_log, dt_bias, states = numbers(
        given["qkv"][token], given["gate"][token], given["beta"][token], layer.A_log, layer.dt_bias, before
    )
    keys = layer.num_k_heads * SIZE
    q, k, v = (each.reshape(-1, SIZE) for each in np.split(qkv, [keys, 2 * keys]))
    x = softplus(gate + dt_bias).reshape(HEADS, -1)
    outputs = []
    for h in range(HEADS):
        g = h * layer.num_k_heads // HEADS
        rate = -np.exp(A_log[h]) * (x[h] if layer.kda else x[h, 0])
        states[h], out = step(states[h], q[g], k[g], v[h], rate, sigmoid(beta[h]), SIZE**-0.5)
        outputs.append(out)
    return states, np.stack(outputs)


def assert_rounded_once(layer, slot, exact):
    """What is stored is nowhere further from `exact` than half a code of its value channel."""
    stored, exact = numbers(unpacked(layer, slot))[0], np.asarray(exact)
    half = np.abs(exact).max(-1, keepdims=True) / 254
    assert (np.abs(stored - exact) <= half * 1.001 + 1e-6).all()


KINDS = pytest.mark.parametrize("kind", ["gdn", "kda"])


@KINDS
@pytest.mark.parametrize("replay", [0, 4])
def test_chunks_go_on_from_what_is_stored(make_packed, monkeypatch, kind, replay):
    """Fresh slots are not read, whatever they hold; final states are rounded once; no other slot changes."""
    layer = make_packed(kind, replay)
    before = layer.pages.clone()
    call(monkeypatch, layer, [], [(5, 6, False), (2, 3, False)], 0)
    assert layer.seen[0].shape[0] == 3 and not layer.seen[0].any()
    for row, slot in enumerate((5, 2)):
        assert_rounded_once(layer, slot, numbers(layer.final[row])[0])
    stored, kept = unpacked(layer, 5), layer.pages[2].clone()
    call(monkeypatch, layer, [], [(5, 4, True)], 1)
    assert torch.equal(layer.seen[1][0], stored) and not torch.equal(unpacked(layer, 5), stored)
    assert_rounded_once(layer, 5, numbers(layer.final[0])[0])
    others = [slot for slot in range(SLOTS) if slot not in (5, 2)]
    assert torch.equal(layer.pages[others], before[others]) and torch.equal(layer.pages[2], kept)


@KINDS
@pytest.mark.parametrize("replay", [0, 4])
def test_steps_of_decoding(make_packed, monkeypatch, kind, replay):
    """Outputs are those of a step in float64; the state is rounded by each, or is kept in the ring until it is full."""
    layer = make_packed(kind, replay)
    call(monkeypatch, layer, [], [(5, 6, False), (2, 3, False)], 0)
    kept, codes = layer.pages[2].clone(), layer.tq_state.codes[5].clone()
    close = {"rtol": 1e-2, "atol": 1e-2} if replay else {"rtol": 1e-5, "atol": 1e-5}  # entries of a ring are bf16
    for token in range(5):
        start = unpacked(layer, 5)
        out, given = call(monkeypatch, layer, [5], [], 2 + token)
        exact, want = expected_step(layer, start, given, 0)
        np.testing.assert_allclose(numbers(out[0])[0], want, **close)
        if not replay or token == replay - 1:
            if not replay:
                assert_rounded_once(layer, 5, exact)
            assert not torch.equal(layer.tq_state.codes[5], codes)
            codes = layer.tq_state.codes[5].clone()
        else:
            assert torch.equal(layer.tq_state.codes[5], codes)
            np.testing.assert_allclose(numbers(unpacked(layer, 5))[0], exact, **close)
    assert torch.equal(layer.pages[2], kept)


@KINDS
@pytest.mark.parametrize("replay", [0, 4])
def test_residuals_of_mixed_channels(make_packed, monkeypatch, kind, replay):
    """What is stored of a prompt is nearer than codes alone could be, and a step goes on from it."""
    layer = make_packed(kind, replay, more=", residual: true, hadamard: 4")
    assert layer.get_state_dtype()[3] == torch.uint8 and layer.tq_state.hadamard == 4
    call(monkeypatch, layer, [], [(5, 6, False)], 0)
    start, exact = unpacked(layer, 5), numbers(layer.final[0])[0]
    # A mixed channel is at most twice as large as the largest of its four, and so is an error that is mixed back.
    largest = np.abs(exact).reshape(HEADS, -1, 4 * SIZE).max(-1).repeat(4, 1)[..., None]
    assert (np.abs(numbers(start)[0] - exact) <= 4 * largest / 127 / 28 * 1.001 + 1e-6).all()
    out, given = call(monkeypatch, layer, [5], [], 1)
    _, want = expected_step(layer, start, given, 0)
    np.testing.assert_allclose(numbers(out[0])[0], want, rtol=1e-2, atol=1e-2 if replay else 1e-4)


def test_channels_that_cannot_be_mixed(make_packed):
    with pytest.raises(ValueError, match=f"hadamard must be 0 or a power of two that divides {SIZE} values, got 256"):
        make_packed("gdn", more=", hadamard: 256")


@KINDS
def test_decodes_meet_prompts(make_packed, monkeypatch, kind):
    """A step of one request and a chunk of another in one call: each as it would have been alone."""
    layer = make_packed(kind, 4)
    call(monkeypatch, layer, [], [(5, 6, False), (2, 3, False)], 0)
    call(monkeypatch, layer, [5], [], 1)
    start = unpacked(layer, 5)
    out, given = call(monkeypatch, layer, [5], [(2, 4, True), (3, 2, False)], 2)
    exact, want = expected_step(layer, start, given, 0)
    np.testing.assert_allclose(numbers(out[0])[0], want, rtol=1e-2, atol=1e-2)
    if kind == "kda":  # all rows are chunks
        assert_rounded_once(layer, 5, numbers(layer.final[0])[0])
    else:
        np.testing.assert_allclose(numbers(unpacked(layer, 5))[0], exact, rtol=1e-2, atol=1e-2)
    assert layer.seen[-1].shape[0] == 3 + (kind == "kda") and not layer.seen[-1][-2:].any()
    for row, slot in enumerate((2, 3), start=int(kind == "kda")):
        assert_rounded_once(layer, slot, numbers(layer.final[row])[0])


@KINDS
def test_padding_of_a_captured_step(make_packed, monkeypatch, kind):
    """Requests with the null slot change nothing."""
    layer = make_packed(kind)
    before = layer.pages.clone()
    call(monkeypatch, layer, [0, 0], [], 0)
    assert torch.equal(layer.pages, before)


@KINDS
def test_what_a_slot_holds(make_packed, kind):
    """Shapes and dtypes that vLLM sizes its memory by: a quarter of fp32, and what the ring takes."""
    layer = make_packed(kind, 4)
    assert layer.get_state_dtype() == (
        torch.bfloat16, torch.int8, torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.uint8,
    )  # fmt: skip
    keys, decays = (HEADS, SIZE) if kind == "kda" else (1, 1)
    assert layer.get_state_shape()[1:] == (
        (HEADS, SIZE, SIZE), (HEADS, SIZE, 1), (keys, 4, SIZE), (HEADS, 4, SIZE), (HEADS, 4, decays), (HEADS, SIZE),
    )  # fmt: skip
    assert layer.tq_state.codes.data_ptr() - layer.pages.data_ptr() == layer.kv_cache[0][0].nbytes
    plain = make_packed(kind, prefix="plain.0")
    assert plain.get_state_shape()[1:] == ((HEADS, SIZE, SIZE),) and plain.tq_template is None
    assert plain.get_state_dtype() == (torch.bfloat16, torch.float32)


@KINDS
def test_a_layer_that_the_recipe_leaves_out_is_vllms_own(make_packed, monkeypatch, kind):
    layer = make_packed(kind, prefix="plain.0")
    monkeypatch.setattr(packed_layers, "current_metadata", lambda: {})
    if kind == "gdn":
        layer._forward_core(1, 2, 3, 4)
    else:
        layer._forward(mixed_qkv=1, g1=2, g2=3, beta=4, core_attn_out=5)
    assert layer.seen == ["plain"]


@KINDS
@pytest.mark.parametrize("found", [None, {}])
def test_while_vllm_profiles(make_packed, monkeypatch, kind, found):
    layer = make_packed(kind)
    before = layer.pages.clone()
    monkeypatch.setattr(packed_layers, "current_metadata", lambda: found)
    if kind == "gdn":
        layer._forward_core(1, 2, 3, 4)
    else:
        layer._forward(1, 2, 3, 4, 5)
    assert layer.seen == ["warm-up torch.float32"] * (kind == "gdn") and torch.equal(layer.pages, before)
    assert torch.int8 in layer.get_state_dtype()
