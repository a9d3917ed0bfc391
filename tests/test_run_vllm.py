"""The gates and statistics of `run-vllm`, on made-up results."""

import math

import pytest

run_vllm = pytest.importorskip("tq.cli.run_vllm")
from tq.cli.vllm_worker import Boundary, Result  # noqa: E402


def results(**boundary):
    seen = Boundary("rms_norm", **{"calls": 2, "codes": 3 * 10**6, **boundary})
    plain = {"logprobs": [-1.0, -2.0], "token_ids": [5], "token_logprobs": [-0.5]}
    return {
        "stock": Result(**plain),
        "reference": Result(**plain),
        "kernels": Result(boundaries={"model.layers.0.input_layernorm": seen}, report={"fused": 1}, **plain),
    }


def passed(made):
    return [gate.passed for gate in run_vllm.gates(made)]


@pytest.mark.parametrize(
    ("boundary", "expected"),
    [
        ({}, [True, True, True]),
        ({"wrong_codes": 3}, [True, True, True]),
        ({"wrong_codes": 4}, [False, True, True]),
        ({"codes": 1000, "wrong_codes": 1}, [False, True, True]),  # one in all of them together is one too many
        ({"wrong_scales": 1}, [False, True, True]),
        ({"wrong_residuals": 1}, [True, False, True]),
    ],
)
def test_gates_on_a_boundary(boundary, expected):
    assert passed(results(**boundary)) == expected


def test_one_error_in_a_small_boundary_passes_among_many():
    made = results()
    made["kernels"].boundaries["model.layers.1.input_layernorm"] = Boundary("rms_norm", 1, 1000, wrong_codes=1)
    made["kernels"].report["fused"] = 2
    assert passed(made) == [True, True, True]
    made["kernels"].boundaries["model.layers.1.input_layernorm"].wrong_codes = 2
    assert passed(made) == [False, True, True]


def test_nothing_fused_or_not_all_observed_fails():
    made = results()
    made["kernels"].report["fused"] = 2
    assert passed(made)[0] is False
    made["kernels"].boundaries.clear()
    made["kernels"].report.clear()
    assert passed(made)[:2] == [False, False]


@pytest.mark.parametrize("change", [{"logprobs": [-1.0, -2.0000001]}, {"token_ids": [6]}, {"token_logprobs": [-0.4]}])
def test_any_difference_to_plugin_off_fails(change):
    made = results()
    for name, value in change.items():
        setattr(made["reference"], name, value)
    assert passed(made) == [True, True, False]


def test_statistics():
    value, error = run_vllm.perplexity([-1.0, -2.0, -3.0])
    assert value == pytest.approx(math.exp(2)) and error == pytest.approx(math.exp(2) / math.sqrt(3))
    assert run_vllm.paired_difference([-1.5, -2.5], [-1.0, -2.0, -9.0]) == (0.5, 0.0)


def test_observer_counts_a_flipped_code_and_a_flipped_residual_bit():
    tq, torch = pytest.importorskip("tq"), pytest.importorskip("torch")
    from tq.cli.vllm_worker import Observer

    x, residual = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    args = (x, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    kwargs = {"scheme": "fp8_tensor", "scale": torch.tensor([0.01]), "residual": residual}
    observer = Observer()
    for flips in (0, 1):
        with tq.use_reference():
            activation, stream = tq.rms_norm(*args, **kwargs)
        activation.data.view(torch.uint8)[0, 0] ^= flips
        stream.view(torch.int16)[0, 0] ^= flips
        observer("norm", "rms_norm", args, kwargs, (activation, stream))
        assert observer.boundaries["norm"] == Boundary("rms_norm", 1 + flips, 256 * (1 + flips), flips, flips, 0, flips)
