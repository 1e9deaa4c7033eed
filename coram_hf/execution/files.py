"""FileRunner: a merge from files to files, in resumable phases, split over processes."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coram_hf.amplitude import Wanted
from coram_hf.errors import CoramError
from coram_hf.execution.cost import timed
from coram_hf.execution.processes import Processes, shares
from coram_hf.execution.progress import Progress
from coram_hf.execution.stream import ReadAhead, Writer, hashes_of
from coram_hf.execution.survey import Survey
from coram_hf.execution.tasks import Done, Task, here, in_queues, merge_unit, queues
from coram_hf.execution.workspace import Workspace, check_target
from coram_hf.geometry import update_dtype
from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.methods.record import Record, measure
from coram_hf.outputs.files import put_in_place
from coram_hf.outputs.folder import FolderSink
from coram_hf.outputs.layout import Layout, Unit, skeleton, units
from coram_hf.outputs.spool import Spool, is_complete, write_index

GEOMETRY = "geometry"
"""The phase whose updates are kept."""

SAMPLE = 8
"""The fewest matrices from which to estimate the side of the dispersion threshold."""


LARGE_UNIT = 16
"""Units above this fraction of a thread's work are merged first."""


class FileRunner:
    """Runs the phases of a merge into a folder, in a workspace.

    Exact norms are measured while merging; before that, a sample tells the side of D's threshold.
    disk_bytes: those of the result, and of the updates that are kept until lambda is known.
    state: the identity of inputs and settings; None if a model is in memory, so that nothing can be resumed.
    hashes: size and sha256 of the files of all processes, once they are written.
    """

    measures = True

    def __init__(
        self,
        inputs: Inputs,
        target: str | Path,
        max_shard_size: int | str,
        settings: Mapping[str, Any],
        label: str = "merge",
        progress: bool = True,
        kept: Sequence[str] = (),
        updates: str | Path | None = None,
    ) -> None:
        """`kept`: the parameters whose updates are kept on disk until lambda is known.

        `updates`: a folder where they stay, for other lambdas.
        """
        self.processes = Processes.find()
        self.target = Path(os.path.abspath(Path(target).expanduser()))
        self._queues = queues(inputs)
        self.threads = sum(self._queues.values())
        self.workspace = Workspace(self.target, self.processes.rank)
        if updates is not None and not kept:
            raise CoramError(f"keep_update: {label} has no lambda, so no update is kept; remove it")
        self._updates = None if updates is None else Path(os.path.abspath(Path(updates).expanduser()))
        if self._updates is not None:
            self.workspace.kept = self._updates.with_name(f".{self._updates.name}.coram")
        self._inputs = inputs
        model, size = skeleton(inputs), shard_size(max_shard_size)
        state = model.state_dict()
        readers = 1 + len(inputs.experts)
        self.costs = {name: t.numel() * t.element_size() * readers for name, t in state.items()}
        shares = split(units(model), self.costs, self.processes.count)
        self.layout = Layout(model, shares, size, original_format=inputs.original_format)
        self.share: list[Unit] = shares[self.processes.rank]
        identity = inputs.identity()
        chosen = {**settings, "processes": self.processes.count, "max_shard_size": size}
        chosen |= {} if updates is None else {"updates": "kept"}
        self.state = None if identity is None else {"settings": chosen, **identity}
        likes = [inputs.base.original(name) for name in kept]
        self.disk_bytes = self.layout.total_bytes + sum(t.numel() * update_dtype(t).itemsize for t in likes)
        self.started = False
        self.hashes: dict[str, Any] = {}
        self._label, self._progress = label, progress and self.processes.first

    @property
    def keeps_updates(self) -> bool:
        """Whether updates stay on the disk after the merge."""
        return self._updates is not None

    def check(self, overwrite: bool) -> None:
        """Raise if the target cannot be written."""
        check_target(self.target, overwrite, self.disk_bytes, self._inputs.files())
        if self._updates is not None:
            check_target(self._updates, overwrite, 0, self._inputs.files())

    def publish(self, overwrite: bool) -> None:
        """Give the finished files, and then the updates to keep, their places."""
        if self._updates is not None:
            phases = self.workspace.entries()
            records = {n: r for (of, _), found in phases.items() if of == GEOMETRY for n, r in found.items()}
            write_index(self.workspace.kept, self.state, records)
        self.workspace.publish(overwrite)
        self.clean()

    def clean(self) -> None:
        """Keep the updates if that was asked for, and remove everything but the target."""
        if self._updates is not None and is_complete(self.workspace.kept):
            put_in_place(self.workspace.kept, self._updates)
        self.workspace.clean()

    def sink(self) -> FolderSink:
        """The files of this process."""
        files = self.layout.files(self.processes.rank)
        inputs = self._inputs
        spool = Spool(self.workspace.kept)
        return FolderSink(self.workspace.files, self.layout, files, inputs.base.tied, inputs.targets, spool)

    def norms(self, wanted: Wanted) -> Survey | None:
        """Measure all target matrices, or a sample of them to find the side of the threshold."""
        if wanted == "nothing":
            return None
        names = list(self._inputs.targets or self._inputs.outside)
        if wanted == "side":
            count = min(len(names), max(SAMPLE, len(names) // 32))
            drawn = sorted(random.Random(0).sample(range(len(names)), count))
            found = self._measure("sample", [names[i] for i in drawn], exact=False)
            if all(found.measured.updates.values()):
                return found
        return self._measure("survey", names)

    def each(
        self, phase: str, names: Sequence[str], task: Task, sink: FolderSink | None = None
    ) -> dict[str, Record]:
        """Run a task on every named parameter not yet journalled; a sink gets all parameters of the model."""
        if sink is None:
            return self._one_by_one(phase, names, lambda parameter: task(parameter, None))
        inputs, merged = self._inputs, set(names)
        self.started = True
        with sink:
            return self._run(
                phase, self.share, lambda unit: merge_unit(unit, inputs, merged, task, sink), sink
            )

    def _queue_of(self, unit: Unit) -> torch.device:
        return self._inputs.device_of(unit[0])

    def keep(self, phase: str, names: Sequence[str], task: Task, sink: FolderSink) -> dict[str, Record]:
        """Run a task on every named parameter not yet journalled; their updates go to the sink's spool."""
        return self._one_by_one(phase, names, lambda parameter: task(parameter, sink.keep(parameter.name)))

    def _one_by_one(
        self, phase: str, names: Sequence[str], task: Callable[[Parameter], Record]
    ) -> dict[str, Record]:
        share = split([(name,) for name in names], self.costs, self.processes.count)[self.processes.rank]
        return self._run(phase, share, lambda unit: Done([task(here(self._inputs, unit[0]))], {}))

    def _measure(self, phase: str, names: Sequence[str], *, exact: bool = True) -> Survey:
        experts = list(self._inputs.experts)

        def look(parameter: Parameter, _: object) -> Record:
            return measure(parameter, Record(), experts, exact=exact)

        return Survey.of(self.each(phase, names, look), self._inputs)

    def _run(
        self,
        phase: str,
        share: Sequence[Unit],
        work: Callable[[Unit], Done],
        sink: FolderSink | None = None,
    ) -> dict[str, Record]:
        """Run this process's units that are not journalled yet; return the records of all processes.

        Units are read ahead, merged and written concurrently: the costliest first, so that no thread is left
        with one at the end, then all others in the order of the files, which are hashed on the way. The
        records are by parameter, in the order of the inputs.
        """
        finished = self.workspace.entries()
        cost = {unit: sum(self.costs[name] for name in unit) for unit in share}
        large = sum(cost.values()) / (LARGE_UNIT * self.threads)
        mine = [unit for unit in share if (phase, unit[0]) not in finished]
        if sink is not None:
            mine.sort(key=self.layout.position)
            sink.expect(name for unit in mine for name in unit)
        mine.sort(key=lambda unit: -cost[unit] if cost[unit] > large or sink is None else 0)
        ahead, writer = ReadAhead(mine, self._inputs.prefetch), Writer(self.workspace, phase, sink)
        what, total = phase.partition(" ")[0], sum(cost[unit] for unit in mine)
        try:
            with timed(what), Progress(f"{self._label}: {what}", total, self._progress) as progress:
                for unit, done in in_queues(work, ahead.through(mine), self._queue_of, self._queues):
                    writer.put(unit, done)
                    progress.add(cost[unit])
        finally:
            ahead.stop()
            writer.close()
        self.processes.wait()
        tied, entries = self._inputs.base.tied, self.workspace.entries()
        if sink is not None:
            self.hashes = {file: found for (of, file), found in entries.items() if of == hashes_of(phase)}
        found = {
            tied.get(name, name): Record.from_dict(record)
            for (of, _), records in entries.items()
            if of == phase
            for name, record in records.items()
        }
        return {name: found[name] for name in (*self._inputs.floating, *found) if name in found}


def split(units: Iterable[Unit], costs: Mapping[str, int], count: int) -> list[list[Unit]]:
    """Distribute units over processes by cost."""
    by_name = {unit[0]: unit for unit in units}
    dealt = shares({name: sum(costs[n] for n in unit) for name, unit in by_name.items()}, count)
    return [[by_name[name] for name in names] for names in dealt]


def shard_size(size: int | str) -> int | str:
    """Return a number of bytes, or a string such as 5GB; raise for anything else."""
    size = int(size) if isinstance(size, str) and size.isdigit() else size
    if (isinstance(size, int) and size > 0) or (isinstance(size, str) and re.fullmatch(r"\d+[KMGT]B", size)):
        return size
    raise CoramError(f"max_shard_size must be a number of bytes or a string such as 5GB, found {size!r}")
