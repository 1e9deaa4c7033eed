"""How long a merge will take on this machine, from one parameter of every shape and a moment of the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
from torch import Tensor

from coram_hf.execution.threads import in_threads
from coram_hf.outputs.pages import forget

PROBE_BYTES = 64 * 2**20
"""What is written, or read, to learn the rate of a disk."""

HASH_RATE = 1.2e9
"""Bytes a second of sha256 on one core, for the hashes in the report."""

CARD = 0.5
"""Seconds of the card and of its figure, whose library is imported beside the merge."""


class Forecast(NamedTuple):
    """Seconds of a merge; computing, reading and writing overlap, so that the longest of them counts."""

    computing: float
    reading: float
    writing: float
    hashing: float
    opening: float = 0.0

    @property
    def seconds(self) -> float:
        return self.opening + max(self.computing, self.reading, self.writing) + self.hashing + CARD


def computing(likes: dict[str, Tensor], work: Callable[[str], object], threads: int) -> float:
    """Seconds for all parameters: each thread works on one of every shape, which counts for the others."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, like in likes.items():
        kind = name.rpartition(".")[0].rpartition(".")[2]
        alike.setdefault((kind, *like.shape), []).append(name)
    total = 0.0
    for names in alike.values():
        sample = (names * threads)[:threads]
        started = time.perf_counter()
        for _ in in_threads(work, sample, threads):
            pass
        total += (time.perf_counter() - started) * len(names) / threads
    return total


class WriteCost(NamedTuple):
    """Seconds a byte: of a core, to hand it over to the system, and until it is on the disk."""

    core: float
    disk: float


def write_cost(folder: Path) -> WriteCost:
    """What writing costs on the disk of a folder, or of what there is above it."""
    while not folder.is_dir():
        folder = folder.parent
    block = os.urandom(2**20)
    count = max(1, min(PROBE_BYTES, shutil.disk_usage(folder).free // 4) // len(block))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(2):  # the second time in pages that have been used, as nearly all of a merge is
            started = time.perf_counter()
            for _ in range(count):
                file.write(block)
            handed_over = time.perf_counter()
            os.fsync(file.fileno())
            forget(file.fileno())
            done = time.perf_counter()
    size = count * len(block)
    return WriteCost(core=(handed_over - started) / size, disk=(done - started) / size)


def read_seconds(files: Iterable[Path]) -> float:
    """Seconds to read all of the files, if they do not fit in the page cache; otherwise none to speak of."""
    sizes = {path: path.stat().st_size for path in files}
    if not hasattr(os, "posix_fadvise"):  # macOS does not tell
        return 0.0
    if not sizes or sum(sizes.values()) < 0.75 * psutil.virtual_memory().available:
        return 0.0
    return sum(sizes.values()) / read_rate(max(sizes, key=lambda path: sizes[path]))


def read_rate(path: Path) -> float:
    """Bytes a second from the disk that a file is on, past the page cache."""
    length = min(PROBE_BYTES, path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        forget(file.fileno(), 0, length)
        started = time.perf_counter()
        file.read(length)
        return length / (time.perf_counter() - started)
