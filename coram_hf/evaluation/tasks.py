"""Tasks by name or path: .jsonl files for the light scorer, the others for lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.errors import CoramError
from coram_hf.evaluation.light import Task, check_limit, read_task, score
from coram_hf.evaluation.memory import digest
from coram_hf.report.eval_results import Result

LIGHT = "coram-hf light scorer"


class Scorer(Protocol):
    """A task that a model can be scored on.

    identity: a hash of the questions and of how they are asked; scores are reused if it is unchanged.
    """

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    def __call__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Result]:
        """All metrics of the task; the first is the one that counts."""
        ...


@dataclass(frozen=True)
class LightScorer:
    """The first `limit` questions of a .jsonl task."""

    task: Task
    limit: int | None = None

    @property
    def name(self) -> str:
        return self.task.name

    @cached_property
    def identity(self) -> str:
        return digest(LIGHT, *self.task.questions[: self.limit])

    def __call__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Result]:
        found = score(model, tokenizer, self.task, self.limit)
        return [Result(self.name, "accuracy", found.accuracy, found.standard_error, found.total, LIGHT)]


def check_scores(tasks: Sequence[Scorer]) -> None:
    """Raise for lower-is-better tasks: their numbers cannot be averaged with scores."""
    for task in tasks:
        if getattr(task, "lower_is_better", False):
            raise CoramError(
                f"task {task.name!r} has a lower-is-better metric; sweeps and comparisons average "
                "higher-is-better scores (`coram-hf eval` takes both)"
            )


def open_tasks(tasks: Sequence[str | Path | Scorer], limit: int | None = None) -> list[Scorer]:
    """Read and check all tasks: paths of .jsonl files, names or YAML files of lm-eval tasks, or scorers."""
    check_limit(limit)
    if not tasks:
        raise CoramError("tasks: none given; pass at least one, a .jsonl file or an lm-eval task")
    found: list[Scorer] = []
    for task in tasks:
        if not isinstance(task, str | Path):
            found.append(task)
        elif str(task).endswith(".jsonl"):
            found.append(LightScorer(read_task(task), limit))
        else:
            from coram_hf.evaluation.harness import open_harness_tasks

            found += open_harness_tasks(str(task), limit)
    names = [scorer.name for scorer in found]
    for name in names:
        if names.count(name) > 1:
            raise CoramError(f"tasks: two are called {name!r}; rename one")
    return found
