"""Activations of several experts in one call: a place of its own for each, or one after the other."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Experts(NamedTuple):
    """Which rows belong to which expert.

    tokens_per_expert [E]: of activations [E, tokens, ...], of which each expert uses its first few. expert_offsets [E +
    1]: first row of each expert, and the end; scale_offsets [E + 1]: the same of the rows of the scales, where their
    layout pads the rows of an expert."""

    tokens_per_expert: torch.Tensor | None = None
    expert_offsets: torch.Tensor | None = None
    scale_offsets: torch.Tensor | None = None

    def of_rows(self, rows: int) -> torch.Tensor:
        """The expert of each of the rows, int64 [rows]."""
        if self.expert_offsets is not None:
            row = torch.arange(rows, device=self.expert_offsets.device)
            expert = torch.searchsorted(self.expert_offsets.long(), row, right=True) - 1
            return expert.clamp(0, len(self.expert_offsets) - 2)
        if self.tokens_per_expert is not None:
            count = len(self.tokens_per_expert)
            return torch.arange(count, device=self.tokens_per_expert.device).repeat_interleave(rows // count)
        return torch.zeros(rows, dtype=torch.int64)

    def exist(self, rows: int) -> torch.Tensor | None:
        """Which of the rows an expert has, bool [rows]; None for all."""
        if self.expert_offsets is not None:
            row = torch.arange(rows, device=self.expert_offsets.device)
            return row < self.expert_offsets[-1]
        if self.tokens_per_expert is not None:
            row = torch.arange(rows // len(self.tokens_per_expert), device=self.tokens_per_expert.device)
            return (row < self.tokens_per_expert.unsqueeze(-1)).flatten()
        return None

    def scale_rows(self, rows: int) -> torch.Tensor:
        """The row of the scales that each row has, int64 [rows], in the form with offsets."""
        offsets = self.expert_offsets
        if offsets is None:
            raise ValueError("Experts: expert_offsets must be given, got None")
        starts = offsets if self.scale_offsets is None else self.scale_offsets
        expert = self.of_rows(rows)
        return torch.arange(rows, device=offsets.device) - offsets.long()[expert] + starts.long()[expert]
