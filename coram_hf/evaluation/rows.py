"""The rows of a comparison: numbers with the best in bold, and differences with an interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coram_hf.evaluation.scores import percent
from coram_hf.hub.text import inline

NONE = "-"


class Difference(NamedTuple):
    """How far one row's average is above another's, with a 95% interval."""

    row: str
    against: str
    estimate: float
    low: float
    high: float

    def points(self) -> tuple[str, str]:
        """The difference and its interval, in points."""
        return f"{100 * self.estimate:+.2f}", f"{100 * self.low:+.2f} to {100 * self.high:+.2f}"

    def cells(self) -> list[str]:
        """The cells of its row."""
        return [inline(self.row), inline(self.against), *self.points()]


@dataclass(frozen=True)
class Row:
    """A row of numbers, None where one is missing, with notes by column."""

    name: str
    values: list[float | None]
    notes: dict[int, str] = field(default_factory=dict)

    def cells(self, bold: Sequence[float | None]) -> list[str]:
        """The cells of the row, bold where a value equals that in `bold`."""
        cells = [self.name]
        for i, (value, best) in enumerate(zip(self.values, bold, strict=True)):
            text = NONE if value is None else percent(value)
            strong = value is not None and best is not None and text == percent(best)
            cells.append((f"**{text}**" if strong else text) + self.notes.get(i, ""))
        return cells


def largest(values: Iterable[float | None]) -> float | None:
    """The largest of the known values."""
    return max((value for value in values if value is not None), default=None)
