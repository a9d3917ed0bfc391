"""What a producer hands to the next kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tq.kernels.schemes import SCHEMES


@dataclass(frozen=True)
class QuantizedActivation:
    """An activation as its consumer reads it: value = decode(data) * scale.

    data: codes in the scheme's torch dtype, of the producer's output shape, contiguous. scale: one fp32 element for a
    static scheme, else the scales of G groups of the M = numel / hidden_size tokens in the order of `data`, stored as
    `layout` says (fp32 [M, G], or packed). orig_dtype, orig_shape: of the activation that was not written. scheme: its
    name in `SCHEMES`. layout: name of the scale layout.
    """

    data: torch.Tensor
    scale: torch.Tensor
    orig_dtype: torch.dtype
    orig_shape: torch.Size
    scheme: str
    layout: str

    def scales(self) -> torch.Tensor:
        """The scales by logical index whatever their layout, fp32: [M, G], or [1, 1] of a static scheme."""
        scheme = SCHEMES[self.scheme]
        if not scheme.dynamic:
            return self.scale.reshape(1, 1)
        (layout,) = (layout for layout in scheme.layouts if layout.name == self.layout)
        return scheme.rule.reference_restore(layout.unpack(self.scale, scheme.groups(self.data.shape[-1])))

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """decode(data) * scale in fp32, rounded to `dtype` (default: orig_dtype), of shape orig_shape."""
        scheme = SCHEMES[self.scheme]
        codes = self.data.view(torch.uint8).reshape(-1, self.data.shape[-1])
        values = scheme.code.reference_decode(codes)
        values = values.unflatten(-1, (-1, scheme.group or max(values.shape[-1], 1))) * self.scales().unsqueeze(-1)
        return values.flatten(-2).to(dtype or self.orig_dtype).view(self.orig_shape)
