"""Progress: a bar on a terminal or in a notebook, an occasional line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

INTERVAL = 30.0
"""Seconds between two lines, in place of bars that would flood a pipe or a log file."""

BYTES = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}


Watch = Callable[[str, int, int], None]
"""Called with the label, what is done, and the total; an exception from it stops the work."""

_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Tell `watch` about all progress that is made in this thread, whether bars are shown or not."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def shows_bars() -> bool:
    """Whether stderr is shown to a person, on a terminal or in a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class Progress:
    """Shows how much of `total` is done: bytes, or items of the given unit."""

    def __init__(
        self,
        label: str,
        total: int,
        enabled: bool,
        *,
        unit: str = "B",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._total, self._enabled, self._unit = label, max(total, 1), enabled, unit
        self._done, self._clock, self._watch = 0, clock, _WATCH.get()
        self._started = self._spoken = clock()
        options: dict[str, Any] = BYTES if unit == "B" else {"unit": unit}
        self._bar = (
            tqdm(total=total, desc=label, disable=False, **options) if enabled and shows_bars() else None
        )

    def add(self, done: int = 1) -> None:
        """Count more as done."""
        self._done += done
        if self._watch is not None:
            self._watch(self._label, self._done, self._total)
        now = self._clock()
        if self._bar is not None:
            self._bar.update(done)
        elif self._enabled and now - self._spoken >= INTERVAL:
            self._spoken = now
            rate = self._done / (now - self._started)
            left = (self._total - self._done) / max(rate, 1e-9)
            line = f"{self._done / self._total:.0%}, {self._speed(rate)}, {left / 60:.0f} min left"
            print(f"{self._label}: {line}", file=sys.stderr, flush=True)

    def _speed(self, rate: float) -> str:
        if self._unit == "B":
            return f"{rate / 2**20:.0f} MB/s"
        return f"{self._done} of {self._total} {self._unit}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
