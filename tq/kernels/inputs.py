"""What a call gives besides the producer's arguments: scales and experts, checked."""

from __future__ import annotations

import torch

from tq.kernels.experts import Experts
from tq.kernels.producer import INPUT_DTYPES, MAX_HIDDEN_SIZE, Bound, Replaced, check_like
from tq.kernels.rules import ScaleInputs
from tq.kernels.schemes import Scheme

# What the caller may give of a scale, in the order of `ScaleInputs`.
INPUT_NAMES = ScaleInputs._fields[:-2]
EXPERT_NAMES = Experts._fields
SHARED_TENSORS = frozenset((*INPUT_NAMES, *EXPERT_NAMES))


def check_inputs(
    op: str,
    scheme: Scheme,
    stands_for: Replaced,
    inputs: dict[str, torch.Tensor | None],
    min_scale: float | None,
    hidden_size: int,
    device: torch.device,
    experts: int,
) -> float:
    """The least scale. Raises unless the scheme has what its rule needs and nothing else."""
    rule = scheme.rule
    given = [tensor for name, tensor in inputs.items() if name in rule.needs and isinstance(tensor, torch.Tensor)]
    count = experts if experts > 1 and given and given[0].numel() == experts else 1
    for name, tensor in inputs.items():
        if tensor is None:
            if name in rule.needs:
                wanted = "one-element int32 tensor" if name == "zero_point" else "one-element fp32 tensor"
                raise ValueError(f"{op}: {name} must be given for {scheme.name}, got None; pass a {wanted}")
        elif name == "smooth_scale":
            check_smooth_scale(op, tensor, hidden_size, device)
        elif name in (*rule.needs, *rule.takes):
            dtype = torch.int32 if name == "zero_point" else torch.float32
            check_numbers(op, name, tensor, device, dtype, count if name in rule.needs else 1)
        else:
            reason = "its scales are computed" if scheme.dynamic else "its scale is given"
            raise ValueError(f"{op}: {name} must be None for {scheme.name}, got a tensor; {reason}")
    if min_scale is None:
        return scheme.min_scale if stands_for.min_scale is None else stands_for.min_scale
    if "scale_ub" not in rule.takes:
        raise ValueError(f"{op}: min_scale must be None for {scheme.name}, got {min_scale}; its scales have no bounds")
    if not min_scale >= rule.least_min_scale:
        raise ValueError(f"{op}: min_scale must be at least {rule.least_min_scale}, got {min_scale}")
    return min_scale


def check_width(op: str, data_width: int | None, hidden_size: int, unit: int) -> int:
    """Columns of the codes: the hidden size, or more."""
    if data_width is None:
        return hidden_size
    if not hidden_size <= data_width <= MAX_HIDDEN_SIZE or data_width % unit:
        raise ValueError(
            f"{op}: data_width must be a multiple of {unit} from the hidden size on, in [{hidden_size}, "
            f"{MAX_HIDDEN_SIZE}], got {data_width}"
        )
    return data_width


def check_experts(op: str, experts: Experts, bound: Bound, padded: bool) -> int:
    """Number of experts; 0 where there are none. `padded`: the scales of each fill tiles."""
    counts, offsets, scale_offsets = experts
    if scale_offsets is not None and offsets is None:
        raise ValueError(f"{op}: scale_offsets needs expert_offsets, got None; pass the first token of each expert")
    if counts is None and offsets is None:
        return 0
    if counts is not None and offsets is not None:
        raise ValueError(f"{op}: tokens_per_expert or expert_offsets must be None, got both; pass the one that fits x")
    if counts is not None and len(bound.shape) != 3:
        raise ValueError(
            f"{op}: tokens_per_expert needs activations [experts, tokens, hidden size], got shape {tuple(bound.shape)}"
        )
    if offsets is not None and padded != (scale_offsets is not None):
        need = "must be given" if padded else "must be None"
        raise ValueError(
            f"{op}: scale_offsets {need} with expert_offsets for this layout of the scales, got {scale_offsets}; pass "
            f"the first row of the scales of each expert where a layout has tiles of rows"
        )
    for name, tensor in zip(EXPERT_NAMES, experts, strict=True):
        if tensor is not None:
            check_integers(op, name, tensor, bound.device)
    if counts is not None:
        check_like(op, "tokens_per_expert", counts, torch.Size(bound.shape[:1]), bound.device)
        return bound.shape[0]
    if offsets is None or offsets.numel() < 2:
        raise ValueError(f"{op}: expert_offsets must have an element more than there are experts, got {offsets}")
    if scale_offsets is not None:
        check_like(op, "scale_offsets", scale_offsets, offsets.shape, bound.device)
    return offsets.numel() - 1


def check_integers(op: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises unless `tensor` is a contiguous vector of integers on `device`."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        came = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(f"{op}: {name} must be an int32 or int64 tensor, got {came}")
    if tensor.dim() != 1 or (tensor.numel() > 1 and tensor.stride(0) != 1):
        raise ValueError(
            f"{op}: {name} must be contiguous with one dimension, got shape {tuple(tensor.shape)} with strides "
            f"{tuple(tensor.stride())}; pass {name}.contiguous()"
        )
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} as x is, got {tensor.device}; move it there")


def check_smooth_scale(op: str, tensor: torch.Tensor, hidden_size: int, device: torch.device) -> None:
    """Raises unless `tensor` has one number for each column."""
    check_like(op, "smooth_scale", tensor, torch.Size((hidden_size,)), device)
    if tensor.dtype not in INPUT_DTYPES:
        raise TypeError(f"{op}: smooth_scale must be bfloat16, float16 or float32, got {tensor.dtype}; cast it first")
    if tensor.stride(0) != 1:
        raise ValueError(f"{op}: stride of smooth_scale must be 1, got {tensor.stride(0)}; pass it contiguous")


def check_scalar(op: str, name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raises unless `tensor` is one fp32 number on `device`."""
    check_numbers(op, name, tensor, device, torch.float32, 1)


def check_numbers(
    op: str, name: str, tensor: torch.Tensor, device: torch.device, dtype: torch.dtype, count: int
) -> None:
    """Raises unless `tensor` has `count` numbers of `dtype` on `device`."""
    wanted = str(dtype).removeprefix("torch.")
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
        came = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{op}: {name} must be a {wanted} tensor, got {came}; pass torch.tensor([value])")
    if tensor.numel() != count:
        number = "one element" if count == 1 else f"{count} elements, one for each expert"
        raise ValueError(f"{op}: {name} must have {number}, got shape {tuple(tensor.shape)}")
    if count > 1 and not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} must be contiguous, got strides {tuple(tensor.stride())}")
    if tensor.device != device:
        raise ValueError(f"{op}: {name} must be on {device} as x is, got {tensor.device}; move it there")
