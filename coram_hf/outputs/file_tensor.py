"""A tensor in a file, written by assignment, so that a merge never holds all of it in memory."""

from __future__ import annotations

import os
from io import FileIO

import torch
from torch import Tensor

from coram_hf.geometry.scratch import scratch
from coram_hf.inputs.targets import Target


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
