"""Frobenius norms of a tensor and of its updates, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coram_hf.geometry.slices import as_rows, row_blocks, scratch

RUN = 1024
"""Entries whose squares are summed in float32."""

SMALLEST = 1e-20
"""Sums of squares in float32 below this may lack what was too small for it."""


def squared_norm(tensor: Tensor) -> float:
    """|W|^2."""
    return squared_norms(tensor, [])[0]


def squared_norms(
    base: Tensor, experts: Sequence[Tensor], *, exact: bool = True
) -> tuple[float, list[float]]:
    """|W_0|^2 and |W_i - W_0|^2 of every expert, for tensors of any shape.

    Unless `exact`, those of 16-bit tensors are computed in float32, to 1e-6, in less than half the time.
    """
    origin, *others = (as_rows(t.detach()) for t in (base, *experts))
    narrow = not exact and all(t.dtype.itemsize <= 2 for t in (base, *experts))
    totals = [0.0] * (1 + len(experts))
    for rows in row_blocks(origin):
        blocks = [origin[rows], *(other[rows] for other in others)]
        found = _rounded_squares(blocks) if narrow else None
        for i, square in enumerate(found or _squares(blocks, torch.float64)):
            totals[i] += square
    return totals[0], totals[1:]


def _rounded_squares(blocks: Sequence[Tensor]) -> list[float] | None:
    """Squares in float32, or None if some may have over- or underflowed."""
    found = _squares(blocks, torch.float32)
    return found if all(map(math.isfinite, found)) else None


def _squares(blocks: Sequence[Tensor], dtype: torch.dtype) -> list[float]:
    """|W_0|^2 and |W_i - W_0|^2 of some rows."""
    base = _copy("norms base", blocks[0], dtype)
    return [_square(base), *(_square(_copy("norms expert", other, dtype).sub_(base)) for other in blocks[1:])]


def _square(values: Tensor) -> float:
    """|x|^2, in float32 summed over runs of entries, and in float64 over these; NaN if too small for it."""
    if values.dtype == torch.float64:
        return torch.dot(values, values).item()
    whole = len(values) - len(values) % RUN
    runs, rest = values[:whole].view(-1, 1, RUN), values[whole:]
    found = torch.bmm(runs, runs.mT).sum(dtype=torch.float64).item() + torch.dot(rest, rest).item()
    return math.nan if found < SMALLEST and values.any() else found


def _copy(use: str, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """A flat copy in reused memory."""
    copy = scratch(use, rows.numel(), dtype)
    copy.view(rows.shape).copy_(rows)
    return copy
