"""What a producer hands to the next kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tq.kernels.experts import Experts
from tq.kernels.rules import ScaleInputs
from tq.kernels.schemes import SCHEMES

NO_EXPERTS = Experts()


@dataclass(frozen=True)
class QuantizedActivation:
    """An activation as its consumer reads it: value = decode(data) * scale.

    With a zero point, (decode(data) - zero_point) * scale; with a global scale, decode(data) * scale /
    global_scale_inv.

    data: codes in the scheme's torch dtype, of the producer's output shape (4-bit codes: two a byte, uint8, the last
    size halved), contiguous; its last size may be larger, the codes past the hidden size being 0. scale: one fp32
    element for a static scheme, else the scales of G groups of the M = numel / hidden_size tokens in the order of
    `data`, stored as `layout` says (fp32 [M, G], bytes, or packed; [experts, ...] where each expert has its own).
    orig_dtype, orig_shape: of the activation that was not written. scheme: its name in `SCHEMES`. layout: name of the
    scale layout. zero_point: int32, one element or [M, 1]. global_scale_inv: fp32, one element."""

    data: torch.Tensor
    scale: torch.Tensor
    orig_dtype: torch.dtype
    orig_shape: torch.Size
    scheme: str
    layout: str
    zero_point: torch.Tensor | None = None
    global_scale_inv: torch.Tensor | None = None
    experts: Experts = NO_EXPERTS

    def scales(self) -> torch.Tensor:
        """The scales by logical index whatever their layout, fp32: [M, G]; of a static scheme [1, 1], or [M, 1] where
        experts have their own."""
        scheme, rows = SCHEMES[self.scheme], math.prod(self.orig_shape[:-1])
        if not scheme.dynamic:
            return self._of_each_row(self.scale)
        (layout,) = (layout for layout in scheme.layouts if layout.name == self.layout)
        groups = scheme.groups(self.orig_shape[-1])
        if self.experts.expert_offsets is not None:
            stored = layout.unpack(self.scale, self.scale.shape[0], groups)[self.experts.scale_rows(rows)]
        elif self.scale.dim() == 3:
            stored = torch.cat([layout.unpack(scale, self.orig_shape[-2], groups) for scale in self.scale])
        else:
            stored = layout.unpack(self.scale, rows, groups)
        return scheme.rule.reference_restore(stored)

    def _of_each_row(self, given: torch.Tensor) -> torch.Tensor:
        """One number [1, 1], or that of each row's expert [M, 1]."""
        numbers = given.reshape(-1, 1)
        return numbers if len(numbers) == 1 else numbers[self.experts.of_rows(math.prod(self.orig_shape[:-1]))]

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What the codes stand for, in fp32, rounded to `dtype` (default: orig_dtype), of shape orig_shape."""
        scheme, hidden_size = SCHEMES[self.scheme], self.orig_shape[-1]
        codes = self.data.view(torch.uint8)[..., : hidden_size // scheme.code.per_byte]
        zero: tuple[torch.Tensor, ...] = ()
        if self.zero_point is not None:
            zero = ((self.zero_point if scheme.dynamic else self._of_each_row(self.zero_point)).float(),)
        inverse = None if self.global_scale_inv is None else self._of_each_row(self.global_scale_inv)
        inputs = ScaleInputs(global_scale_inv=inverse)
        values = scheme.reference_values(codes.reshape(-1, codes.shape[-1]), (self.scales(), *zero), inputs)
        return values.to(dtype or self.orig_dtype).view(self.orig_shape)
