"""Updates kept on disk, a file per parameter: until lambda is known, or in a folder for other lambdas."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coram_hf.errors import CoramError
from coram_hf.geometry import update_dtype
from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.inputs.weights import Target
from coram_hf.methods.protocol import Block, How, Method, Work
from coram_hf.methods.record import Record
from coram_hf.outputs.files import write_whole
from coram_hf.outputs.place import InMemory, KeptPlace, Written, kept_blocks, write_at

INDEX = "updates.json"
"""What a folder of updates is of: the state of its merge, and the records of its parameters."""


class Spool:
    """A folder of updates, each in float32 (float64 for float64 weights) and complete or absent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def place(self, target: Target | None) -> SpoolPlace:
        """Where the update of one parameter is kept."""
        return SpoolPlace(self, target)

    def write(self, name: str, update: Tensor) -> None:
        """Write an update, and wait until it is on the disk."""
        self._folder.mkdir(parents=True, exist_ok=True)
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


@dataclass(frozen=True)
class FromUpdates:
    """A method with its updates read from a folder instead of merged; all else is its own."""

    method: Method
    spool: Spool
    records: Mapping[str, Record]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Those of the method."""
        return self.method.settings

    def names(self, inputs: Inputs) -> Mapping[str, How]:
        """Those of the method."""
        return self.method.names(inputs)

    def bind(self, inputs: Inputs, factors: Sequence[float], *, measure: bool = False) -> Work:
        """The work of the method, with kept updates in place of their merges."""
        return self.spool.kept(self.method.bind(inputs, factors, measure=measure), self.records)


def write_index(folder: Path, state: Mapping[str, Any] | None, records: Mapping[str, Any]) -> None:
    """Write what a folder of updates is of, which completes it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / INDEX, json.dumps({"state": state, "records": records}) + "\n", sync=True)


def is_complete(folder: Path) -> bool:
    """Whether a folder holds all updates of a merge."""
    return (folder / INDEX).is_file()


def read_index(folder: Path) -> tuple[Mapping[str, Any] | None, dict[str, Record]]:
    """The state of the merge that kept these updates, and the records of its parameters."""
    if not is_complete(folder):
        raise CoramError(f"{folder} holds no kept updates; merge with keep_update=FOLDER (--keep-update)")
    content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    records = {name: Record.from_dict(values) for name, values in content["records"].items()}
    return content["state"], records


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
