"""Runs a two-layer model with dummy weights in vLLM and writes what tq did to stdout as JSON.

python tests/contract_engine.py [--compile] [--family llama|qwen3|gemma2|qwen3_next] [--smollm2]
                                [--inductor-rounding NAME]
                                [--scheme static|token|block|int8|int8_azp|int8_static|int8_static_azp]

--smollm2: two layers of SmolLM2-135M, its weights quantized here, in place of random ones. Its rows of 576 are no whole
blocks of 128, which vLLM requires of weights.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# One process, so that the model can be looked at.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
# On CPUs with AMX these come first; they take bf16 activations, so there would be nothing to fuse.
os.environ["VLLM_DISABLED_KERNELS"] = (
    "CPUFP8W8A8ScaledMMLinearKernel,CPUFp8PerTensorScaledMMLinearKernel,CPUFp8ChannelWiseScaledMMLinearKernel"
)

import torch

from tq import contract
from tq.contract import plugin, vllm
from tq.contract.route import NormRounding


def compressed(form, kind, weights, activations, dynamic, symmetric=True):
    """A compressed-tensors configuration: what shares a scale among the weights and among the activations."""
    args = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**args, "strategy": weights, "dynamic": False},
        "input_activations": {**args, "strategy": activations, "dynamic": dynamic, "symmetric": symmetric},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


QUANTIZATION = {
    "static": compressed("float-quantized", "float", "tensor", "tensor", False),
    "token": compressed("float-quantized", "float", "channel", "token", True),
    # As Qwen3-FP8 and DeepSeek say it, whose method names no key to anyone.
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "int8": compressed("int-quantized", "int", "channel", "token", True),
    "int8_azp": compressed("int-quantized", "int", "channel", "token", True, symmetric=False),
    "int8_static": compressed("int-quantized", "int", "channel", "tensor", False),
    "int8_static_azp": compressed("int-quantized", "int", "channel", "tensor", False, symmetric=False),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {},
    # Its MLP calls the activation itself, where Llama's asks vLLM's table of fused ones.
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "head_dim": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 128,
        "tie_word_embeddings": True,
    },
    # A layer of a gated delta net, whose norm feeds two projections, and one of attention.
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def unfused(producer, args, kwargs):
    """What vLLM's unfused pair makes on a CPU, its native module and a quantizer: y, codes, scales, and a residual if
    there is one."""
    x, residual = args[0].float(), ()
    if producer.endswith("rms_norm"):
        if "residual" in kwargs:
            x = x + kwargs["residual"].float()
            residual = (x.to(args[0].dtype),)
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + args[2])
        gemma = producer == "gemma_rms_norm"
        y = (y * (1 + args[1].float())).to(args[0].dtype) if gemma else y.to(args[0].dtype) * args[1]
    else:
        gate, up = args[0].chunk(2, -1)
        act = {"silu_mul": torch.nn.functional.silu, "gelu_mul": partial(torch.nn.functional.gelu, approximate="tanh")}
        y = act[producer](gate) * up
    scheme = kwargs["scheme"]
    if scheme.startswith("int8"):
        return y, *unfused_int8(y.float(), kwargs), *residual
    if scheme == "fp8_tensor":
        scaled, scale = y.float() * kwargs["scale"].reciprocal(), kwargs["scale"].view(1, 1)
    else:
        size = 128 if scheme == "fp8_group128" else y.shape[-1]
        groups = y.float().unflatten(-1, (-1, size))
        scale = groups.abs().amax(-1, keepdim=True) / 448
        # vLLM's quantizer of groups multiplies by the reciprocal, that of tokens divides.
        scaled = groups * scale.reciprocal() if size == 128 else groups / scale
        scaled, scale = scaled.flatten(-2), scale.squeeze(-1)
    return y, scaled.clamp(-448, 448).to(torch.float8_e4m3fn), scale, *residual


def unfused_int8(y, kwargs):
    """Codes and scales of vLLM's INT8 quantizers: round(y / scale) + zero point."""
    zero = 0
    if not kwargs["scheme"].startswith("int8_token"):
        scale, zero = kwargs["scale"].view(1, 1), kwargs.get("zero_point", 0)
    elif kwargs["scheme"] == "int8_token_azp":
        low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        scale = (high - low) / 255
        zero = (-128 - low / scale).round()
    else:
        scale = y.abs().amax(-1, keepdim=True) / 127
    return ((y / scale).round() + zero).clamp(-128, 127).to(torch.int8), scale


def order(codes):
    """Codes as integers in the order of their values."""
    if codes.dtype == torch.int8:
        return codes.int()
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def load_random(loader, model, config):
    """In place of vLLM's dummy weights, which are so small that every scale is the least one: values around one."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        normal = torch.randn(parameter.shape, generator=generator)
        if "input_scale" in name:
            values = torch.full(parameter.shape, 0.02)
        elif "input_zero_point" in name:
            values = torch.full(parameter.shape, 5)
        elif "scale" in name:
            values = (1 + 0.1 * normal) / (16 * (127 if "int8" in " ".join(sys.argv) else 1))
        elif parameter.dtype == torch.int8:
            values = (normal * 40).round().clamp(-127, 127)
        else:
            values = 1 + 0.1 * normal if "norm" in name else normal
        parameter.data.copy_(values)


def use_block_kernel():
    """The CPU build has no product of FP8 blocks: one of torch, with the quantizer and the signatures of CUTLASS's."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.platforms import PlatformEnum

    from tq.contract import kernels

    class TorchFp8BlockScaledMMKernel(linear.Fp8BlockScaledMMLinearKernel):
        def __init__(self, config):
            super().__init__(config)
            shape = config.activation_quant_key.scale.group_shape
            self.quant_fp8 = QuantFP8(False, shape, column_major_scales=True, use_ue8m0=False)

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def apply_block_scaled_mm(self, A, B, As, Bs):
            assert A.dtype == B.dtype == torch.float8_e4m3fn
            assert As.stride(0) == 1 or As.shape[0] == 1
            a = (A.float().unflatten(-1, (-1, 128)) * As.unsqueeze(-1)).flatten(-2)
            b = B.float() * Bs.repeat_interleave(128, 0).repeat_interleave(128, 1)
            return (a @ b.T).to(self.config.out_dtype)

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, TorchFp8BlockScaledMMKernel)
    kernels.CONSUMERS[TorchFp8BlockScaledMMKernel] = kernels.CONSUMERS[linear.CutlassFp8BlockScaledMMKernel]


