"""The contract without vLLM: objects of vLLM's shape, so that these always run."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
from collections import namedtuple

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tq
from tq import contract
from tq.contract import boundaries, pairing, plugin, route, scales, vllm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN = 256


@dataclasses.dataclass(frozen=True)
class Key:
    name: str


@dataclasses.dataclass
class Activation:
    data: torch.Tensor
    scale: torch.Tensor
    orig_dtype: torch.dtype
    orig_shape: torch.Size
    quant_key: Key


class Adapter:
    """`tq.contract.route.Adapter` for the classes below."""

    def __init__(self):
        self.schemes = {
            Key("static"): "fp8_tensor",
            Key("token"): "fp8_token",
            Key("group"): "fp8_group128",
        }
        self.refuses_all = None
        self.rounding = route.NormRounding("before_and_after_weight", False)

    def get_input_quant_key(self, linear):
        if getattr(linear, "requires_unquantized_input", False):
            return None
        return getattr(linear, "_input_quant_key", None)

    def is_rms_norm(self, module):
        return getattr(type(module), "tq_base", type(module)) is Norm

    def is_silu_mul(self, module):
        return getattr(type(module), "tq_base", type(module)) is Act

    def norm_rounding(self, has_residual):
        return self.rounding

    def act_rounding(self):
        return "activation_and_product"

    def wrap(self, activation, key):
        return Activation(activation.data, activation.scale, activation.orig_dtype, activation.data.shape, key)


class Norm(torch.nn.Module):
    has_weight, variance_size_override = True, None

    def __init__(self, eps=1e-30):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(HIDDEN, generator=generator).to(torch.bfloat16)
        self.weight = torch.nn.Parameter(weight.to(DEVICE), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x, residual=None):
        total = x.float() if residual is None else x.float() + residual.float()
        y = (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype) * self.weight
        return y if residual is None else (y, total.to(x.dtype))


class OtherNorm(Norm):
    def forward(self, x, residual=None):
        return super().forward(x, residual)


class Act(torch.nn.Module):
    def forward(self, x):
        half = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :half]) * x[..., half:]


class Linear(torch.nn.Module):
    """Quantizes its own input unless it gets an `Activation`; rejects one with another key."""

    requires_unquantized_input = False

    def __init__(self, key=None, scale=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(HIDDEN, device=DEVICE), requires_grad=False)
        self._input_quant_key = key
        if scale is not None:
            self.input_scale = torch.nn.Parameter(torch.tensor(scale, device=DEVICE), requires_grad=False)
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        if isinstance(x, Activation):
            if x.quant_key != self._input_quant_key:
                raise TypeError(f"activation of {x.quant_key}, expected {self._input_quant_key}")
            return x.data.float() * x.scale
        return x.float()


class LoraLinear(torch.nn.Module):
    requires_unquantized_input = True

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self._input_quant_key = base._input_quant_key
        self.a = torch.full((HIDDEN, 4), 0.5, device=DEVICE)
        self.b = torch.full((4, HIDDEN), 0.25, device=DEVICE)

    def forward(self, x):
        return self.base_layer(x) + x.float() @ self.a @ self.b


class Attention(torch.nn.Module):
    def __init__(self, qkv_proj):
        super().__init__()
        self.qkv_proj = qkv_proj

    def forward(self, x):
        return self.qkv_proj(x)


class Mlp(torch.nn.Module):
    def __init__(self, gate_up_proj, down_proj):
        super().__init__()
        self.gate_up_proj, self.act_fn, self.down_proj = gate_up_proj, Act(), down_proj

    def forward(self, x):
        gate_up = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(torch.cat([gate_up, gate_up], -1).to(torch.bfloat16)))


class Decoder(torch.nn.Module):
    def __init__(self, key, scale):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm(1e-5)
        self.self_attn = Attention(Linear(key, scale))
        self.mlp = Mlp(Linear(key, scale), Linear(key, scale))

    def forward(self, x, residual):
        y, residual = self.input_layernorm(x, residual)
        y = self.self_attn(y).to(x.dtype)
        y, residual = self.post_attention_layernorm(y, residual)
        return self.mlp(y), residual


@pytest.fixture
def adapter(monkeypatch):
    adapter = Adapter()
    monkeypatch.setattr(route.state, "adapter", adapter)
    return adapter


@pytest.fixture
def layer(adapter, monkeypatch):
    """One decoder whose forwards count as known ones."""
    layer = Decoder(Key("static"), 0.25)
    known = frozenset(pairing.forward_hash(m) for m in (layer, layer.self_attn, layer.mlp))
    sites = tuple(
        dataclasses.replace(s, known_parents=known, known_owners=known if s.known_owners else frozenset())
        for s in pairing.SITES
    )
    monkeypatch.setattr(pairing, "SITES", sites)
    return layer


def signs(m=3, seed=1):
    """+-2 everywhere: the mean square is exactly 4, so norm(x) is exactly +-weight."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (m, HIDDEN), generator=generator) * 4.0 - 2.0).to(torch.bfloat16).to(DEVICE)


