"""Record: what happened to one parameter on its way through a merge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from coram_hf.amplitude import UpdateNorms
from coram_hf.geometry import SliceStats


@dataclass
class Record:
    """The slices of one parameter, the norms of its updates, and what rounding took from the merged one.

    moved, lost: |coefficient * update|^2 and |error of rounding to the result's dtype|^2.
    base, updates: |W_0|^2, and |W_i - W_0|^2 of every expert, where they were measured.
    """

    slices: SliceStats = field(default_factory=SliceStats)
    moved: float = 0.0
    lost: float = 0.0
    base: float = 0.0
    updates: list[float] = field(default_factory=list)

    def measure(self, base: float, updates: Sequence[float]) -> None:
        """Add the squared norms of some rows."""
        self.base += base
        self.updates = [a + b for a, b in zip(self.updates or [0.0] * len(updates), updates, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a journal; `from_dict` gets back the same bits."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        """The inverse of `to_dict`."""
        return cls(**{**values, "slices": SliceStats(**values["slices"])})


def total(records: Iterable[Record]) -> Record:
    """All records together, summed so that their order does not matter."""
    every = list(records)
    whole = Record(
        moved=math.fsum(r.moved for r in every),
        lost=math.fsum(r.lost for r in every),
        base=math.fsum(r.base for r in every),
    )
    for record in every:
        whole.slices += record.slices
    whole.slices.squared_norm = math.fsum(record.slices.squared_norm for record in every)
    whole.updates = [
        math.fsum(column) for column in zip(*(r.updates for r in every if r.updates), strict=True)
    ]
    return whole


def norms(records: Iterable[Record], experts: Sequence[str]) -> UpdateNorms:
    """The update norms of the experts over some parameters."""
    whole = total(records)
    return UpdateNorms(whole.base, dict(zip(experts, whole.updates or [0.0] * len(experts), strict=True)))
