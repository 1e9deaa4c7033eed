"""MemoryRunner: a merge of models in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import torch

from coram_hf.amplitude import Wanted
from coram_hf.execution.cost import timed
from coram_hf.execution.progress import Progress
from coram_hf.execution.protocol import Sink
from coram_hf.execution.survey import Survey
from coram_hf.execution.tasks import Task, here, in_queues, in_threads, queues, thread_count
from coram_hf.inputs.inputs import Inputs
from coram_hf.methods.record import Record, measure

Result = TypeVar("Result")


class MemoryRunner:
    """Merges into a model, several parameters at a time on each device; exact norms are measured before."""

    measures = False
    keeps_updates = False

    def __init__(self, inputs: Inputs, label: str, progress: bool = True) -> None:
        self._inputs, self._label, self._progress = inputs, label, progress
        self._queues = queues(inputs)

    def norms(self, wanted: Wanted = "exact") -> Survey:
        """The norms of every floating-point tensor; raises for NaN and infinity, naming model and tensor."""
        return self._survey

    @cached_property
    def _survey(self) -> Survey:
        inputs, experts = self._inputs, list(self._inputs.experts)

        def look(name: str) -> Record:
            return measure(inputs.parameter(name), Record(), experts)

        count = thread_count(torch.device("cpu"))
        with timed("survey"):
            return Survey.of(dict(in_threads(look, inputs.floating, count)), inputs)

    def each(
        self, phase: str, names: Sequence[str], task: Task, sink: Sink | None = None
    ) -> dict[str, Record]:
        """Run a task on every named parameter, with a progress bar."""

        def work(name: str) -> Record:
            return task(here(self._inputs, name), None if sink is None else sink.place(name))

        return self.map(phase.partition(" ")[0], names, work)

    def keep(self, phase: str, names: Sequence[str], task: Task, sink: Sink) -> dict[str, Record]:
        """Run a task on every named parameter, whose updates the sink keeps."""
        return self.map(phase, names, lambda name: task(self._inputs.parameter(name), sink.keep(name)))

    def map(self, what: str, names: Sequence[str], work: Callable[[str], Result]) -> dict[str, Result]:
        """work(name) by name, in the order of the names; each is done in the queue of its device."""
        found = {}
        bar = Progress(f"{self._label}: {what}", len(names), self._progress, unit="tensors")
        with timed(what), bar as progress:
            for name, result in in_queues(work, names, self._inputs.device_of, self._queues):
                found[name] = result
                progress.add()
        return {name: found[name] for name in names}
