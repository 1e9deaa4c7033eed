"""A journal of JSON values, one per line, which are on the disk when `note` returns."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


class Journal:
    """A list of finished work, to resume after an interruption; incomplete lines are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def __iter__(self) -> Iterator[Any]:
        """The noted values, in order."""
        lines = self._path.read_bytes().split(b"\n") if self._path.exists() else []
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def note(self, values: Iterable[Any]) -> None:
        """Append values, and wait until they are on the disk."""
        if self._file is None:
            self._file = self._path.open("ab")
            self._file.write(b"\n")  # ends an incomplete last line
        for value in values:
            self._file.write(json.dumps(value).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; `note` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
