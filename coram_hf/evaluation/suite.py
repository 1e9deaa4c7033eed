"""Suites: tasks grouped in domains, over which averages are taken, as in the paper's tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coram_hf.evaluation.formula import Formula, identifier
from coram_hf.report.eval_results import Result

STEP = 1e-4
"""Of the numeric derivative of an average by the score of a task."""


@dataclass(frozen=True)
class Domain:
    """A column: the weighted mean of its tasks, or a formula of them.

    tasks: their weights by name. weight: of the domain in the average. expert: the one trained for it.
    """

    name: str
    tasks: Mapping[str, float]
    formula: Formula | None = None
    weight: float = 1.0
    expert: str | None = None

    def score(self, values: Mapping[str, Any]) -> Any:
        """The domain's score from the scores of tasks, numbers or arrays of them."""
        if self.formula is not None:
            named = {identifier(task): values[task] for task in self.tasks}
            if len(named) == 1:
                named["x"] = next(iter(named.values()))
            return self.formula(named)
        return sum(weight * values[task] for task, weight in self.tasks.items()) / sum(self.tasks.values())


@dataclass(frozen=True)
class Suite:
    """The domains that the experts were trained for, and those that they were not."""

    inside: tuple[Domain, ...]
    outside: tuple[Domain, ...] = ()

    @staticmethod
    def of_tasks(inside: Sequence[str], outside: Sequence[str] = (), experts: Sequence[str] = ()) -> Suite:
        """Every task its own domain, and the expert of the same name, if there is one, its own expert."""
        own = {name: name for name in experts}
        domains = [Domain(task, {task: 1.0}, expert=own.get(task)) for task in inside]
        return Suite(tuple(domains), tuple(Domain(task, {task: 1.0}) for task in outside))

    def average(self, values: Mapping[str, Any]) -> Any:
        """The weighted mean over the in-domain domains."""
        return mean_over(self.inside, values)

    def score(self, results: Mapping[str, Result]) -> float:
        """The in-domain average of a model's results."""
        return float(self.average(values_of(results)))

    def standard_error(self, results: Mapping[str, Result]) -> float | None:
        """sqrt(sum_t (d average / d score_t)^2 se_t^2), if the error of every task is known."""
        return propagated(self.inside, results)


def mean_over(domains: Sequence[Domain], values: Mapping[str, Any]) -> Any:
    """The weighted mean of the domains' scores."""
    total = math.fsum(domain.weight for domain in domains)
    return sum(domain.weight * domain.score(values) for domain in domains) / total


def propagated(domains: Sequence[Domain], results: Mapping[str, Result]) -> float | None:
    """The standard error of the mean over domains, by the delta method, with independent tasks."""
    values, squares = values_of(results), []
    for task in tasks_of(domains):
        error = results[task].standard_error
        if error is None:
            return None
        up, down = ({**values, task: values[task] + sign * STEP} for sign in (1, -1))
        squares.append(((mean_over(domains, up) - mean_over(domains, down)) / (2 * STEP) * error) ** 2)
    return math.sqrt(math.fsum(squares))


def tasks_of(domains: Sequence[Domain]) -> list[str]:
    """The tasks of all domains, each once."""
    return list(dict.fromkeys(task for domain in domains for task in domain.tasks))


def values_of(results: Mapping[str, Result]) -> dict[str, float]:
    """The scores by task."""
    return {task: result.value for task, result in results.items()}
