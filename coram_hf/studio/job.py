"""Job: long work in a thread of its own, which can be watched, stopped, resumed and dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

from coram_hf.execution.progress import watched

State = Literal["running", "stopped", "done", "failed", "dropped"]


class Dropped(KeyboardInterrupt):
    """Raised inside dropped work; a merge to files takes it as an interruption, and keeps what is done."""


class Job:
    """Work that stops between two tensors when asked, stays in memory, and resumes where it stopped."""

    def __init__(self, title: str, work: Callable[[], str]) -> None:
        """`work` returns the sentence to show when it is done."""
        self.title, self.state, self.label = title, "running", ""
        self.done, self.total, self.words = 0, 1, ""
        self.error: Exception | None = None
        self._work, self._go = work, threading.Event()
        self._go.set()
        self._dropped = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="studio")
        self._thread.start()

    @property
    def active(self) -> bool:
        """Whether it is running or stopped, and so holds the session."""
        return self.state in ("running", "stopped")

    def stop(self) -> None:
        """Stop at the next tensor; `resume` continues with the same bytes as without the stop."""
        if self.state == "running":
            self._go.clear()
            self.state = "stopped"

    def resume(self) -> None:
        """Continue where it was stopped."""
        if self.state == "stopped":
            self.state = "running"
            self._go.set()

    def drop(self) -> None:
        """End the work at the next tensor, and wait for that."""
        self._dropped = True
        self._go.set()
        self._thread.join()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the work has ended, at most for some seconds; whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            with watched(self._watch):
                self.words = self._work()
            self.state = "done"
        except Dropped:
            self.state = "dropped"
        except Exception as error:
            self.error, self.state = error, "failed"

    def _watch(self, label: str, done: int, total: int) -> None:
        self.label, self.done, self.total = label, done, total
        self._go.wait()
        if self._dropped:
            raise Dropped
