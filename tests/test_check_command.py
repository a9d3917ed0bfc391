"""`python -m tq check`: what it finds, what it says, and its exit status."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
import triton
import triton.language as tl  # noqa: F401 - the interpreter wants it where a kernel is
import typer
from typer.testing import CliRunner

import tq
from tq.bench import cases, peers, timing
from tq.cli import check as command
from tq.kernels import codes, launch, plan

SIZES = {256: "a small one", 128: "a smaller one"}


@pytest.fixture
def app(monkeypatch) -> typer.Typer:
    monkeypatch.setattr(cases, "SIZES", dict.fromkeys(cases.SIZES, SIZES))
    app = typer.Typer()
    app.command()(command.check)
    return app


@pytest.mark.parametrize(("producers", "schemes"), [("quantize", ""), ("", "fp8_token"), ("rms_norm,gelu", "nvfp4")])
def test_everything_passes(app, tmp_path, producers, schemes):
    path = tmp_path / "found.json"
    chosen = ["--producers", producers, "--schemes", schemes]
    result = CliRunner().invoke(app, ["--no-model", "--tokens", "3", *chosen, "--json", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    pairs = {(f["producer"].split("+")[0], f["scheme"]) for f in found["findings"]}
    wanted = producers.split(",") if producers else tq.PRODUCERS, schemes.split(",") if schemes else tq.SCHEMES
    assert pairs == set(itertools.product(*wanted)) and not found["failed"]
    for finding in found["findings"]:
        scheme = tq.SCHEMES[finding["scheme"]]
        assert 0.3 < finding["worst_ulps"] <= 0.5 + 2 * 2.0**-7 * scheme.code.steps + 1e-5
        assert finding["wrong_codes"] == finding["wrong_scales"] == 0 and finding["calls"] == 1
        assert finding["scheme"] in result.output
        # Names of producers are broken at their underscores.
        assert all(part in result.output for part in finding["producer"].split("+")[0].split("_"))


def test_json_to_stdout_is_json_alone(app):
    result = CliRunner().invoke(app, ["--no-model", "--tokens", "1", "--schemes", "mxfp8", "--json", "-"])
    assert result.exit_code == 0 and json.loads(result.stdout)["failed"] is False


@pytest.mark.parametrize("fault", ["code", "scale", "residual"])
def test_a_fault_fails_it(app, monkeypatch, fault):
    """One wrong byte, scale or residual element in every call of one pair."""
    run = launch.run

    def faulty(prepared):
        run(prepared)
        plan = prepared.plan
        if (plan.producer.name, plan.scheme.name) != ("rms_norm", "fp8_token"):
            return
        if fault == "code":
            prepared.codes[0, 0] ^= 1
        elif fault == "scale":
            prepared.scales[0, 0] *= 2
        elif prepared.bound.side_outputs:
            prepared.bound.side_outputs[0][0, 0] += 1

    monkeypatch.setattr(launch, "run", faulty)
    result = CliRunner().invoke(
        app, ["--no-model", "--tokens", "2", "--schemes", "fp8_token,nvfp4", "--producers", "rms_norm,quantize"]
    )
    assert result.exit_code == 1
    failed = [line for line in result.output.splitlines() if line.startswith("FAILED")]
    assert failed and all("rms_norm" in line and "fp8_token" in line and fault in line for line in failed)


@triton.jit
def encode_too_large(value):
    return codes.encode_e4m3(value * 1.07)


def forget() -> None:
    """What was made from a code's functions."""
    plan._plans.clear()
    for scheme in tq.SCHEMES.values():
        scheme.device.cache_clear()


def test_a_biased_encoder_fails_it(app):
    """A fault that the check kernel shares, since it encodes by the same function: float64 sees it."""
    code = tq.SCHEMES["fp8_token"].code
    forget()
    object.__setattr__(code, "encode", encode_too_large)
    try:
        result = CliRunner().invoke(
            app, ["--no-model", "--tokens", "2", "--schemes", "fp8_token,nvfp4", "--producers", "rms_norm,quantize"]
        )
    finally:
        object.__setattr__(code, "encode", codes.encode_e4m3)
        forget()
    assert result.exit_code == 1 and "error too large" in result.output


def test_what_a_gpu_adds(monkeypatch):
    """Time, share of the bandwidth, and vLLM's op where there is one; measured here by a clock that is made up."""
    monkeypatch.setattr(cases, "SIZES", dict.fromkeys(cases.SIZES, SIZES))
    arguments = cases.Case.arguments
    monkeypatch.setattr(cases.Case, "arguments", lambda self, dtype, device: arguments(self, dtype, "cpu"))
    monkeypatch.setattr(command, "MEASURED_TOKENS", 4)
    monkeypatch.setattr(timing, "device_time_us", lambda calls, *_: ([call() for call in calls] and 2.0, 0.1))
    monkeypatch.setattr(timing, "measured_bandwidth", lambda: 1e9)
    monkeypatch.setitem(peers.PEERS, "vllm", lambda prepared: peers.tq_peer(prepared))
    finding = command.Finding("random", "silu_mul", "fp8_token")
    every = cases.cases((command.MEASURED_TOKENS,))
    command.measure([case for case in every if (case.name, case.scheme) == ("silu_mul", "fp8_token")][-1], finding)
    assert finding.time_us == finding.vllm_us == 2.0
    moved = 4 * 128 * (2 * 2 + 1) + 4 * 4  # of the size that comes last: bf16 gate and up, codes, scales
    assert finding.bandwidth_share == pytest.approx(moved / 2.0 * 1e6 / 1e9)
    assert torch.isfinite(torch.tensor(finding.bandwidth_share))
