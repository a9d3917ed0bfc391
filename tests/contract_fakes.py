"""Objects of vLLM's shape for the tests of the contract, so that these always run."""

from __future__ import annotations

import dataclasses
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tq.contract import consumers, pairing, route, sites
from tq.contract.consumers import Consumer, Reads

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
    reads: Reads | None = None


class Adapter:
    """`tq.contract.route.Adapter` for the classes below."""

    def __init__(self):
        self.native = {
            key: Reads(key, scheme, "row_major")
            for key, scheme in (
                (Key("static"), "fp8_tensor"),
                (Key("token"), "fp8_token"),
                (Key("group"), "fp8_group128"),
            )
        }
        self.consumers = {}
        self.refuses_all = None
        self.norm_rounding = route.NormRounding("before_and_after_weight", False)

    def get_input_quant_key(self, linear):
        if getattr(linear, "requires_unquantized_input", False):
            return None
        return getattr(linear, "_input_quant_key", None)

    def reads(self, kernel, key):
        found = getattr(kernel, "tq_reads", None)
        return found if found is not None and found.key == key else self.native.get(key)

    def accept(self, linear):
        return consumers.accept(linear, self.consumers)

    def withdraw(self, linear):
        consumers.withdraw(linear)

    def producer_of(self, module):
        return {Norm: "rms_norm", Act: "silu_mul"}.get(getattr(type(module), "tq_base", type(module)))

    def rounding(self, producer, reads, has_residual):
        if producer == "silu_mul":
            return {"rounding": "activation_and_product"}
        return None if self.norm_rounding is None else self.norm_rounding.options(has_residual)

    def implementation(self, producer, has_residual):
        return self.norm_rounding

    def wrap(self, reads, data, scale, dtype, shape, zero_point=None):
        return Activation(data, scale, dtype, shape, reads.key, reads)


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


class Kernel:
    """Quantizes its own input to E4M3 with one scale for 128 elements, as vLLM's block kernels do."""

    layer_param_names = ("weight", "weight_scale", "input_scale", "input_scale_ub")

    def __init__(self, layout="column_major", key="own"):
        self.layout, self.key = layout, Key(key)

    def input_quant_key(self):
        return None

    def apply_weights(self, layer, x, bias=None):
        grouped = x.float().unflatten(-1, (-1, 128))
        scale = grouped.abs().amax(-1, keepdim=True) / 448
        codes = (grouped * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        return self.product(codes.flatten(-2), scale.squeeze(-1), bias)

    def product(self, codes, scale, bias):
        y = (codes.float().unflatten(-1, (-1, 128)) * scale.unsqueeze(-1)).flatten(-2)
        return y if bias is None else y + bias


KERNEL_ENTRY = Consumer(
    lambda kernel: Reads(kernel.key, "fp8_group128", kernel.layout),
    lambda kernel, layer, activation, bias: kernel.product(activation.data, activation.scale, bias),
)


class KernelLinear(torch.nn.Module):
    """A layer whose kernel names no key."""

    def __init__(self, kernel=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(HIDDEN, device=DEVICE), requires_grad=False)
        self.quant_method = type("Method", (), {})()
        self.quant_method.fp8_linear = kernel or Kernel()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return self.quant_method.fp8_linear.apply_weights(self, x)


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
    def __init__(self, linear):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm(1e-5)
        self.self_attn = Attention(linear())
        self.mlp = Mlp(linear(), linear())

    def forward(self, x, residual):
        y, residual = self.input_layernorm(x, residual)
        y = self.self_attn(y).to(x.dtype)
        y, residual = self.post_attention_layernorm(y, residual)
        return self.mlp(y), residual


def known_decoder(monkeypatch, linear=None):
    """One decoder whose forwards count as known ones; linear(): makes its linear layers."""
    layer = Decoder(linear or (lambda: Linear(Key("static"), 0.25)))
    hands = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp"}
    unless = {"post_attention_layernorm": (sites.Unless("scaled_by", "the norm's output is multiplied"),)}
    forwards = (
        sites.Forward(pairing.forward_hash(layer), "", hands=hands, unless=unless),
        sites.Forward(pairing.forward_hash(layer.self_attn), "", enters="qkv_proj"),
        sites.Forward(pairing.forward_hash(layer.mlp), "", enters="gate_up_proj", feeds={"act_fn": "down_proj"}),
    )
    monkeypatch.setattr(pairing, "BY_SHA", {forward.sha: forward for forward in forwards})
    return layer


def signs(m=3, seed=1):
    """+-2 everywhere: the mean square is exactly 4, so norm(x) is exactly +-weight."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (m, HIDDEN), generator=generator) * 4.0 - 2.0).to(torch.bfloat16).to(DEVICE)


def e4m3(y, scale):
    return (y.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def bits(x):
    return x.view(torch.uint8)


def repeat_calls(monkeypatch):
    """Calls repeat (`tq.contract.repeat`) though kernels are interpreted: each goes the way of a compiled one, whose
    launch is made here. Returns the list of what was repeated, which grows."""
    from tq.contract import repeat
    from tq.kernels import launch, plan

    interpret, repeated = launch.launch, []

    def first(prepared):
        interpret(prepared)
        return {prepared.plan.launch.grid: None}

    def later(again, given, final=False):
        (known,) = [each for each in plan._plans.values() if each.again is again]
        count = len(given) - len(again.names)
        named = dict(zip(again.names, given[count:], strict=True))
        prepared = plan.fill(known, tuple(given[:count]), named)
        interpret(prepared)
        codes, *rest = launch.outputs_of(prepared)
        return [codes.view(known.scheme.code.torch_dtype) if final else codes, *rest]

    def of_boundary(again, given, final=False):
        repeated.append(again)
        return later(again, given, final)

    monkeypatch.setattr(launch, "launch", first)
    monkeypatch.setattr(launch, "launch_again", later)
    monkeypatch.setattr(repeat, "launch_again", of_boundary)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(plan, "_plans", plan.Plans())
    monkeypatch.setattr(plan.Plans, "remember", lambda self, known: None)  # what is called directly is launched above
    return repeated