def use_int8_kernel():
    """oneDNN's product takes quantized rows; the one for AMX, which comes first where there is any, quantizes them."""
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    cpu.check_cpu_sgl_kernel = lambda *args: False


def smollm2(folder, scheme):
    """The first two layers of SmolLM2-135M under a scheme, in `folder`."""
    from safetensors.torch import load_file, save_file

    from perf.checkpoints import quantized
    from tq.cli import smollm2

    static = smollm2.first_layers(smollm2.fp8_folder(), 2)
    if scheme == "static":
        return static
    source, weights = smollm2.first_layers(smollm2.bf16_folder(), 2), load_file(static / "model.safetensors")
    calibrated = {name: scale for name, scale in weights.items() if name.endswith("input_scale")}
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        of_weights = "int8_token" if scheme.startswith("int8") else scheme
        weights[name], weights[f"{name}_scale"] = quantized(weights[name].float(), of_weights)
        if "static" in scheme:
            key = name.removesuffix("weight")
            weights[f"{key}input_scale"] = calibrated[f"{key}input_scale"] * 448 / 127
            if scheme.endswith("azp"):
                weights[f"{key}input_zero_point"] = torch.full((1,), 5, dtype=torch.int8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION[scheme]}))
    return folder


def main():
    scheme = sys.argv[sys.argv.index("--scheme") + 1] if "--scheme" in sys.argv else "static"
    if "--inductor-rounding" in sys.argv:
        name = sys.argv[sys.argv.index("--inductor-rounding") + 1]
        vllm.INDUCTOR_ROUNDING["cpu"] = vllm.Rounding(NormRounding(name, False), name)
    contract.register()
    contract.register()
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = load_random
    if scheme == "block":
        use_block_kernel()
    elif scheme.startswith("int8"):
        use_int8_kernel()
    model = Path(tempfile.mkdtemp())
    family = FAMILIES[sys.argv[sys.argv.index("--family") + 1] if "--family" in sys.argv else "llama"]
    if "num_experts" in family:
        from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

        Qwen3NextForCausalLM.set_moe_parameters = lambda self: None  # it insists on a layer with experts
    if "--smollm2" in sys.argv:
        model = smollm2(model, scheme)
    else:
        quantized = {"quantization_config": QUANTIZATION[scheme]}
        (model / "config.json").write_text(json.dumps({**CONFIG, **family, **quantized}))
    llm = LLM(
        model=str(model),
        load_format="auto" if "--smollm2" in sys.argv else "dummy",
        skip_tokenizer_init=True,
        enforce_eager="--compile" not in sys.argv,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        dtype="bfloat16",
    )
    before = contract.report()
    watched = []

    def watch(name, producer, args, kwargs, result):
        activation, *rest = result if isinstance(result, tuple) else (result,)
        y, codes, scales, *expected = unfused(producer, args, kwargs)
        steps = (order(activation.data) - order(codes)).abs()
        expected += [y] if kwargs.get("return_unquantized") else []
        same = [torch.equal(got, wanted) for got, wanted in zip(rest, expected, strict=True)]
        options = {k: v for k, v in kwargs.items() if isinstance(v, str | bool)}
        watched.append(
            {
                "name": name,
                "producer": producer,
                "options": options,
                "worst_step": int(steps.max()),
                "worst_scale": float((activation.scales() / scales - 1).abs().max()),
                "differing": float((steps > 0).float().mean()),
                "others": same,
            }
        )

    from vllm import _custom_ops

    quantizer, quantized = _custom_ops.onednn_scaled_int8_quant, []

    def quantize(x, *rest):
        quantized.append(x.shape[-1])
        return quantizer(x, *rest)

    _custom_ops.onednn_scaled_int8_quant = quantize
    prompts = [{"prompt_token_ids": [1, 5, 9]}, {"prompt_token_ids": [1, 7]}]
    with contract.observe(watch):
        outputs = llm.generate(prompts, SamplingParams(max_tokens=3, detokenize=False, temperature=0, ignore_eos=True))
    after = contract.report()
    print(
        "RESULT "
        + json.dumps(
            {
                "tokens": [list(o.outputs[0].token_ids) for o in outputs],
                "boundaries": [[b.name, b.consumer, b.scheme, b.reason] for b in after.boundaries],
                "kernels": sorted({f"{b.kernel} {b.layout}" for b in after.boundaries}),
                "calls": after.calls - before.calls,
                "watched": watched,
                "quantized_by_int8_kernels": len(quantized),
                "fingerprint": llm.llm_engine.vllm_config.additional_config.get("tq"),
                "expected_fingerprint": plugin.fingerprint(),
            }
        )
    )


if __name__ == "__main__":
    main()