def e4m3(y, scale):
    return (y.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def bits(x):
    return x.view(torch.uint8)


def test_import_leaves_vllm_out():
    code = "import sys, tq, tq.contract; sys.exit(any(n.split('.')[0] == 'vllm' for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("scale", [0.5, [0.5], [[0.5]]])
def test_scale_of_one_element_in_any_shape(scale):
    linear = Linear(Key("static"), scale)
    assert contract.get_input_quant_scales(linear).static_scale is linear.input_scale


def test_scale_absent_or_ambiguous_is_none():
    assert contract.get_input_quant_scales(Linear(Key("static"))) == contract.InputQuantScales()
    assert contract.get_input_quant_scales(Linear(Key("static"), [0.5, 0.25])).static_scale is None


def test_scales_are_read_under_the_kernels_names():
    linear = Linear(Key("static"), 0.5)
    linear.in_s, linear.in_ub = torch.tensor(2.0), torch.tensor(3.0)
    kernel = type("Kernel", (), {"layer_param_names": ["w", "w_s", "in_s", "in_ub"]})()
    linear.scheme = type("Scheme", (), {"fp8_linear": kernel})()
    found = contract.get_input_quant_scales(linear)
    assert found.static_scale is linear.in_s and found.scale_ub is linear.in_ub


def test_the_engines_own_accessor_wins(monkeypatch):
    own = namedtuple("Own", "static_scale")(torch.tensor(8.0))
    monkeypatch.setattr(scales, "own_accessor", lambda linear: own)
    assert contract.get_input_quant_scales(Linear(Key("static"), 0.5)).static_scale is own.static_scale


def test_norm_with_static_scale(adapter):
    norm, linear, x = Norm(), Linear(Key("static"), 0.25), signs()
    out = contract.rms_norm_input_quant(norm, x, None, linear)
    expected = e4m3((x.float() / 2).to(x.dtype) * norm.weight, 0.25)
    assert torch.equal(bits(out.data), bits(expected))
    assert out.scale is linear.input_scale and out.quant_key == Key("static")
    assert out.orig_dtype == torch.bfloat16 and out.orig_shape == x.shape


@pytest.mark.parametrize(("key", "groups"), [("token", 1), ("group", HIDDEN // 128)])
def test_norm_with_dynamic_scales(adapter, key, groups):
    norm, x = Norm(), signs()
    out = contract.rms_norm_input_quant(norm, x, None, Linear(Key(key)))
    y = ((x.float() / 2).to(x.dtype) * norm.weight).float().unflatten(-1, (groups, -1))
    scale = y.abs().amax(-1) / 448
    assert torch.equal(out.scale, scale)
    assert torch.equal(bits(out.data), bits(e4m3(y, scale.unsqueeze(-1)).flatten(-2)))


def test_upper_bound_reaches_the_kernel(adapter):
    linear = Linear(Key("token"))
    linear.input_scale_ub = torch.tensor([0.5], device=DEVICE)
    out = contract.rms_norm_input_quant(Norm(), signs(), None, linear)
    assert torch.equal(out.scale, torch.full((3, 1), 0.5 / 448, device=DEVICE))


@pytest.mark.parametrize("policy", [("after_weight", True), ("before_and_after_weight", False)])
def test_rounding_is_that_of_the_engine(adapter, policy):
    adapter.rounding = route.NormRounding(*policy)
    seen = []
    with contract.observe(lambda *call: seen.append(call)):
        contract.rms_norm_input_quant(Norm(), signs(), signs(seed=2), Linear(Key("static"), 0.25))
    _, producer, _, kwargs, _ = seen[0]
    assert producer == "rms_norm" and (kwargs["rounding"], kwargs["round_residual"]) == policy


def test_residual_is_not_written_in_place(adapter):
    x, residual = signs(), signs(seed=2)
    before = residual.clone()
    seen = []
    with contract.observe(lambda *call: seen.append(call)):
        _, after = contract.rms_norm_input_quant(Norm(1e-5), x, residual, Linear(Key("static"), 0.25))
    assert torch.equal(seen[0][3]["residual"], before) and torch.equal(after, x + before)
    assert torch.equal(residual, before)
    contract.rms_norm_input_quant(Norm(), x, None, Linear(Key("static"), 0.25))
    assert len(seen) == 1


def test_residual_is_written_where_the_plain_norm_writes_it(adapter):
    adapter.rounding = route.NormRounding("after_weight", True, in_place=True)
    x, linear = signs(), Linear(Key("static"), 0.25)
    residual, watched, traced = signs(seed=2), signs(seed=2), signs(seed=2)
    wanted = x + residual
    _, after = contract.rms_norm_input_quant(Norm(), x, residual, linear)
    assert after is residual and torch.equal(residual, wanted)
    with contract.observe(lambda *call: None):
        _, after = contract.rms_norm_input_quant(Norm(), x, watched, linear)
    assert torch.equal(watched, signs(seed=2)) and torch.equal(after, wanted)
    norm = Norm()
    compiled = torch.compile(lambda x, r: contract.rms_norm_input_quant(norm, x, r, linear)[1], backend="aot_eager")
    assert torch.equal(compiled(x, traced), wanted) and torch.equal(traced, signs(seed=2))


def test_silu_mul(adapter):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 2 * HIDDEN, generator=generator).to(torch.bfloat16).to(DEVICE)
    x[:, :HIDDEN] = 0  # silu(0) = 0 is exact
    x[0, :HIDDEN] = 64  # and so is silu(64) = 64
    out = contract.silu_mul_input_quant(Act(), x, Linear(Key("static"), 0.5))
    gate = torch.where(x[:, :HIDDEN] == 64, 64.0, 0.0).to(x.dtype)
    assert torch.equal(bits(out.data), bits(e4m3(gate * x[:, HIDDEN:], 0.5)))


def lora():
    return LoraLinear(Linear(Key("static"), 0.25))


def splitting():
    linear = Linear(Key("static"), 0.25)
    linear.input_is_parallel = False
    return linear


FALLBACKS = {
    "no consumer": lambda: (Norm(), signs(), None),
    "no key": lambda: (Norm(), signs(), Linear()),
    "unknown key": lambda: (Norm(), signs(), Linear(Key("nvfp4"), 0.25)),
    "no scale": lambda: (Norm(), signs(), Linear(Key("static"))),
    "two scales": lambda: (Norm(), signs(), Linear(Key("static"), [0.25, 0.5])),
    "fp32 input": lambda: (Norm(), signs().float(), Linear(Key("static"), 0.25)),
    "fp16 input, bf16 weight": lambda: (Norm(), signs().half(), Linear(Key("static"), 0.25)),
    "a subclass of the norm": lambda: (OtherNorm(), signs(), Linear(Key("static"), 0.25)),
    "LoRA": lambda: (Norm(), signs(), lora()),
    "input_is_parallel=False": lambda: (Norm(), signs(), splitting()),
}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("case", FALLBACKS)
def test_fallback_is_the_plain_norm(adapter, case, residual, monkeypatch):
    norm, x, linear = FALLBACKS[case]()
    returned, given = [], []
    plain = norm.forward
    norm.forward = lambda *args: returned.append(plain(*args)) or given.append(args) or returned[-1]
    monkeypatch.setattr(tq, "rms_norm", lambda *args, **kwargs: pytest.fail("must not be called"))
    r = x.clone() if residual else None
    assert contract.rms_norm_input_quant(norm, x, r, linear) is returned[0]
    assert len(given) == 1 and len(given[0]) == (2 if residual else 1)


def test_nothing_is_fused_when_the_engine_refuses_all(adapter):
    adapter.refuses_all = "batch-invariant"
    assert isinstance(contract.rms_norm_input_quant(Norm(), signs(), None, Linear(Key("static"), 0.25)), torch.Tensor)


def test_unknown_norm_implementation_is_not_guessed(adapter):
    adapter.rounding = None
    assert isinstance(contract.rms_norm_input_quant(Norm(), signs(), None, Linear(Key("static"), 0.25)), torch.Tensor)


def test_row_that_groups_do_not_divide(adapter):
    x = torch.ones(2, 2 * 192, dtype=torch.bfloat16, device=DEVICE)
    assert isinstance(contract.silu_mul_input_quant(Act(), x, Linear(Key("group"))), torch.Tensor)


def test_scale_is_bound_at_the_call(layer):
    pairing.pair_model(layer)
    linear, norm, x = layer.self_attn.qkv_proj, layer.input_layernorm, signs()
    y = (x.float() / 2).to(x.dtype) * norm.weight
    linear.input_scale = torch.nn.Parameter(torch.tensor([0.5], device=DEVICE), requires_grad=False)
    assert torch.equal(bits(norm(x).data), bits(e4m3(y, 0.5)))
    linear.input_scale.data.copy_(torch.tensor([0.125]))
    assert torch.equal(bits(norm(x).data), bits(e4m3(y, 0.125)))
    del linear.input_scale
    assert torch.equal(norm(x), y)


SCALE_KEY = Key("static")
CHANGES = {
    "no key": (lambda linear, x: setattr(linear, "_input_quant_key", None), None),
    "unknown key": (lambda linear, x: setattr(linear, "_input_quant_key", Key("nvfp4")), None),
    "another key": (lambda linear, x: setattr(linear, "_input_quant_key", Key("token")), Key("token")),
    "an equal key": (lambda linear, x: setattr(linear, "_input_quant_key", Key("static")), Key("static")),
    "flag of LoRA": (lambda linear, x: setattr(linear, "requires_unquantized_input", True), None),
    "split input": (lambda linear, x: setattr(linear, "input_is_parallel", False), None),
    "scale of two elements": (lambda linear, x: setattr(linear.input_scale, "data", x[0, :2].float()), None),
    "bf16 scale": (lambda linear, x: setattr(linear.input_scale, "data", x[0, :1]), None),
    "fp32 input": (lambda linear, x: x.float(), None),
    "strided input": (lambda linear, x: x.repeat_interleave(2, -1)[:, ::2], None),
    "other rows": (lambda linear, x: x[:2], Key("static")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("producer", ["norm", "act"])
def test_a_change_is_seen_by_the_next_call_and_undone_by_the_one_after(layer, change, producer):
    pairing.pair_model(layer)
    module, linear, x = {
        "norm": (layer.input_layernorm, layer.self_attn.qkv_proj, signs()),
        "act": (layer.mlp.act_fn, layer.mlp.down_proj, torch.cat([signs(), signs(seed=2)], -1)),
    }[producer]
    make, key = CHANGES[change]
    assert module(x).quant_key == SCALE_KEY
    scale, members = linear.input_scale.data, dict(linear.__dict__)
    changed = make(linear, x)
    out = module(x if changed is None else changed)
    assert isinstance(out, torch.Tensor) if key is None else out.quant_key == key
    linear.input_scale.data = scale
    linear.__dict__.clear()
    linear.__dict__.update(members)
    assert module(x).quant_key == SCALE_KEY


def test_an_attribute_is_found_as_getattr_finds_it():
    class Delegating(torch.nn.Linear):
        def __getattr__(self, name):
            return 5 if name == "delegated" else super().__getattr__(name)

    class Plain(torch.nn.Linear):
        of_class = 3

        @property
        def computed(self):
            return self.of_class + 1

    for owner in (Plain(2, 2), Delegating(2, 2), type("Object", (), {"of_class": 1})()):
        owner.of_instance = None
        if isinstance(owner, torch.nn.Module):
            owner.register_buffer("buffer", torch.ones(1))
            owner.child = torch.nn.Identity()
        for name in ("of_instance", "weight", "buffer", "child", "of_class", "computed", "delegated", "absent"):
            assert scales.attribute(owner, name) is getattr(owner, name, None)


def test_lora_added_after_pairing_gets_the_plain_activation(layer):
    pairing.pair_model(layer)
    base, norm, x = layer.self_attn.qkv_proj, layer.input_layernorm, signs()
    assert isinstance(norm(x), Activation)
    layer.self_attn.qkv_proj = LoraLinear(base)
    y = (x.float() / 2).to(x.dtype) * norm.weight
    assert torch.equal(
        layer.self_attn(norm(x)), base(y) + y.float() @ layer.self_attn.qkv_proj.a @ layer.self_attn.qkv_proj.b
    )
    layer.self_attn.qkv_proj = base
    assert isinstance(norm(x), Activation)


def test_pairing_a_layer(layer):
    keys, modules = list(layer.state_dict()), len(list(layer.modules()))
    found = pairing.pair_model(layer)
    assert [(b.name, b.consumer, b.scheme, b.reason) for b in found] == [
        ("input_layernorm", "self_attn.qkv_proj", "fp8_tensor", None),
        ("post_attention_layernorm", "mlp.gate_up_proj", "fp8_tensor", None),
        ("mlp.act_fn", "mlp.down_proj", "fp8_tensor", None),
    ]
    assert list(layer.state_dict()) == keys and len(list(layer.modules())) == modules
    x, residual = signs(), signs(seed=2)
    layer(x, residual)
    linears = layer.self_attn.qkv_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj
    assert all(isinstance(linear.seen[0], Activation) for linear in linears)
    pairing.pair_model(Decoder(None, None))
    assert [b.calls for b in contract.report(layer).boundaries] == [1, 1, 1]


def test_pairing_twice_routes_once(layer):
    pairing.pair_model(layer)
    pairing.pair_model(layer)
    gc.collect()  # models of other tests leave the report
    total = contract.report().total
    norm = layer.input_layernorm
    assert type(norm).__mro__[1] is Norm
    seen = []
    with contract.observe(lambda *call: seen.append(call[0])):
        norm(signs())
    assert seen == ["input_layernorm"] and norm.tq_boundary.calls == 1
    pairing.pair_model(layer)
    assert contract.report().total == total
    pairing.unpair(norm)
    assert type(norm) is Norm and isinstance(norm(signs()), torch.Tensor)


def test_explicit_call_on_a_paired_norm_ignores_the_pairing(layer):
    pairing.pair_model(layer)
    assert isinstance(contract.rms_norm_input_quant(layer.input_layernorm, signs(), None, None), torch.Tensor)


def test_unknown_forward_is_left_alone_with_a_reason(layer):
    class Changed(Decoder):
        def forward(self, x, residual):
            y, residual = self.input_layernorm(x, residual)
            return y * 2, residual

    changed = Changed(Key("static"), 0.25)
    found = pairing.pair_model(changed)
    assert [b.reason for b in found if b.producer == "rms_norm"] == ["the forward of Changed is not a known one"] * 2
    assert type(changed.input_layernorm) is Norm


def test_a_subclass_that_keeps_the_forward_is_paired(layer):
    class Renamed(Decoder):
        pass

    assert all(b.reason is None for b in pairing.pair_model(Renamed(Key("static"), 0.25)))


def test_norm_scaled_before_the_consumer_is_left_alone(layer):
    layer.ada_rms_norm_t_cond = torch.nn.Identity()
    found = {b.name: b.reason for b in pairing.pair_model(layer)}
    assert found["input_layernorm"] is None and "multiplied" in found["post_attention_layernorm"]


def test_norms_stand_aside_but_acts_do_not(layer):
    found = pairing.pair_model(layer, "all-reduce fusion")
    assert [b.reason for b in found] == ["all-reduce fusion", "all-reduce fusion", None]
    expected = "1 of 3 boundaries fused (silu_mul 1); not fused: 2 (all-reduce fusion)"
    assert boundaries.summary(found) == expected


def test_pairing_anew_undoes_what_no_longer_holds(layer):
    pairing.pair_model(layer)
    layer.self_attn.qkv_proj._input_quant_key = None
    found = pairing.pair_model(layer)
    assert found[0].reason == "the consumer takes no quantized input (Linear)" and type(layer.input_layernorm) is Norm


def test_models_that_are_gone_leave_the_report(layer):
    pairing.pair_model(layer)
    gc.collect()
    before = contract.report().total
    other = Decoder(Key("static"), 0.25)
    pairing.pair_model(other)
    assert contract.report().total == before + 3
    del other
    gc.collect()
    assert contract.report().total == before


def test_compiled_layer_equals_eager_for_any_number_of_rows(layer):
    pairing.pair_model(layer)
    norm, linear, graphs = layer.input_layernorm, layer.self_attn.qkv_proj, []

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph

    def run(x, residual):
        y, residual = norm(x, residual)
        return y.data.view(torch.uint8), y.scale, residual

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=keep_graph)
    for m in (3, 5, 8):
        x, residual = signs(m), signs(m, seed=2)
        for got, expected in zip(compiled(x, residual), run(x, residual), strict=True):
            assert torch.equal(got, expected)
    assert len(graphs) == 1 and any("tq.rms_norm" in str(n.target) for n in graphs[0].graph.nodes)
    assert norm.tq_boundary.calls == 3 and linear.seen == []


@pytest.fixture
def unregistered(monkeypatch):
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(boundaries, "_disabled", None)
    monkeypatch.delenv("TQ_DISABLE", raising=False)
    calls = []
    monkeypatch.setattr(vllm, "unsupported_version", lambda: None)
    for name in ("hook_cache_identity", "supply_missing_quantizer", "hook_model_loading"):
        monkeypatch.setattr(vllm, name, lambda *args, name=name: calls.append(name))
    return calls


def test_register_twice_hooks_once(unregistered):
    plugin.register()
    plugin.register()
    assert unregistered == ["hook_cache_identity", "supply_missing_quantizer", "hook_model_loading"]


def test_register_disabled(unregistered, monkeypatch):
    monkeypatch.setenv("TQ_DISABLE", "1")
    plugin.register()
    assert unregistered == [] and contract.report().disabled == "TQ_DISABLE=1"


def test_register_with_an_unsupported_version_warns_once(unregistered, monkeypatch, caplog):
    monkeypatch.setattr(vllm, "unsupported_version", lambda: "vLLM 0.40.0 is not supported")
    monkeypatch.setattr(vllm.logger, "propagate", True)
    plugin.register()
    plugin.register()
    assert unregistered == [] and "0.40.0" in contract.report().disabled


def test_register_never_raises(unregistered, monkeypatch):
    def broken(*args):
        raise RuntimeError("moved")

    monkeypatch.setattr(vllm, "hook_model_loading", broken)
    plugin.register()
    assert "moved" in contract.report().disabled


def test_failed_pairing_leaves_the_model_plain(layer, unregistered, monkeypatch):
    monkeypatch.setattr(vllm, "load_adapter", lambda: None)
    monkeypatch.setattr(vllm, "norms_stand_aside", lambda: None)
    monkeypatch.setattr(boundaries, "record", lambda *args: 1 / 0)
    plugin._after_loading(layer)
    assert type(layer.input_layernorm) is Norm and "division" in contract.report().disabled


def test_fingerprint_names_version_and_sources():
    version, digest = plugin.fingerprint().split(":")
    assert version == tq.__version__ and len(digest) == 16
