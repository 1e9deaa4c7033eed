"""A journal of what was computed, so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class Journal:
    """Values by a hash of all that they depend on, one JSON line each, on the disk once they are known.

    Values that depend on anything else than before have another key, so they are computed again. Without a
    path nothing is remembered.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path is not None and path.exists():
            for line in path.read_bytes().split(b"\n"):
                try:
                    entry = json.loads(line)
                    self._known[entry["key"]] = entry["value"]
                except (ValueError, KeyError, TypeError):
                    continue  # a line that was torn by a kill

    def remember(self, depends_on: tuple[object, ...] | None, what: str, make: Callable[[], T]) -> T:
        """The value known for these dependencies, or made and noted; None depends on what has no hash."""
        if depends_on is None or self._path is None:
            return make()
        key = digest(*depends_on)
        if key not in self._known:
            value = make()
            self._note({"key": key, "what": what, "value": value})
            self._known[key] = value
        found: T = self._known[key]
        return found

    def _note(self, entry: dict[str, Any]) -> None:
        assert self._path is not None
        with self._path.open("ab") as file:
            file.write(b"\n" + json.dumps(entry, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def digest(*parts: object) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
