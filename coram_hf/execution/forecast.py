"""The disk, memory and time that a merge needs on this machine, from one parameter of every shape."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from heapq import nlargest
from pathlib import Path
from typing import NamedTuple

import psutil
from torch import Tensor

from coram_hf.execution.files import FileRunner
from coram_hf.execution.tasks import in_threads, merge_task, merge_unit
from coram_hf.geometry.slices import CHUNK_BYTES
from coram_hf.inputs.inputs import Inputs
from coram_hf.methods.protocol import Method
from coram_hf.outputs.layout import Layout
from coram_hf.outputs.pages import forget
from coram_hf.outputs.place import InMemory, Output, Place

PROBE_BYTES = 64 * 2**20
"""Bytes written or read to measure the rate of a disk."""

HASH_RATE = 1.2e9
"""Bytes per second of sha256 on one core, for the hashes in the report."""

CARD_SECONDS = 0.5
"""Seconds for the card and its figure, whose library is imported during the merge."""

RESIDENT = 340 * 2**20
"""Bytes of memory of the interpreter and its libraries."""

WHOLE_COPIES = 2
"""Float32 copies of a parameter that is not merged by rows."""


class Forecast(NamedTuple):
    """Estimated seconds of a merge; computing, reading and writing overlap, so only the longest counts.

    hashing: what it adds to computing, as it takes place on the same cores.
    """

    computing: float
    reading: float
    writing: float
    hashing: float
    opening: float = 0.0

    @property
    def seconds(self) -> float:
        return self.opening + max(self.computing + self.hashing, self.reading, self.writing) + CARD_SECONDS


def requirements(
    runner: FileRunner, inputs: Inputs, method: Method, *, searches: bool = False
) -> tuple[int, int]:
    """The bytes of disk, and roughly of memory, that a merge needs.

    Memory is that of the libraries and, per thread, its chunks, the method's float32 copies of a parameter,
    and those of adapters: one for each, and three while one is computed. A merge that searches for its lambda
    also holds itself, its update and one more model.
    """
    names = method.names(inputs)
    sizes = {name: 4 * runner.layout.like(name).numel() for unit in runner.layout.units for name in unit}
    adapters = sum(w.kind != "full" or w.transplant is not None for w in inputs.experts.values())
    targets = [size for name, size in sizes.items() if inputs.base.tied.get(name, name) in inputs.targets]
    made = max(targets, default=0) if adapters else 0
    of_thread = 2 * CHUNK_BYTES + (adapters + 3) * made
    held = []
    for name, size in sizes.items():
        how = names.get(inputs.base.tied.get(name, name))
        held.append(0 if how is None else how.memory + (0 if how.by_rows else WHOLE_COPIES * size))
    search = 2 * runner.layout.total_bytes + sum(targets) if searches else 0
    return runner.disk_bytes, RESIDENT + search + runner.threads * of_thread + sum(
        nlargest(runner.threads, held)
    )


def forecast(runner: FileRunner, inputs: Inputs, method: Method, opening: float) -> Forecast:
    """Estimate how long the merge takes."""
    names = method.names(inputs)
    merging = method.bind(inputs, (1.0,) * len(inputs.experts), measure=True)
    task = merge_task(merging, names, 1.0, inputs, measures=True)
    first = {unit[0]: unit for unit in runner.share}
    likes = {name: runner.layout.like(name) for name in first}
    memory = _NewMemory(runner.layout, inputs)

    def work(name: str) -> None:
        merge_unit(first[name], inputs, names.keys(), task, memory)

    written, cost = runner.layout.total_bytes, write_cost(runner.target.parent)
    handing_over = runner.disk_bytes * cost.core / runner.threads
    return Forecast(
        computing=computing(likes, work, runner.threads) + handing_over,
        reading=read_seconds(path for _, weights in inputs.named() for path in weights.files),
        writing=runner.disk_bytes * cost.disk,
        hashing=written / HASH_RATE / runner.threads,
        opening=opening,
    )


class _NewMemory:
    """A sink that discards what it is given."""

    def __init__(self, layout: Layout, inputs: Inputs) -> None:
        self._layout, self._inputs = layout, inputs

    def place(self, name: str) -> Place:
        target = self._inputs.targets.get(self._inputs.base.tied.get(name, name))
        return Place(InMemory(self._layout.empty(name)), target)

    def unchanged(self, name: str, tensor: Tensor) -> Output:
        return InMemory(tensor.to(self._layout.like(name).dtype))


def computing(likes: dict[str, Tensor], work: Callable[[str], object], threads: int) -> float:
    """Seconds to merge all parameters, extrapolated from one of every shape per thread."""
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
    """Seconds per byte: of a core, to pass it to the system, and until it is on the disk."""

    core: float
    disk: float


def write_cost(folder: Path) -> WriteCost:
    """Measure the cost of writing to the disk of a folder, or of its first existing parent."""
    while not folder.is_dir():
        folder = folder.parent
    block = os.urandom(2**20)
    count = max(1, min(PROBE_BYTES, shutil.disk_usage(folder).free // 4) // len(block))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(2):  # the second pass reuses pages, as nearly all of a merge does
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
    """Seconds to read all of the files; taken as 0 if they fit in the page cache."""
    sizes = {path: path.stat().st_size for path in files}
    if not hasattr(os, "posix_fadvise"):  # macOS cannot drop cached pages, so the rate is unknown
        return 0.0
    if not sizes or sum(sizes.values()) < 0.75 * psutil.virtual_memory().available:
        return 0.0
    return sum(sizes.values()) / read_rate(max(sizes, key=lambda path: sizes[path]))


def read_rate(path: Path) -> float:
    """Bytes per second from the disk of a file, bypassing the page cache."""
    length = min(PROBE_BYTES, path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        forget(file.fileno(), 0, length)
        started = time.perf_counter()
        file.read(length)
        return length / (time.perf_counter() - started)
