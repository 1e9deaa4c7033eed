"""A tensor at its place in a file, to be assigned to: what is merged needs no memory of its size."""

from __future__ import annotations

import os
from io import FileIO

import torch
from torch import Tensor

from coram_hf.geometry.scratch import scratch
from coram_hf.inputs.targets import Target


class FileTensor:
    """Rows are written by `place[rows] = values`; nothing is read."""

    def __init__(self, file: FileIO, offset: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self._file, self._offset = file, offset
        self.shape, self.dtype = shape, dtype
        self.nbytes = shape.numel() * dtype.itemsize

    def view(self, shape: torch.Size) -> FileTensor:
        """This place in another shape."""
        return FileTensor(self._file, self._offset, shape, self.dtype)

    def matrices(self, target: Target) -> tuple[FileTensor, ...]:
        """The one matrix of a target that is stored by rows."""
        return (self,)

    def put(self, rows: slice | Tensor, total: Tensor) -> Tensor:
        """Write rows rounded to the dtype of the place, and return them so."""
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
            raise IndexError(f"{len(data)} bytes at {offset} of a tensor of {self.nbytes}")
        write_at(self._file, data, self._offset + offset)


def write_at(file: FileIO, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data at a place in a file."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file.fileno(), rest, offset)
        rest, offset = rest[written:], offset + written
