"""Updates kept on disk until lambda is known: a file per parameter, beside those of the result."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from coram_hf.geometry import update_dtype
from coram_hf.inputs.inputs import Parameter
from coram_hf.inputs.weights import Target
from coram_hf.methods.protocol import Block, Work
from coram_hf.methods.record import Record
from coram_hf.outputs.memory import kept_blocks
from coram_hf.outputs.place import InMemory, KeptPlace, Written, write_at


class Spool:
    """A folder of updates, each in float32 (float64 for float64 weights) and complete or absent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def place(self, target: Target | None) -> SpoolPlace:
        """Where the update of one parameter is kept."""
        return SpoolPlace(self, target)

    def write(self, name: str, update: Tensor) -> None:
        """Write an update, and wait until it is on the disk."""
        self._folder.mkdir(exist_ok=True)
        path = self._path(name)
        with FileIO(path.with_suffix(".part"), "w") as file:
            flat = update.detach().cpu().contiguous().flatten()
            write_at(file, flat.view(torch.uint8).numpy().data, 0)
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".part"), path)

    def kept(self, work: Work, records: Mapping[str, Record]) -> Work:
        """The work, with kept updates read instead of merged again."""

        def from_kept(parameter: Parameter) -> Iterator[Block]:
            path, name = self._path(parameter.name), parameter.name
            if name not in records or not path.is_file():
                yield from work(parameter)
                return
            shape, dtype = parameter.base.shape, update_dtype(parameter.base)
            flat = torch.from_file(str(path), shared=False, size=shape.numel(), dtype=dtype)
            yield from kept_blocks(flat.view(shape), records[name])

        return from_kept

    def _path(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]


class SpoolPlace(KeptPlace):
    """A place that keeps the update of one parameter, and writes it to the spool on `close`."""

    def __init__(self, spool: Spool, target: Target | None) -> None:
        self._kept: dict[str, Tensor] = {}
        super().__init__(InMemory(torch.empty(0)), target, self._kept)
        self._spool = spool

    def close(self, parameter: Parameter, lam: float | None) -> Written:
        """Write the update to the disk; nothing of the result is written yet."""
        self._spool.write(parameter.name, self._kept.pop(parameter.name))
        return Written()
