"""Cost: the seconds of each phase of a merge, and the most memory that it took."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import psutil

INTERVAL = 0.05
"""Seconds between two looks at the memory of this process."""

PHASES = {"sample": "norms", "survey": "norms", "geometry": "geometry", "write": "merging"}
"""What the phases of a runner are called in reports; the geometry may be part of the last one."""

_COST: ContextVar[Cost | None] = ContextVar("cost", default=None)


class Cost:
    """Adds up the phases that run inside its block, in this process, and watches its memory.

    The memory is that of the process without mapped files, where the system tells them apart (Linux).
    """

    def __init__(self, opening: float) -> None:
        """`opening`: the seconds that opening the inputs took before."""
        self.seconds = {"opening": opening} if opening else {}
        self._process, self._peak, self._ended = psutil.Process(), 0, threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Cost:
        self._token = _COST.set(self)
        self._look()
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _COST.reset(self._token)
        self._ended.set()
        self._watcher.join()

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def to_dict(self) -> dict[str, Any]:
        """Seconds by phase, and bytes of memory, as a report keeps them."""
        self._look()
        return {
            "seconds": {name: round(spent, 3) for name, spent in self.seconds.items()},
            "peak_memory": self._peak,
        }

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL):
            self._look()

    def _look(self) -> None:
        memory = self._process.memory_info()
        self._peak = max(self._peak, memory.rss - getattr(memory, "shared", 0))


@contextmanager
def searching() -> Iterator[Cost]:
    """The cost of all that happens inside, as one phase."""
    started = time.perf_counter()
    with Cost(0.0) as cost:
        yield cost
        cost.seconds = {"search": time.perf_counter() - started}


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Add the seconds of this block to a phase of the cost that is being measured, if any."""
    started = time.perf_counter()
    try:
        yield
    finally:
        cost = _COST.get()
        if cost is not None:
            cost.add(PHASES.get(name, name), time.perf_counter() - started)
