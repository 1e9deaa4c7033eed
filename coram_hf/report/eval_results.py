"""eval_results.json: the scores of a saved model, and the weights that were scored."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coram_hf.outputs.files import write_whole

EVAL_NAME = "eval_results.json"


@dataclass(frozen=True)
class Result:
    """One score of a model on a task: metric, value, standard error, number of questions, scorer."""

    task: str
    metric: str
    value: float
    standard_error: float | None
    questions: int
    scorer: str


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
        write_whole(folder / EVAL_NAME, json.dumps(asdict(self), indent=2, allow_nan=False) + "\n")
