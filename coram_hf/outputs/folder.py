"""The files of a checkpoint folder, filled tensor by tensor as its layout prescribes."""

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
from coram_hf.inputs.weights import Target
from coram_hf.methods.protocol import Work
from coram_hf.methods.record import Record
from coram_hf.outputs.files import sync_path
from coram_hf.outputs.hashing import FollowingHash, following
from coram_hf.outputs.layout import Layout
from coram_hf.outputs.pages import forget
from coram_hf.outputs.place import FileTensor, InMemory, Output, Place, write_at
from coram_hf.outputs.spool import Spool

ZEROS = 2**20
"""Bytes written at once if the file system cannot reserve space."""

SYNC_BYTES = 64 * 2**20
"""Bytes copied, or merged and written, before waiting for the disk."""


class FolderSink:
    """The files of one process, created at full length and filled in any order.

    Rows leave the page cache once they are on the disk and, from `expect` on, hashed. Updates are kept in a
    spool until lambda is known.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        files: Iterable[str],
        parameters: Mapping[str, str],
        targets: Mapping[str, Target],
        spool: Spool,
    ) -> None:
        """`parameters` maps the other names of tied parameters to the one under which they are merged."""
        self._folder, self._layout, self._names = folder, layout, list(files)
        self._first, self._targets, self._spool = parameters, targets, spool
        self._files: dict[str, FileIO] = {}
        self._mapped: dict[str, Tensor] = {}
        self._hashes: dict[str, FollowingHash] = {}

    def __enter__(self) -> FolderSink:
        """Open the files, at full length and with their headers."""
        for name in self._names:
            handle = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o644)
            self._files[name] = file = FileIO(handle, "r+")
            reserve(file, self._layout.sizes[name])
            write_at(file, self._layout.headers[name], 0)
        sync_path(self._folder)
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            file.close()
        self._mapped.clear()

    def expect(self, names: Iterable[str]) -> None:
        """Hash the files while the named parameters, and nothing else, are written to them."""
        likes = {name: self._layout.like(name) for name in names}
        self._hashes = following(self._files, self._layout, list(self._layout.to_disk(likes)))

    def hashes(self) -> dict[str, dict[str, int | str]]:
        """Size and sha256 of the files that were complete at the last `sync`."""
        return {name: found for name, it in self._hashes.items() if (found := it.found()) is not None}

    def place(self, name: str) -> Place:
        """Where a parameter goes."""
        return Place(self.output(name), self._targets.get(self._first.get(name, name)))

    def output(self, name: str) -> Output:
        """The file of a parameter, or new memory if it has another form on disk.

        Targets stored transposed or in stacks are written through a memory map.
        """
        target, disk = self._targets.get(self._first.get(name, name)), self._layout.renamed.get(name)
        if disk is None:
            return InMemory(self._layout.empty(name))
        like = self._layout.places[disk].like
        by_rows = target is None or (not target.transposed and like.ndim == 2)
        return self._place(disk) if by_rows else InMemory(self._map(disk))

    def kept(self, work: Work, records: Mapping[str, Record]) -> Work:
        """The work, with updates from the spool reused instead of merged again."""
        return self._spool.kept(work, records)

    def keep(self, name: str) -> Place:
        """Where the update of one parameter is kept."""
        return self._spool.place(self._targets.get(name))

    def unchanged(self, name: str, tensor: Tensor) -> Output:
        """A parameter that is not merged, in the dtype of the result."""
        return InMemory(tensor.to(self._layout.like(name).dtype))

    def write(self, outputs: Mapping[str, Output]) -> int:
        """Write complete parameters that are not in their file yet; return the bytes of all of them."""
        in_memory = {name: out.tensor for name, out in outputs.items() if isinstance(out, InMemory)}
        written = sum(out.nbytes for name, out in outputs.items() if name not in in_memory)
        for name, tensor in self._layout.to_disk(in_memory).items():
            file, _, like = self._layout.places[name]
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise CoramError(
                    f"tensor {name!r}: merged {tensor.dtype} {tuple(tensor.shape)}, {file} expects "
                    f"{like.dtype} {tuple(like.shape)}"
                )
            if not self._is_mapped(file, tensor):
                self._copy(tensor, name)
            written += tensor.nbytes
        complete = self._layout.to_disk({name: self._layout.like(name) for name in outputs})
        for following_hash in self._hashes.values():
            following_hash.complete(complete)
        return written

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        for name in self._files:
            self._settle(name)

    def _copy(self, tensor: Tensor, disk: str) -> None:
        """Write a tensor a few rows at a time, waiting for the disk in between."""
        values = as_rows(tensor)
        place = self._place(disk).view(values.shape)
        step = max(1, len(values) * SYNC_BYTES // max(1, values.nbytes))
        for start in range(0, len(values), step):
            place[start : start + step] = values[start : start + step]
            if values.nbytes > SYNC_BYTES:
                name, offset, _ = self._layout.places[disk]
                if name in self._hashes:
                    self._hashes[name].reach(disk, offset + values[: start + step].nbytes)
                self._settle(name)

    def _settle(self, name: str) -> None:
        """Wait until a file is on the disk, and drop the cached pages that need not be hashed any more."""
        handle = self._files[name].fileno()
        os.fsync(handle)
        if name in self._hashes:
            self._hashes[name].follow()
            forget(handle, 0, self._hashes[name].done)
        else:
            forget(handle)

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


def reserve(file: FileIO, size: int) -> None:
    """Reserve the file's bytes on disk: a write to a memory map cannot report that the disk is full."""
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
