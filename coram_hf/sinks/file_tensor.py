"""A tensor at its place in a file, to be assigned to: what is merged needs no memory of its size."""

from __future__ import annotations

import os
from typing import TypeAlias

import torch
from torch import Tensor


class FileTensor:
    """Rows are written by `place[rows] = values`; nothing is read."""

    def __init__(self, handle: int, offset: int, like: Tensor) -> None:
        self._handle, self._offset = handle, offset
        self.shape, self.dtype, self.nbytes = like.shape, like.dtype, like.nbytes

    def __setitem__(self, rows: slice | Tensor, values: Tensor) -> None:
        data = values.detach().contiguous().flatten().view(torch.uint8).numpy().data
        row_bytes = self.nbytes // max(1, self.shape[0] if self.shape else 1)
        if isinstance(rows, slice):
            self._write(data, (rows.start or 0) * row_bytes)
            return
        for i, row in enumerate(rows.tolist()):
            self._write(data[i * row_bytes : (i + 1) * row_bytes], row * row_bytes)

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._handle, data, self._offset + offset)
            data, offset = data[written:], offset + written


Output: TypeAlias = Tensor | FileTensor
"""Where a merged parameter goes."""
