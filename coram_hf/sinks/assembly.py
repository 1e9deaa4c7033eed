"""W_0 + coefficient * update, rounded to the result's dtype, a few rows at a time."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from coram_hf.geometry import update_dtype
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
    """The same for some rows: the sum is made in float64 and rounded once; the loss goes into the record.

    The update counts as a kept one does: in the dtype that holds it, float32 for weights up to float32.
    """
    total = _scratch(update.numel()).view(update.shape)
    kept = update.to("cpu", update_dtype(base))
    record.moved += coefficient**2 * float(torch.linalg.vector_norm(kept)) ** 2
    total.copy_(base[rows]).add_(kept, alpha=coefficient)
    if isinstance(rows, slice) and out.device.type == "cpu":
        rounded = out[rows]
        rounded.copy_(total)
    else:
        rounded = total.to(out.dtype)
        out[rows] = rounded.to(out.device)
    if rounded.dtype != torch.float64:
        record.lost += float(torch.linalg.vector_norm(total.sub_(rounded))) ** 2


_local = threading.local()


def _scratch(size: int) -> Tensor:
    """A float64 buffer of this thread; memory that is asked for anew each time is slow to come."""
    buffer: Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.buffer = torch.empty(size, dtype=torch.float64)
    return buffer[:size]


def rounding_loss(record: Record) -> float:
    """|rounding error| / |update| over all that was written."""
    return math.sqrt(record.lost / record.moved) if record.moved else 0.0
