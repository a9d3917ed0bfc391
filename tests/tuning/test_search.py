"""The search for configurations, with a clock that is told what to say; what may be asked of it at the first call."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import DEVICE
from tuned import HIDDEN, OTHER, clock, key_of, norm_arguments, put_table

import tq
from tq.bench import search
from tq.bench.cases import Case
from tq.kernels import plan, tables, tuning
from tq.kernels.tuning import Key, RowConfig


def test_the_model_counts():
    config, key = RowConfig(1, 1024, 4, 4), Key("quantize_rows", 1, 0, 6, "token", 4096, "any")
    # 8 elements a thread in each of 4 tiles: 88 registers of 128 threads, which go 5 times into 65536.
    assert search.model(config, key) == (8.0, 0.0, max(88 * 128 / 65536, 88 / 255), 5 * 4096 * 6)
    assert search.model(config, key._replace(hidden_size=3072)).idle == 0.25
    assert search.model(config._replace(tiles=1), key._replace(hidden_size=1536)).idle == 0.25


@pytest.mark.parametrize("scale", ["tensor", "token", "group16", "group128"])
@pytest.mark.parametrize("hidden_size", [128, 576, 2880, 4096, 14336, 32768])
def test_candidates_can_be_launched(scale, hidden_size):
    for moments, tokens in ((0, "many"), (1, "any")):
        key = Key("quantize_rows", moments, 0, 2, scale, hidden_size, tokens)
        found = search.candidates(key)
        assert len(set(found)) == len(found) <= 64
        assert found
        for config in found:
            assert tables.entry({**key._asdict(), **config._asdict()}) == (key, config)


@pytest.mark.parametrize("hidden_size", [576, 2880, 4096, 5120, 7168, 8192, 14336, 28672])
@pytest.mark.parametrize(("moments", "scale"), [(0, "tensor"), (0, "token"), (0, "group128"), (1, "tensor")])
def test_the_model_keeps_what_was_found_on_a_gpu(moments, scale, hidden_size):
    """The heuristic was found by hand; a model that leaves it out would leave out the best."""
    key = Key("quantize_rows", moments, 0, 2, scale, hidden_size, "any" if moments else "many")
    assert tuning.heuristic(hidden_size, key.least, key.whole_row, False) in search.candidates(key)


def test_the_search_keeps_to_its_tokens():
    key = Key("quantize_rows", 0, 0, 2, "token", 4096, "few")
    assert search.tokens_of(key) == [16, 1]
    assert search.tokens_of(key._replace(tokens="many")) == [8192, 1024, 128]
    assert search.tokens_of(key._replace(tokens="any", moments=1)) == list(search.TOKENS)


def searched(monkeypatch, time_of, tokens=(8, 1), name="rms_norm", scheme="fp8_token"):
    asked = clock(monkeypatch, time_of)
    case = Case(tq.PRODUCERS[name], (), scheme, 1, 4096)
    return search.search_case(case, tokens, DEVICE), asked


def test_the_fastest_wins(monkeypatch):
    best = RowConfig(1, 2048, 2, 8)
    found, asked = searched(monkeypatch, lambda config: 1.0 if config == best else 1.2)
    assert found.config == best and math.isclose(found.gain, 1.2)
    assert set(asked) == set(search.tried(found.key, asked[0])) and found.tried == len(asked) / 2


@pytest.mark.parametrize(
    ("name", "elements", "wins"), [("quantize", 1, False), ("rms_norm", 2, True), ("rms_norm", 3, False)]
)
def test_nothing_wins_that_writes_something_else(monkeypatch, name, elements, wins):
    """The fastest is compiled to something wrong; the next is right. A sum may be another one, and a few codes."""
    wrong, right = RowConfig(1, 2048, 2, 8), RowConfig(1, 1024, 4, 8)

    def run(call, real=search.run):
        real(call)
        if tuning.forced() == wrong:
            call.codes.view(-1)[:elements] ^= 1

    monkeypatch.setattr(search, "run", run)
    found, _ = searched(monkeypatch, lambda config: {wrong: 1.0, right: 1.1}.get(config, 1.5), name=name)
    assert found.config == (wrong if wins else right)


def test_the_heuristic_stays_within_the_noise(monkeypatch):
    heuristic = tuning.heuristic(4096, 0, True, False)
    found, _ = searched(monkeypatch, lambda config: 1.0 if config == heuristic else 0.995)
    assert found.config == heuristic and found.gain == 1.0


def test_nothing_wins_that_loses_somewhere(monkeypatch):
    """Half the time at the first number of tokens, a tenth more at the second."""
    times = itertools.cycle
    heuristic, seen = tuning.heuristic(4096, 0, True, False), {}

    def time_of(config):
        turn = next(seen.setdefault(config, times((0, 1))))
        return 1.0 if config == heuristic else (0.5, 1.1)[turn]

    found, _ = searched(monkeypatch, time_of)
    assert found.config == heuristic


def test_what_loses_is_timed_once(monkeypatch):
    """It could not win."""
    best, heuristic = RowConfig(1, 2048, 2, 8), tuning.heuristic(4096, 0, True, False)
    found, asked = searched(monkeypatch, lambda config: {best: 1.0, heuristic: 1.5}.get(config, 2.0), (8, 4, 2, 1))
    assert all(asked.count(config) == (4 if config in (best, heuristic) else 1) for config in set(asked))
    assert found.config == best


def test_what_triton_cannot_make_is_passed_over(monkeypatch):
    from triton.runtime.errors import OutOfResources

    best, heuristic = RowConfig(1, 2048, 2, 8), tuning.heuristic(4096, 0, True, False)

    def time_of(config):
        if config not in (best, heuristic):
            raise OutOfResources(70000, 65536, "registers")
        return 1.0 if config == best else 2.0

    found, _ = searched(monkeypatch, time_of)
    assert found.config == best


def test_every_candidate_is_run_on_its_own_terms(monkeypatch, asked):
    """What is timed is the kernel, cut as the candidate says."""

    def device_time_us(calls, *_):
        for call in calls:
            call()
        assert asked[-1] == tuning.forced()
        return 1.0, 0.0

    monkeypatch.setattr(search, "device_time_us", device_time_us)
    monkeypatch.setattr(search, "copies_of", lambda call_bytes: 2)
    key = key_of("silu_mul", "fp8_token")
    found = search.search_case(Case(tq.PRODUCERS["silu_mul"], (), "fp8_token", 1, HIDDEN), (3,), DEVICE)
    assert (
        len(asked)
        == found.tried
        == len(search.candidates(key)) + (tuning.heuristic(HIDDEN, 0, True, True) not in search.candidates(key))
    )


def running_clock(monkeypatch):
    """Runs what it times, twice, and prefers `OTHER`."""
    timed = []

    def device_time_us(calls, *_):
        timed.append(tuning.forced())
        for call in [*calls, *calls]:
            call()
        return (1.0 if tuning.forced() == OTHER else 2.0), 0.0

    monkeypatch.setattr(search, "device_time_us", device_time_us)
    monkeypatch.setattr(search, "copies_of", lambda call_bytes: 2)
    monkeypatch.setattr(search, "candidates", lambda key: [RowConfig(1, 256, 1, 1), OTHER])
    return timed


def test_nothing_is_timed_unless_asked_for(monkeypatch):
    timed = running_clock(monkeypatch)
    tq.quantize(torch.randn(3, HIDDEN, device=DEVICE).bfloat16(), scheme="fp8_token")
    assert not timed


def test_autotune_times_once_and_leaves_the_tensors_alone(monkeypatch, asked):
    """The residual is written in place: once, and by the call alone."""
    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    timed = running_clock(monkeypatch)
    for rows in (3, 5):
        arguments, residual = norm_arguments(rows)
        kept = [tensor.clone() for tensor in arguments]
        want = arguments[0].float() + residual.float()
        _, new = tq.rms_norm(*arguments, scheme="fp8_token", residual=residual, residual_out=residual)
        assert new is residual and torch.equal(residual, want.bfloat16())
        assert all(map(torch.equal, arguments, kept))
        assert asked[-1] == OTHER
        assert len(timed) == 3, "the key is the same for every number of tokens"


def test_a_table_makes_timing_needless(monkeypatch, asked):
    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    timed = running_clock(monkeypatch)
    put_table((key_of("quantize", "fp8_token"), OTHER))
    tq.quantize(torch.randn(3, HIDDEN, device=DEVICE).bfloat16(), scheme="fp8_token")
    assert not timed and asked == [OTHER]


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch, asked):
    """And what is first seen then keeps the heuristic: a sum must not change its order later."""
    monkeypatch.setattr(tuning, "AUTOTUNE", True)
    timed = running_clock(monkeypatch)
    arguments, _ = norm_arguments()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tq.rms_norm(*arguments, scheme="fp8_token")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plan._plans.clear()
    tq.rms_norm(*arguments, scheme="fp8_token")
    assert not timed and asked[0] == asked[1] != OTHER
    tq.quantize(arguments[0], scheme="fp8_token")
    assert timed and asked[-1] == OTHER


def test_without_memory_for_copies_the_call_goes_on(monkeypatch, asked):
    monkeypatch.setattr(tuning, "AUTOTUNE", True)

    def device_time_us(calls, *_):
        raise torch.OutOfMemoryError("made up")

    monkeypatch.setattr(search, "device_time_us", device_time_us)
    x = torch.randn(3, HIDDEN, device=DEVICE).bfloat16()
    assert tq.quantize(x, scheme="fp8_token").data.shape == x.shape and len(asked) == 1


def test_a_copy_keeps_strides_and_what_is_one():
    producer, memory = tq.PRODUCERS["rms_norm"], torch.randn(4, 3 * HIDDEN, device=DEVICE)
    view = memory[:, HIDDEN : 2 * HIDDEN]
    options = {"residual": view, "residual_out": view, "scale_ub": torch.ones(1, device=DEVICE)}
    arguments = (memory[:, :HIDDEN], torch.ones(HIDDEN, device=DEVICE))
    first = plan.prepare(producer, arguments, "fp8_token", options)
    copy = search.copy_of(first)
    for mine, theirs in zip(copy.bound.args, first.bound.args, strict=True):
        for a, b in zip(*((each if isinstance(each, tuple) else (each,)) for each in (mine, theirs)), strict=True):
            if isinstance(a, torch.Tensor):
                assert a.stride() == b.stride() and torch.equal(a, b)
                assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    assert copy.options["residual"] is copy.options["residual_out"]
    assert torch.equal(copy.inputs.scale_ub, options["scale_ub"]) and copy.inputs.scale_ub is not options["scale_ub"]
