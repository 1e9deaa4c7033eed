"""W_0 + coefficient * update, rounded to the result's dtype, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from coram_hf.errors import CoramError
from coram_hf.geometry import update_dtype
from coram_hf.geometry.scratch import scratch
from coram_hf.geometry.slices import as_rows, row_blocks
from coram_hf.methods.record import Record
from coram_hf.outputs.file_tensor import Output


def write(out: Output, base: Tensor, update: Tensor, coefficient: float, record: Record) -> None:
    """Fill a tensor of any shape with W_0 + coefficient * update."""
    write_blocks(out, base, as_rows(update).__getitem__, coefficient, record)


def write_blocks(
    out: Output, base: Tensor, update: Callable[[slice], Tensor], coefficient: float, record: Record
) -> None:
    """The same with an update that is made when it is asked for, some rows at a time."""
    if out.shape != base.shape:
        raise CoramError(f"{tuple(base.shape)} does not fit in a place for {tuple(out.shape)}")
    origin = as_rows(base)
    place = out.view(origin.shape)
    for rows in row_blocks(origin):
        write_rows(place, origin, rows, update(rows), coefficient, record)


def write_rows(
    out: Output, base: Tensor, rows: slice | Tensor, update: Tensor, coefficient: float, record: Record
) -> None:
    """The same for some rows: the sum is made in float64 and rounded once; the loss goes into the record.

    The update counts as a kept one does: in the dtype that holds it, float32 for weights up to float32.
    """
    total = scratch("total", update.numel(), torch.float64).view(update.shape)
    kept = scratch("kept", update.numel(), update_dtype(base)).view(update.shape).copy_(update)
    record.moved += coefficient**2 * float(torch.linalg.vector_norm(kept)) ** 2
    total.copy_(base[rows]).add_(kept, alpha=coefficient)
    if isinstance(rows, slice) and isinstance(out, Tensor) and out.device.type == "cpu":
        rounded = out[rows].copy_(total)
    else:
        rounded = scratch("rounded", total.numel(), out.dtype).view(total.shape).copy_(total)
        out[rows] = rounded.to(out.device) if isinstance(out, Tensor) else rounded
    if rounded.dtype != torch.float64:
        record.lost += float(torch.linalg.vector_norm(total.sub_(rounded))) ** 2


def rounding_loss(record: Record) -> float:
    """|rounding error| / |update| over all that was written."""
    return math.sqrt(record.lost / record.moved) if record.moved else 0.0
