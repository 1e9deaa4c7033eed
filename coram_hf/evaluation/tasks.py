"""Tasks by name, path or object: .jsonl files and datasets for the light scorer, others for lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedModel

from coram_hf.config import check_names
from coram_hf.errors import CoramError
from coram_hf.evaluation.asking import Asker, Reader
from coram_hf.evaluation.dataset import parse_query, read_dataset
from coram_hf.evaluation.light import check_limit, score
from coram_hf.evaluation.memory import digest
from coram_hf.evaluation.questions import Task, read_task
from coram_hf.evaluation.splits import BUILDERS, HUB, is_dataset
from coram_hf.report.eval_results import Result

LIGHT = "coram-hf light scorer"
TaskSource = Any
"""A path or an address, the name of an lm-eval task, a `datasets.Dataset`, or a `Scorer`."""


class Scorer(Protocol):
    """A task that a model can be scored on.

    identity: a hash of the questions and of how they are asked; scores are reused if it is unchanged.
    A scorer whose `needs_processor` is true is called with the model's processor in place of its tokenizer.
    """

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str: ...

    def __call__(self, model: PreTrainedModel, reader: Any, /) -> list[Result]:
        """All metrics of the task; the first is the one that counts."""
        ...


@dataclass(frozen=True)
class LightScorer:
    """The first `limit` questions of a .jsonl file or a dataset."""

    task: Task
    limit: int | None = None

    @property
    def name(self) -> str:
        return self.task.name

    @cached_property
    def identity(self) -> str:
        asked = (
            ("chat", self.task.chat, "after", self.task.shots) if self.task.chat or self.task.shots else ()
        )
        return digest(LIGHT, *asked, *self.task.questions[: self.limit])

    @property
    def needs_processor(self) -> bool:
        return self.task.has_images

    def check(self, reader: Reader) -> tuple[str, ...]:
        """Raise if the questions cannot be asked; return what decides how, beside the vocabulary."""
        asker = Asker(self.task, reader)
        asker.prompt(self.task.questions[0])
        return asker.identity

    def __call__(self, model: PreTrainedModel, reader: Reader, /) -> list[Result]:
        found = score(model, reader, self.task, self.limit)
        outcomes = tuple(map(float, found.outcomes))
        return [
            Result(self.name, "accuracy", found.accuracy, found.standard_error, found.total, LIGHT, outcomes)
        ]


def check_scores(tasks: Sequence[Scorer]) -> None:
    """Raise for lower-is-better tasks: their numbers cannot be averaged with scores."""
    for task in tasks:
        if getattr(task, "lower_is_better", False):
            raise CoramError(
                f"task {task.name!r} has a lower-is-better metric; sweeps and comparisons average "
                "higher-is-better scores (`coram-hf eval` takes both)"
            )


def dataset_task(data: Any, **options: Any) -> LightScorer:
    """A task from a `datasets.Dataset` or `DatasetDict`, or from the address of a dataset.

    Args:
        data: the dataset; `hf://datasets/org/name`; a folder that `load_dataset` reads or `save_to_disk`
            wrote; or a .csv, .tsv, .json, .jsonl, .parquet or .arrow file.
        name: of the task in tables. By default that of the dataset.
        split: by default `test`, or the only one. config, revision: as in `load_dataset`.
        prompt, target, choices, answer: columns, `a.b` for a nested one, or (not for answer) texts with
            columns in braces, such as "Q: {question}\\nA:". Choices are one column of lists, or several
            columns. An answer is a number from 0, a letter, or the text of a choice; labels: a column with
            other names of the choices.
        images: a column with an image, or a list of them, per question.
        fewshot: how many solved rows of `fewshot_split` (by default `train`) come before each question.
        chat: whether to ask through the model's chat template.
        limit: the largest number of questions.
    """
    check_limit(options.get("limit"))
    valid = [name for name in signature(read_dataset).parameters if name != "data"]
    check_names(options, valid, "option of a dataset")
    return LightScorer(read_dataset(data, **options))


def open_tasks(tasks: Sequence[TaskSource], limit: int | None = None) -> list[Scorer]:
    """Read and check all tasks: files, datasets and their addresses, names of lm-eval tasks, or scorers."""
    check_limit(limit)
    if not tasks:
        raise CoramError("tasks: none given; pass at least one: a .jsonl file, a dataset or an lm-eval task")
    found: list[Scorer] = []
    for task in tasks:
        if is_dataset(task):
            found.append(dataset_task(task, limit=limit))
        elif isinstance(task, LightScorer):
            found.append(task if limit is None else replace(task, limit=min(limit, task.limit or limit)))
        elif isinstance(task, str | Path):
            found += _opened(str(task), limit)
        else:
            found.append(task)
    names = [scorer.name for scorer in found]
    for name in names:
        if names.count(name) > 1:
            raise CoramError(f"tasks: two are called {name!r}; rename one (a dataset by ?name=)")
    return found


def _opened(task: str, limit: int | None) -> Sequence[Scorer]:
    """The tasks behind a path, an address with options after a question mark, or a name of lm-eval."""
    address, mark, query = (task, "", "") if Path(task).exists() else task.partition("?")
    if mark or _is_dataset_address(address):
        return [dataset_task(address, limit=limit, **(parse_query(query, address) if mark else {}))]
    if address.endswith(".jsonl"):
        return [LightScorer(read_task(address), limit)]
    from coram_hf.evaluation.harness import open_harness_tasks

    return open_harness_tasks(address, limit)


def _is_dataset_address(address: str) -> bool:
    """Whether an address is that of a dataset: on the Hub, a file, or a folder without lm-eval's YAML."""
    path = Path(address)
    if address.startswith(HUB) or (path.is_dir() and any(path.iterdir()) and not any(path.glob("*.yaml"))):
        return True
    return path.suffix in BUILDERS and path.suffix != ".jsonl"
