"""Sampled tasks repeated under several seeds: the mean, and the score of every seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel

from coram_hf.errors import CoramError
from coram_hf.evaluation.memory import digest
from coram_hf.evaluation.tasks import Scorer
from coram_hf.report.eval_results import Result


@dataclass(frozen=True)
class Repeated:
    """A task whose answers are sampled, scored once per seed; its score is the mean."""

    scorer: Any
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.scorer.name)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(getattr(self.scorer, "parts", None) or (self.name,))

    @property
    def identity(self) -> str:
        return digest(self.scorer.identity, self.seeds)

    def __call__(self, model: PreTrainedModel, reader: Any, /) -> list[Result]:
        runs = [replace(self.scorer, seed=seed)(model, reader) for seed in self.seeds]
        return [self._mean(list(same)) for same in zip(*runs, strict=True)]

    def _mean(self, found: list[Result]) -> Result:
        """The mean over seeds, question by question where the outcomes are known."""
        alike = {len(one.outcomes) for one in found}
        outcomes = (
            tuple(map(fmean, zip(*(one.outcomes for one in found), strict=True))) if len(alike) == 1 else ()
        )
        by_seed = {str(seed): one.value for seed, one in zip(self.seeds, found, strict=True)}
        value = fmean(by_seed.values())
        return replace(found[0], value=value, outcomes=outcomes, by_seed=by_seed)


def repeat_sampled(tasks: Sequence[Scorer], seeds: Sequence[int]) -> list[Scorer]:
    """The tasks, those with sampled answers repeated; greedy ones are the same under every seed."""
    if len(set(seeds)) != len(seeds):
        raise CoramError(f"seeds: each must be given once, found {', '.join(map(str, seeds))}")
    if not seeds:
        return list(tasks)
    return [Repeated(task, tuple(seeds)) if getattr(task, "sampled", False) else task for task in tasks]
