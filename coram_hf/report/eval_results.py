"""eval_results.json: the scores of a saved model, and the weights that were scored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coram_hf.outputs.files import write_whole

EVAL_NAME = "eval_results.json"
SHARES = ("accuracy", "acc", "acc_norm", "exact_match", "em")
"""Metrics that are the share of right answers, ours and lm-eval's."""
Z = 1.959964
"""The 97.5% quantile of the normal distribution."""


@dataclass(frozen=True)
class Result:
    """One score of a model on a task: metric, value, standard error, number of questions, scorer.

    outcomes: of every question, if known. by_seed: the values of which `value` is the mean, if repeated.
    """

    task: str
    metric: str
    value: float
    standard_error: float | None
    questions: int
    scorer: str
    outcomes: Sequence[float] = field(default=(), compare=False, repr=False)
    by_seed: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)

    def brief(self) -> dict[str, Any]:
        """The result as plain values, without the outcomes of questions."""
        values = asdict(self)
        del values["outcomes"]
        if not self.by_seed:
            del values["by_seed"]
        return values

    @property
    def interval(self) -> tuple[float, float] | None:
        """A 95% interval: Wilson's for a share of right answers, else 1.96 standard errors; None if unknown.

        Wilson's is never a single point, even if all answers of a small sample are right or wrong.
        """
        if self.metric.partition(" ")[0] in SHARES and 0 <= self.value <= 1 and self.questions > 0:
            return wilson(self.value, self.questions)
        if self.standard_error is None:
            return None
        return self.value - Z * self.standard_error, self.value + Z * self.standard_error


def wilson(share: float, count: int) -> tuple[float, float]:
    """(p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n), the 95% score interval."""
    square = Z * Z / count
    middle = share + square / 2
    half = Z * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))


@dataclass(frozen=True)
class EvalResults:
    """Results of the model in a folder. files: size and sha256 of the weights that were scored."""

    model: str
    files: dict[str, Any]
    results: tuple[Result, ...] = field(default_factory=tuple)

    @classmethod
    def load(cls, folder: Path, files: dict[str, Any]) -> EvalResults | None:
        """The results in a folder; None if there are none for these weights."""
        try:
            found = json.loads((folder / EVAL_NAME).read_text(encoding="utf-8"))
            results = tuple(Result(**values) for values in found["results"])
            return cls(str(found["model"]), files, results) if found["files"] == files else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def replaced(self, results: Iterable[Result]) -> EvalResults:
        """A copy with these results in place of earlier ones of the same tasks."""
        new = tuple(results)
        tasks = {result.task for result in new}
        kept = tuple(result for result in self.results if result.task not in tasks)
        return EvalResults(self.model, self.files, kept + new)

    def save(self, folder: Path) -> None:
        """Write eval_results.json."""
        content = {**vars(self), "results": [result.brief() for result in self.results]}
        write_whole(folder / EVAL_NAME, json.dumps(content, indent=2, allow_nan=False) + "\n")
