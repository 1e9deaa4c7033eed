"""The files of a checkpoint folder, filled tensor by tensor at the places of its layout."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from coram_hf.errors import CoramError
from coram_hf.geometry.slices import as_rows
from coram_hf.outputs.file_tensor import FileTensor, Output, write_at
from coram_hf.outputs.files import sync_path
from coram_hf.outputs.layout import Layout
from coram_hf.outputs.pages import forget

ZEROS = 2**20
"""Bytes that are written at once where the file system cannot set them aside."""

SYNC_BYTES = 64 * 2**20
"""How much is copied, or merged and written, before waiting for the disk."""


class FolderSink:
    """The files of one process: made at full length, then filled in any order.

    What was written by rows leaves the page cache once it is on the disk.
    """

    def __init__(self, folder: Path, layout: Layout, files: Iterable[str]) -> None:
        self._layout = layout
        self._files: dict[str, FileIO] = {}
        self._mapped: dict[str, Tensor] = {}
        for name in files:
            self._files[name] = file = FileIO(os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644), "r+")
            _reserve(file, layout.sizes[name])
            write_at(file, layout.headers[name], 0)
        sync_path(folder)

    def output(self, parameter: str, *, by_rows: bool) -> Output:
        """Where a parameter goes: its place in its file, or new memory where it has another form there.

        What is not written by rows gets a memory map of its place.
        """
        disk = self._layout.renamed.get(parameter)
        if disk is None:
            return self._layout.empty(parameter)
        return self._place(disk) if by_rows else self._map(disk)

    def write(self, tensors: Mapping[str, Output]) -> int:
        """Put whole parameters in their places, unless they are there; returns how many bytes they take."""
        written = 0
        for name, tensor in self._on_disk(tensors).items():
            file, _, like = self._layout.places[name]
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise CoramError(
                    f"tensor {name!r}: {tensor.dtype} {tuple(tensor.shape)} does not fit its place in "
                    f"{file}, {like.dtype} {tuple(like.shape)}"
                )
            if isinstance(tensor, Tensor) and not self._is_mapped(file, tensor):
                self._copy(tensor, name)
            written += tensor.nbytes
        return written

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        for file in self._files.values():
            _flush(file)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._mapped.clear()

    def _on_disk(self, tensors: Mapping[str, Output]) -> dict[str, Output]:
        placed = {self._layout.renamed[n]: t for n, t in tensors.items() if isinstance(t, FileTensor)}
        made = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
        return {**placed, **self._layout.to_disk(made)}

    def _copy(self, tensor: Tensor, disk: str) -> None:
        """Write a tensor some rows at a time, and wait for the disk in between."""
        values = as_rows(tensor)
        place = self._place(disk).view(values.shape)
        step = max(1, len(values) * SYNC_BYTES // max(1, values.nbytes))
        for start in range(0, len(values), step):
            place[start : start + step] = values[start : start + step]
            if values.nbytes > SYNC_BYTES:
                _flush(self._files[self._layout.places[disk].file])

    def _place(self, disk: str) -> FileTensor:
        file, offset, like = self._layout.places[disk]
        return FileTensor(self._files[file], offset, like.shape, like.dtype)

    def _map(self, disk: str) -> Tensor:
        file, offset, like = self._layout.places[disk]
        if file not in self._mapped:
            content = mmap.mmap(self._files[file].fileno(), self._layout.sizes[file])
            self._mapped.setdefault(file, torch.frombuffer(content, dtype=torch.uint8))
        return self._mapped[file][offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    def _is_mapped(self, file: str, tensor: Tensor) -> bool:
        mapped = self._mapped.get(file)
        return mapped is not None and 0 <= tensor.data_ptr() - mapped.data_ptr() < mapped.nbytes


def _flush(file: FileIO) -> None:
    """Wait until a file is on the disk, and let go of its pages."""
    os.fsync(file.fileno())
    forget(file.fileno())


def _reserve(file: FileIO, size: int) -> None:
    """Have the disk set the file's bytes aside: a write to a map cannot say that there is no room left."""
    present = os.fstat(file.fileno()).st_size
    if present > size:
        file.truncate(size)
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        for start in range(present, size, ZEROS):
            write_at(file, bytes(min(ZEROS, size - start)), start)
