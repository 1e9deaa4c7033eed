"""What a section of the diagnostics is: a name, a line of help, numbers and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.report.diagnostics.findings import Findings

Numbers = Mapping[str, Any]
"""What `diagnose` returns."""


@dataclass(frozen=True)
class Section:
    """One diagnostic. The command line reads its help, so its module imports torch and numpy only on use.

    numbers: what `diagnose` has under the section's name; extras: what it adds under other names.
    tables: for the page and the terminal, from the numbers of a diagnosis that has this section.
    geometry, entries: whether the walk must measure branches, rotations and conditions, or signs and
    conflicts; merged: whether the section is about merged models.
    """

    name: str
    help: str
    numbers: Callable[[Findings], dict[str, Any]]
    tables: Callable[[Numbers], list[Table]]
    extras: Mapping[str, Callable[[Findings], dict[str, Any]]] = field(default_factory=dict)
    geometry: bool = False
    entries: bool = False
    merged: bool = False
