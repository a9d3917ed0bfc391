"""Everything that depends on vLLM's internals. Imports vLLM only when called; supports the releases in `SUPPORTED`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tq.contract import consumers, scales
from tq.contract.consumers import Reads
from tq.contract.route import NormRounding, state

# Those whose sources were read and tested against: release -> whether only its CPU build.
SUPPORTED = {"0.33.0": False, "0.32.0": True}

# Below the "vllm" logger, so that the line appears where vLLM's own do.
logger = logging.getLogger("vllm.tq")


def unsupported_version() -> str | None:
    """Why the installed vLLM cannot be used, or `None`."""
    try:
        from vllm.version import __version__ as version
    except ImportError:
        return "vLLM is not installed"
    only_cpu = SUPPORTED.get(version.split("+")[0])  # what follows says how it was built
    if only_cpu is None:
        return f"vLLM {version} is not supported (supported: {', '.join(SUPPORTED)})"
    return f"vLLM {version} is supported as its CPU build alone" if only_cpu and not on_cpu() else None


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


# vLLM runs RMSNorm through an operator with several implementations: its CUDA kernel in eager mode, the torch formula
# on CPU and when Inductor compiles the model. The two round at different places, and a fused producer must give what
# the unfused pair would have given in this process. The order is set once per worker, before models are loaded; other
# conditions of the CUDA kernel (whole-row variance, equal dtypes) are those of the fused route already.
_NORM_ROUNDING = {
    "native": NormRounding("before_and_after_weight", False),
    "vllm_c": NormRounding("after_weight", True, in_place=True),
}

_GEMMA_ROUNDING = NormRounding("after_weight", False)

# bf16(bf16(act(gate)) * up) is what both the module's torch formula and vLLM's kernel compute.
_ACT_ROUNDING = "activation_and_product"


class Rounding(NamedTuple):
    """Rounding policies of `tq.rms_norm` and `tq.silu_mul`, see there."""

    norm: NormRounding
    act: str


# The torch formulas compiled by Inductor together with the quantizer after them, by vLLM's device type. Inductor leaves
# out the roundings between operations that it fuses: with torch 2.13 on a CPU and a static scale, no code of 131,072
# differs from those of unrounded values, and 2 % differ from those with both roundings.
INDUCTOR_ROUNDING = {
    "cuda": Rounding(NormRounding("none", False), "none"),
    "cpu": Rounding(NormRounding("none", False), "none"),
}

# The same before a quantizer that Inductor does not see into, for which the activation is written, and so rounded once:
# no code of 131,072 differs. vLLM's quantizers of FP8 are seen into unless switched on as operators, which it does
# itself for models with blocks; all others never are.
WRITTEN_ROUNDING = Rounding(NormRounding("after_weight", False), "product")


# vLLM's operators without and with a residual; set by the adapter, since an import costs time in each forward.
_norm_ops: tuple[Any, Any]


@torch.compiler.assume_constant_result
def _norm_implementation(has_residual: bool) -> str:
    order = _norm_ops[has_residual].get_priority()
    return order[0] if order else "native"


class VllmAdapter:
    """`tq.contract.route.Adapter` for the supported releases of vLLM."""

    def __init__(self) -> None:
        global _norm_ops
        from vllm import envs, ir
        from vllm.model_executor.layers.activation import GeluAndMul, ReLUSquaredActivation, SiluAndMul
        from vllm.model_executor.layers.fusion import fused_act_quant, quant_activation
        from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
        from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
        from vllm.model_executor.layers.quantization.utils import quant_utils
        from vllm.utils.torch_utils import weak_ref_tensor

        from tq.contract.kernels import CONSUMERS

        @dataclass
        class Activation(quant_activation.QuantizedActivation):
            """vLLM's activation, which says what it is; int32 zero points where a kernel reads them.

            shape, dtype, device and size() are those of the tensor that it stands for: modules size their outputs by
            their input.
            """

            reads: Reads
            zero_point: torch.Tensor | None = None

            @property
            def shape(self) -> torch.Size:
                return self.orig_shape

            @property
            def dtype(self) -> torch.dtype:
                return self.orig_dtype

            @property
            def device(self) -> torch.device:
                return self.data.device

            def size(self, dim: int | None = None) -> Any:
                return self.orig_shape if dim is None else self.orig_shape[dim]

            def weak_ref(self) -> Any:
                weak: Any = super().weak_ref()
                if self.zero_point is not None:
                    weak.zero_point = weak_ref_tensor(self.zero_point)
                return weak

        _norm_ops = (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)
        self._silu_mul, self._quantizer = SiluAndMul, QuantFP8
        self._acts: dict[str, Any] = {"silu_mul": SiluAndMul, "gelu_mul": GeluAndMul, "relu2": ReLUSquaredActivation}
        self._producers = {
            RMSNorm: "rms_norm",
            GemmaRMSNorm: "gemma_rms_norm",
            **{act: name for name, act in self._acts.items()},
        }
        # On some GPUs vLLM has its own op for relu2 and a static scale, which rounds before it quantizes.
        self._own_relu2 = (ReLUSquaredActivation, quant_utils.kFp8StaticTensorSym) in fused_act_quant._FUSED_ACT_QUANT
        self._activation = Activation
        self._consumers = CONSUMERS
        self.get_input_quant_key = quant_activation.get_input_quant_key
        scales.own_accessor = getattr(quant_activation, "get_input_quant_scales", None)
        # What a kernel of vLLM reads that names its key itself. FP8 keys carry fnuz codes on some AMD GPUs.
        self.native = {
            reads.key: reads
            for reads in (
                Reads(quant_utils.kFp8StaticTensorSym, "fp8_tensor", "row_major"),
                Reads(quant_utils.kFp8DynamicTokenSym, "fp8_token", "row_major"),
                Reads(quant_utils.kFp8Dynamic128Sym, "fp8_group128", "row_major"),
                # FlashInfer takes scales of two dimensions for row-major ones.
                Reads(quant_utils.kMxfp8Dynamic, "mxfp8", "swizzled_128x4", flat=True),
                Reads(quant_utils.kNvfp4Dynamic, "nvfp4", "swizzled_128x4"),
            )
            if reads.key.dtype != torch.float8_e4m3fnuz and consumers.has_scheme(reads.scheme, reads.layout)
        }
        # Read once: a process does not change its mode, and reading the environment costs time in each forward.
        self.refuses_all = "batch-invariant mode uses its own kernels" if envs.VLLM_BATCH_INVARIANT else None
        self._inductor: Rounding | None = None
        self._fp8_is_written = False
        # Producer -> whether the module it stands for runs its torch formula in compiled code.
        self._native_acts: dict[str, bool] = {}

    def reads(self, kernel: Any, key: Any) -> Reads | None:
        found = getattr(kernel, "tq_reads", None)
        return found if found is not None and found.key == key else self.native.get(key)

    def accept(self, linear: Any) -> str | None:
        return consumers.accept(linear, self._consumers)

    def withdraw(self, linear: Any) -> None:
        consumers.withdraw(linear)

    def follow_compilation(self) -> None:
        """Take the rounding of compiled code from the configuration of the model being loaded."""
        from vllm.config import get_current_vllm_config_or_none
        from vllm.platforms import current_platform

        config = get_current_vllm_config_or_none()
        inductor = config is not None and config.compilation_config.backend == "inductor"
        self._fp8_is_written = inductor and self._quantizer.enabled()
        self._inductor = INDUCTOR_ROUNDING.get(current_platform.device_type) if inductor else None
        self._native_acts = {
            name: inductor and (current_platform.is_cpu() or not act.enabled()) for name, act in self._acts.items()
        }

    def producer_of(self, module: Any) -> str | None:
        # The exact class: subclasses and out-of-tree replacements may compute something else.
        kind = type(module)
        return self._producers.get(getattr(kind, "tq_base", kind))

    def norm_rounding(self, has_residual: bool, inductor: Rounding | None = None) -> NormRounding | None:
        implementation = _norm_implementation(has_residual)
        return inductor.norm if implementation == "native" and inductor else _NORM_ROUNDING.get(implementation)

    def rounding(self, producer: str, reads: Reads, has_residual: bool) -> dict[str, Any] | None:
        inductor = self._inductor if torch.compiler.is_compiling() else None
        if inductor is not None and (self._fp8_is_written or not reads.scheme.startswith("fp8")):
            inductor = WRITTEN_ROUNDING
        if producer == "rms_norm":
            found = self.norm_rounding(has_residual, inductor)
            return None if found is None else found.options(has_residual)
        if producer == "gemma_rms_norm":
            # Always the torch formula: no kernel of vLLM's takes the fp32 weight 1 + w.
            return (_GEMMA_ROUNDING if inductor is None else inductor.norm).options(has_residual)
        native = self._native_acts.get(producer, False)
        rounding = inductor.act if inductor is not None and native else _ACT_ROUNDING
        if producer == "relu2":
            own = self._own_relu2 and reads.scheme == "fp8_tensor"
            rounding = "none" if rounding == "none" and not own else "output"
        return {"rounding": rounding}

    def implementation(self, producer: str, has_residual: bool) -> str:
        return _norm_implementation(has_residual) if producer == "rms_norm" else ""

    def wrap(
        self,
        reads: Reads,
        data: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        shape: torch.Size,
        zero_point: torch.Tensor | None = None,
    ) -> Any:
        if scale.dtype is not torch.float32 and scale.dtype is not torch.int32:
            scale = scale.view(reads.key.scale.dtype)  # one byte each, whatever they are called
        if reads.flat:
            scale = scale.view(-1)
        return self._activation(data, scale, dtype, shape, reads.key, reads, zero_point)


def load_adapter() -> None:
    """Set the contract's adapter and the rows of vLLM's table, once; follow the current configuration."""
    if state.adapter is None and unsupported_version() is None:
        state.adapter = VllmAdapter()
        if state.adapter.refuses_all is None:
            _add_rows(state.adapter)
    if isinstance(state.adapter, VllmAdapter):
        state.adapter.follow_compilation()


def _add_rows(adapter: VllmAdapter) -> None:
    from vllm.model_executor.layers.fusion import fused_act_quant

    from tq.contract.pairing import act_row, act_row_supports

    rows, supports = fused_act_quant._FUSED_ACT_QUANT, fused_act_quant._FUSED_ACT_QUANT_SUPPORT
    for key in adapter.native:
        row = (adapter._silu_mul, key)
        # CPU builds have rows without the operators behind them.
        own = None if on_cpu() else rows.get(row)
        rows[row], supports[row] = act_row(own), act_row_supports(own, supports.get(row))


def norms_stand_aside() -> str | None:
    """Why norms must stay visible to vLLM's compiler passes in the model being loaded, or `None`.

    No pass of the supported releases shards norms over the sequence; what models do of that is in `sites`.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    passes = getattr(getattr(config, "compilation_config", None), "pass_config", None)
    if getattr(passes, "fuse_allreduce_rms", False):
        return "vLLM fuses the norm with the all-reduce before it"
    return None
