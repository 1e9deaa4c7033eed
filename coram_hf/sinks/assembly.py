"""W_0 + coefficient * update, rounded to the result's dtype, a few rows at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coram_hf.geometry.slices import row_blocks
from coram_hf.record import Record


def write(out: Tensor, base: Tensor, update: Tensor, coefficient: float, record: Record) -> None:
    """Fill a tensor of any shape with W_0 + coefficient * update."""
    flat, origin, delta = (t.reshape(t.shape or 1) for t in (out, base, update))
    for rows in row_blocks(flat):
        write_rows(flat, origin, rows, delta[rows], coefficient, record)


def write_rows(
    out: Tensor, base: Tensor, rows: slice | Tensor, update: Tensor, coefficient: float, record: Record
) -> None:
    """The same for some rows: the sum is made in float64 and rounded once; the loss goes into the record."""
    wide, change = base[rows].to("cpu", torch.float64), update.to("cpu", torch.float64)
    moved = float(torch.linalg.vector_norm(change))
    total = change.mul_(coefficient) if change is not update else change * coefficient
    total += wide
    rounded = total.to(out.dtype)
    out[rows] = rounded.to(out.device)
    record.moved += (coefficient * moved) ** 2
    if rounded.dtype != torch.float64:
        record.lost += float(torch.linalg.vector_norm(total.sub_(rounded))) ** 2


def rounding_loss(record: Record) -> float:
    """|rounding error| / |update| over all that was written."""
    return math.sqrt(record.lost / record.moved) if record.moved else 0.0
