"""The protocols of a merge: sinks take merged parameters, runners carry out the work on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from coram_hf.amplitude import Wanted
from coram_hf.execution.survey import Survey
from coram_hf.execution.tasks import Task
from coram_hf.methods.protocol import Work
from coram_hf.methods.record import Record
from coram_hf.outputs.place import Place


class Sink(Protocol):
    """Where merged parameters go, and where their updates are kept until lambda is known."""

    def place(self, name: str) -> Place:
        """Where one parameter goes."""
        ...

    def keep(self, name: str) -> Place:
        """Where the update of one parameter is kept."""
        ...

    def kept(self, work: Work, records: Mapping[str, Record]) -> Work:
        """The work, with updates that the sink holds reused instead of merged again."""
        ...


SinkType = TypeVar("SinkType", bound=Sink, contravariant=True)


class Runner(Protocol[SinkType]):
    """Carries out a merge.

    measures: whether update norms are measured while merging rather than before.
    keeps_updates: whether the updates are kept for later, even if lambda is known.
    """

    @property
    def measures(self) -> bool: ...
    @property
    def keeps_updates(self) -> bool: ...

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

    def keep(self, phase: str, names: Sequence[str], task: Task, sink: SinkType) -> dict[str, Record]:
        """Run a task on every named parameter, and let the sink keep their updates."""
        ...
