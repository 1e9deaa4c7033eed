"""Where one merged parameter goes: W_0 + lambda * update, rounded once, to memory or to a file, by rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from coram_hf.errors import CoramError
from coram_hf.geometry import SliceStats, update_dtype
from coram_hf.geometry.slices import as_rows, row_blocks, scratch
from coram_hf.geometry.staging import on_cpu
from coram_hf.inputs.inputs import Parameter
from coram_hf.inputs.weights import Target
from coram_hf.methods.protocol import Block
from coram_hf.methods.record import Record


class Output(Protocol):
    """A tensor whose rows can be written in any order."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...

    def view(self, shape: torch.Size) -> Output:
        """This output in another shape."""
        ...

    def matrices(self, target: Target) -> Sequence[Output]:
        """The matrices of a target, as (output neurons x inputs)."""
        ...

    def put(self, rows: slice | Tensor, total: Tensor) -> Tensor:
        """Write rows, rounded to the dtype of the output, and return the rounded rows."""
        ...


class InMemory:
    """A tensor of the result, or a buffer for one that has another form on disk."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype, self.nbytes = tensor.shape, tensor.dtype, tensor.nbytes

    def view(self, shape: torch.Size) -> InMemory:
        """This tensor in another shape."""
        return InMemory(self.tensor.view(shape))

    def matrices(self, target: Target) -> list[InMemory]:
        """The matrices of a target, as views of the tensor."""
        return [InMemory(matrix) for matrix in target.matrices(self.tensor)]

    def put(self, rows: slice | Tensor, total: Tensor) -> Tensor:
        """Write rows, rounded to the dtype of the tensor, and return the rounded rows."""
        if isinstance(rows, slice) and self.tensor.device.type == "cpu":
            return self.tensor[rows].copy_(total)
        rounded = scratch("rounded", total.numel(), self.dtype).view(total.shape).copy_(total)
        self.tensor[_at(self.tensor, rows)] = rounded.to(self.tensor.device)
        return rounded


def _at(tensor: Tensor, rows: slice | Tensor) -> slice | Tensor:
    """The numbers of rows on the device of a tensor that they index."""
    return rows if isinstance(rows, slice) else rows.to(tensor.device)


class FileTensor:
    """A write-only tensor in a file; `tensor[rows] = values` writes rows."""

    def __init__(self, file: FileIO, offset: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self._file, self._offset = file, offset
        self.shape, self.dtype = shape, dtype
        self.nbytes = shape.numel() * dtype.itemsize

    def view(self, shape: torch.Size) -> FileTensor:
        """This tensor in another shape."""
        return FileTensor(self._file, self._offset, shape, self.dtype)

    def matrices(self, target: Target) -> tuple[FileTensor, ...]:
        """The tensor itself: only targets of a single matrix, stored by rows, are written this way."""
        return (self,)

    def put(self, rows: slice | Tensor, total: Tensor) -> Tensor:
        """Write rows, rounded to the dtype of the tensor, and return the rounded rows."""
        rounded = scratch("rounded", total.numel(), self.dtype).view(total.shape).copy_(total)
        self[rows] = rounded
        return rounded

    def __setitem__(self, rows: slice | Tensor, values: Tensor) -> None:
        data = values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        row_bytes = self.nbytes // max(1, self.shape[0])
        if isinstance(rows, slice):
            self._write(data, (rows.start or 0) * row_bytes)
            return
        for i, row in enumerate(rows.tolist()):
            self._write(data[i * row_bytes : (i + 1) * row_bytes], row * row_bytes)

    def _write(self, data: memoryview, offset: int) -> None:
        if offset < 0 or offset + len(data) > self.nbytes:
            raise IndexError(
                f"cannot write {len(data)} bytes at offset {offset} of a tensor of {self.nbytes} bytes"
            )
        write_at(self._file, data, self._offset + offset)


def write_at(file: FileIO, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data at an offset in a file."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file.fileno(), rest, offset)
        rest, offset = rest[written:], offset + written


AnyOutput = TypeVar("AnyOutput", bound=Output)
Room = Callable[[Tensor, torch.dtype], Tensor]


def memory_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in memory, of the shape of the given one."""
    return torch.empty_like(tensor, dtype=dtype)


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
    """A place that keeps the whole update, as float32 or float64, and writes it on `close`.

    room: makes a tensor for an update, of the shape of the given one, and of the dtype; by default in memory.
    """

    def __init__(
        self, out: Output, target: Target | None, updates: dict[str, Tensor], room: Room | None = None
    ) -> None:
        super().__init__(out, target)
        self._updates, self._room = updates, room or memory_like

    def add(self, block: Block, parameter: Parameter, lam: float | None) -> Written:
        """Keep some rows of the update; nothing is written yet."""
        base = parameter.base
        if parameter.name not in self._updates:
            self._updates[parameter.name] = self._room(base, update_dtype(base))
        kept = self._rows_of(InMemory(self._updates[parameter.name]), block, parameter).tensor
        kept[_at(kept, block.rows)] = block.update.to(kept.device, kept.dtype)
        return Written()

    def close(self, parameter: Parameter, lam: float | None) -> Written:
        """Write the update with this lambda, or only keep it while lambda is None."""
        if lam is None:
            return Written()
        return write_update(self.out, parameter.base, self._updates[parameter.name], lam)


def kept_blocks(update: Tensor, record: Record) -> Iterator[Block]:
    """A kept update, a few rows at a time; the first block carries what was recorded when it was merged."""
    whole = as_rows(update)
    squares = torch.tensor([record.base, *record.updates], dtype=torch.float64) if record.updates else None
    stats, decorrelation = record.slices, record.decorrelation
    for rows in row_blocks(update):
        yield Block(None, rows, whole[rows], stats, squares, decorrelation)
        stats, squares, decorrelation = SliceStats(), None, []


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
    """Write some rows of W_0 + lambda * update, summed in a wider dtype and rounded once.

    The sum is in float32 if base and result have 16 bits, whose rounding is coarser by far, else in float64.
    The update is first rounded as a kept one is: to float64 for float64 weights, else to float32.
    """
    short = max(base.dtype.itemsize, out.dtype.itemsize) <= 2
    total = scratch("total", update.numel(), torch.float32 if short else torch.float64).view(update.shape)
    kept = update
    if update.device.type != "cpu":
        kept = on_cpu(update, update_dtype(base))
    elif update.dtype != update_dtype(base):
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
