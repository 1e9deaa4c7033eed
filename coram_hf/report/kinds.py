"""What a merge does to each kind of parameter: how many there are, and how much of the update they keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coram_hf.report.tables import Table

Counts = Mapping[str, Mapping[str, int]]
"""By kind: the number of tensors, and of the parameters that go each way."""

COLUMNS = {
    "tensors": "tensors",
    "target": "parameters merged by the method",
    "residual": "merged otherwise",
    "kept": "left at the base",
}


@dataclass(frozen=True)
class Retained:
    """Squared norms by parameter: of the merged update (0 if missing), and of every expert's update.

    kinds: what each parameter is, by `find_kinds`.
    """

    moved: Mapping[str, float]
    updates: Mapping[str, Sequence[float]]
    kinds: Mapping[str, str]

    def by_kind(self) -> dict[str, float]:
        """r_kind = |W_merge - W_0| / RMS_i |W_i - W_0| over all tensors of a kind.

        Kinds that no expert changed are left out.
        """
        from coram_hf.inputs.kinds import KINDS

        merged = dict.fromkeys(KINDS, 0.0)
        experts = dict.fromkeys(KINDS, 0.0)
        for name, squares in self.updates.items():
            kind = self.kinds[name]
            merged[kind] += self.moved.get(name, 0.0)
            experts[kind] += math.fsum(squares) / len(squares)
        return {kind: math.sqrt(merged[kind] / experts[kind]) for kind in KINDS if experts[kind] > 0}


def count_kinds(
    kinds: Mapping[str, str], sizes: Mapping[str, int], parts: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, int]]:
    """Tensors and parameters by kind, for every part of a plan (target, residual, kept)."""
    from coram_hf.inputs.kinds import KINDS

    found = {kind: dict.fromkeys(("tensors", *parts), 0) for kind in KINDS}
    for part, names in parts.items():
        for name in names:
            found[kinds[name]]["tensors"] += 1
            found[kinds[name]][part] += sizes[name]
    return {kind: counts for kind, counts in found.items() if counts["tensors"]}


def kind_lines(counts: Counts) -> dict[str, str]:
    """How many tensors and parameters each kind has, in words."""
    return {
        kind: f"{of['tensors']:,} tensors, {sum(of.values()) - of['tensors']:,} parameters"
        for kind, of in counts.items()
    }


def kind_table(counts: Counts, retention: Mapping[str, float]) -> Table:
    """What became of each kind, and its retention; reports of older versions have only the latter."""
    rows = []
    for kind in dict.fromkeys((*counts, *retention)):
        of, kept = counts.get(kind, {}), retention.get(kind)
        cells = [f"{of[key]:,}" if key in of else "-" for key in COLUMNS]
        rows.append([kind, *cells, "-" if kept is None else f"{kept:.3g}"])
    return Table("Parameters by kind", ["kind", *COLUMNS.values(), "retention"], rows)
