"""Known scores, so that an interrupted evaluation resumes and repeats nothing."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from coram_hf.execution.journal import Journal

T = TypeVar("T")


class Memory:
    """Values by a hash of everything that they depend on, kept in a journal.

    When a dependency changes, so does the key, and the value is computed again. Without a path nothing is
    remembered. seconds: what the values so far took to compute, also in earlier runs.
    """

    def __init__(self, path: Path | None) -> None:
        self._journal = None if path is None else Journal(path)
        self._known: dict[str, tuple[Any, float]] = {}
        self.seconds = 0.0
        for entry in self._journal or ():
            if isinstance(entry, dict) and "key" in entry and "value" in entry:
                self._known[entry["key"]] = entry["value"], entry.get("seconds", 0.0)

    def remember(self, depends_on: tuple[object, ...] | None, what: str, make: Callable[[], T]) -> T:
        """The known value for these dependencies, else make and note it; for None it is always made."""
        key = None if depends_on is None or self._journal is None else digest(*depends_on)
        if key is None or key not in self._known:
            started = time.perf_counter()
            made = make(), time.perf_counter() - started
            if key is None or self._journal is None:
                self.seconds += made[1]
                return made[0]
            self._journal.note([{"key": key, "what": what, "value": made[0], "seconds": round(made[1], 3)}])
            self._journal.close()
            self._known[key] = made
        found: T
        found, spent = self._known[key]
        self.seconds += spent
        return found


def digest(*parts: object) -> str:
    """A short hash of plain values."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]
