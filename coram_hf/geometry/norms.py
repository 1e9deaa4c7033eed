"""Frobenius norms of a tensor and of its updates, in float64 and in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coram_hf.geometry.slices import as_rows, row_blocks, scratch


def squared_norm(tensor: Tensor) -> float:
    """|W|^2."""
    return squared_norms(tensor, [])[0]


def squared_norms(base: Tensor, experts: Sequence[Tensor]) -> tuple[float, list[float]]:
    """|W_0|^2 and |W_i - W_0|^2 of every expert, for tensors of any shape."""
    origin, *others = (as_rows(t.detach()) for t in (base, *experts))
    totals = [0.0] * (1 + len(experts))
    for rows in row_blocks(origin):
        block = _double("norms base", origin[rows])
        totals[0] += torch.dot(block, block).item()
        for i, other in enumerate(others, start=1):
            update = _double("norms expert", other[rows]).sub_(block)
            totals[i] += torch.dot(update, update).item()
    return totals[0], totals[1:]


def _double(use: str, rows: Tensor) -> Tensor:
    """A flat float64 copy in reused memory."""
    copy = scratch(use, rows.numel(), torch.float64)
    copy.view(rows.shape).copy_(rows)
    return copy
