"""What a calibration found, as the report keeps it: numbers only, and never a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from coram_hf.config import group_names
from coram_hf.report.tables import Table

COARSEST = "lambda"
Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Calibration:
    """How lambda, and with it factors, were found from unlabelled prompts.

    granularity: what was fitted and kept; requested: what was asked for, which is finer if it did not help.
    prompts, answer_tokens: their numbers, by teacher; sha256: a hash of the prompts.
    start: lambda before; lam: lambda after. curves: the loss against lambda, by granularity.
    before, after: KL(p_i || p_merge) per token of the answers, by teacher; held_back: its mean over the
    teachers on the answers that no factor was fitted to, by granularity.
    neutral: KL(p_base || p_merge) per token of a few neutral sentences, before and after.
    factors: by expert, one number or one per group of modules.
    """

    granularity: str
    requested: str
    prompts: dict[str, int]
    answer_tokens: dict[str, int]
    sha256: str
    start: float
    lam: float
    curves: dict[str, Curve]
    before: dict[str, float]
    after: dict[str, float]
    held_back: dict[str, float]
    neutral: dict[str, float]
    factors: dict[str, float | list[float]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Calibration:
        """A calibration from a report, whatever else it has."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})

    def tables(self) -> list[Table]:
        """Divergence by teacher, the loss against lambda, and the fitted factors."""
        rows = [[name, self.prompts[name], self.before[name], self.after[name]] for name in self.before]
        rows.append(["neutral text, from the base", None, self.neutral["before"], self.neutral["after"]])
        found = [Table("KL per token", ["answers of", "prompts", "before", "after"], rows)]
        found += [
            Table(f"KL against lambda, {how} fitted", ["lambda", "KL", ""], self.points(how))
            for how in self.curves
        ]
        if self.factors:
            each = [of if isinstance(of, list) else [of] for of in self.factors.values()]
            names = group_names(len(each[0])) if len(each[0]) > 1 else ["factor"]
            table = [[name, *row] for name, row in zip(names, zip(*each, strict=True), strict=True)]
            found.append(Table("Fitted factors", ["modules", *self.factors], table))
        return found

    def points(self, how: str) -> list[list[Any]]:
        """One curve as rows: lambda, the loss, and what the point is."""
        chosen = self.lam if how == self.granularity else None
        marks = {self.start: "before"} if how == COARSEST else {}
        marks |= {} if chosen is None else {chosen: "chosen"}
        return [[lam, loss, marks.get(lam, "")] for lam, loss in self.curves[how]]
