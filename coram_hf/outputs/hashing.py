"""Hashes of weight files: while they are filled in any order, or of a whole folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from coram_hf.outputs.layout import Layout
from coram_hf.outputs.pages import forget

BLOCK = 2**20


class FollowingHash:
    """sha256 of a file, from its start up to the first tensor that is still to be written."""

    def __init__(self, file: FileIO, size: int, pending: Mapping[str, int]) -> None:
        """`pending`: the offsets of the tensors that are still to be written."""
        self._file, self._size, self._pending = file, size, dict(pending)
        self._digest, self.done = hashlib.sha256(), 0

    def complete(self, names: Iterable[str]) -> None:
        """Note tensors that are written."""
        for name in names:
            self._pending.pop(name, None)

    def reach(self, name: str, offset: int) -> None:
        """Note that a tensor that is still being written is complete up to an offset in the file."""
        self._pending[name] = offset

    def follow(self) -> None:
        """Hash what has been completed."""
        end = min(self._pending.values(), default=self._size)
        while self.done < end and (
            block := os.pread(self._file.fileno(), min(BLOCK, end - self.done), self.done)
        ):
            self._digest.update(block)
            self.done += len(block)

    def found(self) -> dict[str, int | str] | None:
        """Size and sha256 of the whole file; None before it is complete."""
        if self.done < self._size:
            return None
        return {"size": self._size, "sha256": self._digest.hexdigest()}


def following(
    files: Mapping[str, FileIO], layout: Layout, pending: Collection[str]
) -> dict[str, FollowingHash]:
    """A hash of every file, of which the named tensors are still to be written."""
    offsets: dict[str, dict[str, int]] = {file: {} for file in files}
    for name in pending:
        place = layout.places[name]
        offsets[place.file][name] = place.offset
    return {name: FollowingHash(file, layout.sizes[name], offsets[name]) for name, file in files.items()}


def file_hashes(
    folder: Path, known: Mapping[str, dict[str, Any]] | None = None, *, keep_cached: bool = True
) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every weight file in a folder, unless they are known already.

    `keep_cached=False` frees the page cache of the files.
    """
    paths = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    found = dict(known or {})
    others = [path for path in paths if path.name not in found]
    with ThreadPoolExecutor() as pool:
        for path, digest in zip(
            others, pool.map(partial(_sha256, keep_cached=keep_cached), others), strict=True
        ):
            found[path.name] = {"size": path.stat().st_size, "sha256": digest}
    return {path.name: found[path.name] for path in paths}


def _sha256(path: Path, keep_cached: bool) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            if not keep_cached:
                forget(file.fileno(), 0, file.tell())
    return digest.hexdigest()
