"""Writing one merged parameter: W_0 + lambda * update, rounded once, a few rows at a time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from coram_hf.errors import CoramError
from coram_hf.geometry import update_dtype
from coram_hf.geometry.scratch import scratch
from coram_hf.geometry.slices import as_rows, row_blocks
from coram_hf.inputs.inputs import Parameter
from coram_hf.inputs.targets import Target
from coram_hf.methods.protocol import Block
from coram_hf.outputs.output import InMemory, Output

AnyOutput = TypeVar("AnyOutput", bound=Output)


class Written(NamedTuple):
    """|lambda * update|^2 and |error of rounding to the result's dtype|^2 of the rows written."""

    moved: float = 0.0
    lost: float = 0.0


class Place:
    """A parameter of the result, to which blocks are added in any order."""

    def __init__(self, out: Output, target: Target | None) -> None:
        self.out = out
        self._target = target

    def add(self, block: Block, parameter: Parameter, lam: float | None) -> Written:
        """Write some rows of W_0 + lambda * update."""
        assert lam is not None
        out = self._rows_of(self.out, block, parameter)
        base = self._rows_of(InMemory(parameter.base), block, parameter)
        return write_rows(out, base.tensor, block.rows, block.update, lam)

    def close(self, parameter: Parameter, lam: float | None) -> Written:
        """Finish the parameter after all its blocks have been added."""
        return Written()

    def _rows_of(self, output: AnyOutput, block: Block, parameter: Parameter) -> AnyOutput:
        """The tensor that a block's rows index: one matrix, or the parameter as stored."""
        found: Any = output
        if output.shape != parameter.base.shape:
            raise CoramError(
                f"tensor {parameter.name!r}: merged shape {tuple(parameter.base.shape)}, output expects "
                f"{tuple(output.shape)}"
            )
        if block.matrix is None:
            return cast(AnyOutput, found.view(as_rows(parameter.base).shape))
        assert self._target is not None
        return cast(AnyOutput, found.matrices(self._target)[block.matrix])


class KeptPlace(Place):
    """A place that keeps the whole update, as float32 or float64, and writes it on `close`."""

    def __init__(self, out: Output, target: Target | None, updates: dict[str, Tensor]) -> None:
        super().__init__(out, target)
        self._updates = updates

    def add(self, block: Block, parameter: Parameter, lam: float | None) -> Written:
        """Keep some rows of the update; nothing is written yet."""
        base = parameter.base
        if parameter.name not in self._updates:
            self._updates[parameter.name] = torch.empty_like(base, dtype=update_dtype(base))
        kept = self._rows_of(InMemory(self._updates[parameter.name]), block, parameter).tensor
        kept[block.rows] = block.update.to(kept.device, kept.dtype)
        return Written()

    def close(self, parameter: Parameter, lam: float | None) -> Written:
        """Write the update with this lambda, or only keep it while lambda is None."""
        if lam is None:
            return Written()
        return write_update(self.out, parameter.base, self._updates[parameter.name], lam)


def write_update(out: Output, base: Tensor, update: Tensor, lam: float) -> Written:
    """Fill a tensor of any shape with W_0 + lambda * update."""
    origin, whole = as_rows(base), as_rows(update)
    place = out.view(origin.shape)
    moved = lost = 0.0
    for rows in row_blocks(origin):
        written = write_rows(place, origin, rows, whole[rows], lam)
        moved, lost = moved + written.moved, lost + written.lost
    return Written(moved, lost)


def write_rows(out: Output, base: Tensor, rows: slice | Tensor, update: Tensor, lam: float) -> Written:
    """Write some rows of W_0 + lambda * update, summed in float64 and rounded once.

    The update is first rounded as a kept one is: to float64 for float64 weights, else to float32.
    """
    total = scratch("total", update.numel(), torch.float64).view(update.shape)
    kept = scratch("kept", update.numel(), update_dtype(base)).view(update.shape).copy_(update)
    moved = lam**2 * _square(kept)
    total.copy_(base[rows]).add_(kept, alpha=lam)
    rounded = out.put(rows, total)
    exact = rounded.dtype == torch.float64
    return Written(moved, 0.0 if exact else _square(total.sub_(rounded)))


def _square(rows: Tensor) -> float:
    """|rows|^2, in float64 if float32 overflows."""
    norm = float(torch.linalg.vector_norm(rows))
    return (norm if math.isfinite(norm) else float(torch.linalg.vector_norm(rows.double()))) ** 2
