"""Record: what happened to one parameter on its way through a merge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from coram_hf.amplitude import UpdateNorms
from coram_hf.errors import CoramError
from coram_hf.geometry import SUMS, SliceStats, squared_norms
from coram_hf.inputs.inputs import Parameter


@dataclass
class Record:
    """The slices of one parameter, the norms of its updates, and the rounding error of the merged one.

    moved, lost: |coefficient * update|^2 and |error of rounding to the result's dtype|^2.
    base, updates: |W_0|^2, and |W_i - W_0|^2 of every expert, if they were measured.
    decorrelation: the numbers of its `Decorrelation`, if it was decorrelated.
    """

    slices: SliceStats = field(default_factory=SliceStats)
    moved: float = 0.0
    lost: float = 0.0
    base: float = 0.0
    updates: list[float] = field(default_factory=list)
    decorrelation: list[float] = field(default_factory=list)

    def measure(self, base: float, updates: Sequence[float]) -> None:
        """Add the squared norms of some rows."""
        self.base += base
        self.updates = _added(self.updates, updates)

    def decorrelate(self, numbers: Sequence[float]) -> None:
        """Add the numbers of a matrix that was decorrelated."""
        self.decorrelation = _added(self.decorrelation, numbers)

    def write(self, moved: float, lost: float) -> None:
        """Add `moved` and `lost` of some rows that were written."""
        self.moved += moved
        self.lost += lost

    @property
    def rounding_loss(self) -> float:
        """|rounding error| / |update| over everything written."""
        return math.sqrt(self.lost / self.moved) if self.moved else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a journal; `from_dict` restores them bit by bit."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        """A record from its plain values."""
        return cls(**{**values, "slices": SliceStats(**values["slices"])})


def _added(some: Sequence[float], more: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(some or [0.0] * len(more), more, strict=True)]


def total(records: Iterable[Record]) -> Record:
    """The sum of all records, independent of their order."""
    every = list(records)
    whole = Record(
        moved=math.fsum(r.moved for r in every),
        lost=math.fsum(r.lost for r in every),
        base=math.fsum(r.base for r in every),
    )
    for record in every:
        whole.slices += record.slices
    for name in SUMS:
        setattr(whole.slices, name, math.fsum(getattr(record.slices, name) for record in every))
    whole.updates = _sums([record.updates for record in every])
    whole.decorrelation = _sums([record.decorrelation for record in every])
    return whole


def _sums(rows: Iterable[Sequence[float]]) -> list[float]:
    """The sum of each column over all rows that have any."""
    return [math.fsum(column) for column in zip(*filter(None, rows), strict=True)]


def norms(records: Iterable[Record], experts: Sequence[str]) -> UpdateNorms:
    """The update norms of the experts, summed over records."""
    whole = total(records)
    return UpdateNorms(whole.base, dict(zip(experts, whole.updates or [0.0] * len(experts), strict=True)))


def measure(parameter: Parameter, record: Record, experts: Sequence[str], *, exact: bool = True) -> Record:
    """Add the norms of a parameter and of its updates to a record, and return the record."""
    record.measure(*squared_norms(parameter.base, parameter.experts, exact=exact))
    check_finite(parameter.name, record, experts)
    return record


def check_finite(name: str, record: Record, experts: Sequence[str]) -> None:
    """Raise if the norms of a tensor reveal NaN or infinite values."""
    if not math.isfinite(record.base):
        raise CoramError(f"the base, tensor {name!r}: contains NaN or infinite values")
    for expert, square in zip(experts, record.updates, strict=True):
        if not math.isfinite(square):
            raise CoramError(
                f"expert {expert!r}, tensor {name!r}: contains NaN or infinite values; "
                "its checkpoint is damaged or its training diverged"
            )
