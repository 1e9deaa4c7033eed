"""Threads beside those that merge: one reads ahead, one writes, and journals what is on the disk."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from coram_hf.execution.tasks import Done
from coram_hf.execution.workspace import Workspace
from coram_hf.outputs.folder import SYNC_BYTES, FolderSink
from coram_hf.outputs.layout import Unit

AHEAD = 2
"""The number of units to read ahead."""

SYNC_SECONDS = 5.0
"""The longest time between two entries in the journal."""


def hashes_of(phase: str) -> str:
    """The phase under which a journal has the hashes of the files that a phase has written."""
    return f"hashes of {phase}"


class ReadAhead:
    """A thread that prefetches the next units while others are merged."""

    def __init__(self, units: Sequence[Unit], prefetch: Callable[[str], None]) -> None:
        self._room = threading.Semaphore(AHEAD)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=(list(units), prefetch), daemon=True)
        self._thread.start()

    def _run(self, units: list[Unit], prefetch: Callable[[str], None]) -> None:
        for unit in units:
            self._room.acquire()
            for name in unit:
                if self._stopped:
                    return
                with suppress(Exception):  # the merge hits the same error, and reports it
                    prefetch(name)

    def through(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Iterate over the units; each one taken lets another be prefetched."""
        for unit in units:
            self._room.release()
            yield unit

    def stop(self) -> None:
        """Prefetch nothing more."""
        self._stopped = True
        self._room.release()
        self._thread.join()


class Writer:
    """A thread that writes finished units, if needed, and journals what is on the disk."""

    def __init__(self, workspace: Workspace, phase: str, sink: FolderSink | None) -> None:
        self._workspace, self._phase, self._sink = workspace, phase, sink
        self._waiting: queue.Queue[tuple[Unit, Done] | None] = queue.Queue(1)
        self._entries: list[tuple[str, str, Any]] = []
        self._unsynced, self._synced = 0, time.monotonic()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, unit: Unit, done: Done) -> None:
        """Queue a unit; waits while the queue is full."""
        self._raise()
        self._waiting.put((unit, done))

    def close(self) -> None:
        """Write and journal everything queued, then stop."""
        self._waiting.put(None)
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        torch.set_num_threads(1)  # the cores belong to the threads that merge
        while (item := self._waiting.get()) is not None:
            if self._error is None:
                try:
                    self._write(*item)
                except BaseException as error:  # raised again in the merging thread
                    self._error = error
        if self._error is not None:  # fsync reports a lost write only once, so unsynced units are redone
            return
        try:
            self._sync()
            if self._sink is not None:
                of = hashes_of(self._phase)
                self._workspace.note([(of, file, found) for file, found in self._sink.hashes().items()])
        except BaseException as error:
            self._error = error

    def _write(self, unit: Unit, done: Done) -> None:
        if self._sink is not None:
            self._unsynced += self._sink.write(done.outputs)
        records = {name: record.to_dict() for name, record in zip(unit, done.records, strict=True)}
        self._entries.append((self._phase, unit[0], records))
        if self._unsynced >= SYNC_BYTES or time.monotonic() - self._synced >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        if self._sink is not None:
            self._sink.sync()
        self._workspace.note(self._entries)
        self._entries, self._unsynced, self._synced = [], 0, time.monotonic()
