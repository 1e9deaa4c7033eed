"""Runners: carry out the work on every parameter, in memory or from files to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Protocol, TypeVar

from tqdm.auto import tqdm

from coram_hf.amplitude import Wanted
from coram_hf.execution.survey import Survey
from coram_hf.execution.threads import in_threads, thread_count
from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.methods.protocol import How, Work
from coram_hf.methods.record import Record, check_finite, measure
from coram_hf.outputs.place import Place

Result = TypeVar("Result")
Task = Callable[[Parameter, Place | None], Record]
"""Merges one parameter into its place; without a place it is only measured."""


class Sink(Protocol):
    """Where merged parameters go.

    keeps: whether it can hold updates until lambda is known.
    """

    @property
    def keeps(self) -> bool: ...

    def place(self, name: str) -> Place:
        """Where one parameter goes."""
        ...

    def kept(self, work: Work, records: Mapping[str, Record]) -> Work:
        """The work, with updates that the sink holds reused instead of merged again."""
        ...


SinkType = TypeVar("SinkType", bound=Sink, contravariant=True)


class Runner(Protocol[SinkType]):
    """Carries out a merge.

    measures: whether update norms are measured while merging rather than before.
    """

    @property
    def measures(self) -> bool: ...

    def norms(self, wanted: Wanted) -> Survey | None:
        """Update norms before merging, at least as exact as `wanted`."""
        ...

    def each(
        self, phase: str, names: Sequence[str], task: Task, sink: SinkType | None = None
    ) -> dict[str, Record]:
        """Run a task on every named parameter, and return their records.

        A sink that needs the whole model gets all other parameters unchanged from the base.
        """
        ...


def merge_task(
    work: Work, names: Mapping[str, How], lam: float | None, inputs: Inputs, measures: bool
) -> Task:
    """The task of merging one parameter: amplified if the method says so, and measured along the way."""
    experts = list(inputs.experts)

    def task(parameter: Parameter, place: Place | None) -> Record:
        record, strength = Record(), lam if names[parameter.name].amplified else 1.0
        for block in work(parameter):
            record.slices += block.stats
            if block.squares is not None:
                of_base, *of_updates = block.squares.tolist()
                record.measure(of_base, of_updates)
            if place is not None:
                record.write(*place.add(block, parameter, strength))
        if place is not None:
            record.write(*place.close(parameter, strength))
        if measures and not record.updates:
            measure(parameter, record, experts)
        elif record.updates:
            check_finite(parameter.name, record, experts)
        return record

    return task


class MemoryRunner:
    """Merges models in memory, several parameters at a time; exact norms are measured before."""

    measures = False

    def __init__(self, inputs: Inputs, label: str, progress: bool = True) -> None:
        self._inputs, self._label, self._progress = inputs, label, progress
        self._threads = thread_count(inputs.device)

    def norms(self, wanted: Wanted = "exact") -> Survey:
        """The norms of every floating-point tensor; raises for NaN and infinity, naming model and tensor."""
        return self._survey

    @cached_property
    def _survey(self) -> Survey:
        inputs, experts = self._inputs, list(self._inputs.experts)

        def look(name: str) -> Record:
            return measure(inputs.parameter(name), Record(), experts)

        return Survey.of(dict(in_threads(look, inputs.floating, self._threads)), inputs)

    def each(
        self, phase: str, names: Sequence[str], task: Task, sink: Sink | None = None
    ) -> dict[str, Record]:
        """Run a task on every named parameter, with a progress bar."""

        def work(name: str) -> Record:
            return task(self._inputs.parameter(name), None if sink is None else sink.place(name))

        return self.map(phase.partition(" ")[0], names, work)

    def map(self, what: str, names: Sequence[str], work: Callable[[str], Result]) -> dict[str, Result]:
        """work(name) by name, in the order of the names."""
        bar = partial(tqdm, desc=f"{self._label}: {what}", disable=not self._progress)
        found = {}
        with bar(total=len(names)) as progress:
            for name, result in in_threads(work, names, self._threads):
                found[name] = result
                progress.update()
        return {name: found[name] for name in names}
