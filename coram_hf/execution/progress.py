"""Progress: a bar with rate and time left on a terminal, one line per minute elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

INTERVAL = 60.0
"""Seconds between two lines if there is no terminal."""


class Progress:
    """Shows how many of `total` bytes are done."""

    def __init__(self, label: str, total: int, enabled: bool) -> None:
        self._label, self._total, self._enabled = label, max(total, 1), enabled
        self._done, self._started = 0, time.monotonic()
        self._spoken = self._started
        terminal = enabled and sys.stderr.isatty()
        options: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
        self._bar = tqdm(total=total, desc=label, **options) if terminal else None

    def add(self, done: int) -> None:
        """Count more bytes as done."""
        self._done += done
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(done)
        elif self._enabled and now - self._spoken >= INTERVAL:
            self._spoken = now
            rate = self._done / (now - self._started)
            left = (self._total - self._done) / max(rate, 1.0)
            line = f"{self._done / self._total:.0%}, {rate / 2**20:.0f} MB/s, {left / 60:.0f} min left"
            print(f"{self._label}: {line}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
