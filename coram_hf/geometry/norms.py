"""Frobenius norms of a tensor and of its updates, in float64 and in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coram_hf.geometry.slices import row_blocks


def squared_norm(tensor: Tensor) -> float:
    """|W|^2."""
    return squared_norms(tensor, [])[0]


def squared_norms(base: Tensor, experts: Sequence[Tensor]) -> tuple[float, list[float]]:
    """|W_0|^2 and |W_i - W_0|^2 of every expert, for tensors of any shape."""
    origin, *others = (t.detach().reshape(t.shape or 1) for t in (base, *experts))
    totals = torch.zeros(1 + len(experts), dtype=torch.float64)
    for rows in row_blocks(origin):
        block = origin[rows].to("cpu", torch.float64)
        totals[0] += torch.linalg.vector_norm(block).square()
        for i, other in enumerate(others, start=1):
            totals[i] += torch.linalg.vector_norm(other[rows].to("cpu", torch.float64) - block).square()
    return totals[0].item(), totals[1:].tolist()
