"""Runs a two-layer FP8 (static) Llama or Qwen3 in vLLM and writes what tq did to stdout as JSON.

python tests/contract_engine.py [--compile] [--qwen3] [--inductor-rounding NAME]
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# One process, so that the model can be looked at.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
# On CPUs with AMX these come first; they take bf16 activations, so there would be nothing to fuse.
os.environ["VLLM_DISABLED_KERNELS"] = "CPUFP8W8A8ScaledMMLinearKernel,CPUFp8PerTensorScaledMMLinearKernel"

import torch

from tq import contract
from tq.contract import plugin, vllm
from tq.contract.route import NormRounding

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
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
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP8, "input_activations": FP8}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    },
}
# Its MLP calls the activation itself, where Llama's asks vLLM's table of fused ones.
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64}


def unfused_codes(producer, args, kwargs):
    """The codes of vLLM's unfused pair on a CPU: its native module, then its native quantizer; and the residual."""
    x, residual = args[0].float(), None
    if producer == "rms_norm":
        if "residual" in kwargs:
            x = x + kwargs["residual"].float()
            residual = x.to(args[0].dtype)
        y = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + args[2])).to(args[0].dtype) * args[1]
    else:
        half = x.shape[-1] // 2
        y = torch.nn.functional.silu(args[0][..., :half]) * args[0][..., half:]
    return (y.float() * kwargs["scale"].reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn), residual


def order(codes):
    """Codes as integers in the order of their values."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def main():
    if "--inductor-rounding" in sys.argv:
        name = sys.argv[sys.argv.index("--inductor-rounding") + 1]
        vllm.INDUCTOR_ROUNDING["cpu"] = vllm.Rounding(NormRounding(name, False), name)
    contract.register()
    contract.register()
    from vllm import LLM, SamplingParams

    model = Path(tempfile.mkdtemp())
    family = QWEN3 if "--qwen3" in sys.argv else {}
    (model / "config.json").write_text(json.dumps({**CONFIG, **family}))
    llm = LLM(
        model=str(model),
        load_format="dummy",
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
        activation, residual = result if isinstance(result, tuple) else (result, None)
        codes, expected_residual = unfused_codes(producer, args, kwargs)
        steps = (order(activation.data) - order(codes)).abs()
        same = (residual is None) == (expected_residual is None)
        same = same and (residual is None or torch.equal(residual, expected_residual))
        options = {k: v for k, v in kwargs.items() if isinstance(v, str | bool)}
        watched.append(
            {
                "name": name,
                "producer": producer,
                "options": options,
                "worst_step": int(steps.max()),
                "differing": float((steps > 0).float().mean()),
                "residual": bool(same),
            }
        )

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
                "calls": after.calls - before.calls,
                "watched": watched,
                "fingerprint": llm.llm_engine.vllm_config.additional_config.get("tq"),
                "expected_fingerprint": plugin.fingerprint(),
            }
        )
    )


if __name__ == "__main__":
    main()
