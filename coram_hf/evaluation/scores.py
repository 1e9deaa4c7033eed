"""Scores of models by task, and of a line over lambda: the rule's point, the optimum, the gap."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from coram_hf.config import CoramConfig
from coram_hf.evaluation.suite import Suite
from coram_hf.report.eval_results import Result

Results = dict[str, Result]
"""The results of one model, by task."""


@dataclass(frozen=True)
class Point:
    """A line at one lambda, and its results by task; averages are over the domains of the suite, if any.

    seconds: what assembling and scoring its model took.
    """

    lam: float
    results: Results
    suite: Suite | None = None
    seconds: float = field(default=0.0, compare=False)

    @property
    def average(self) -> float:
        return average(self.results) if self.suite is None else self.suite.score(self.results)

    @property
    def standard_error(self) -> float | None:
        """The standard error of the average, if known."""
        return (self.suite or Suite.of_tasks(tuple(self.results))).standard_error(self.results)

    @property
    def uncertainty(self) -> float | None:
        """Half-width of a 95% interval of the average: sqrt(sum of squared half-widths) / tasks, if known."""
        intervals = [result.interval for result in self.results.values()]
        halves = [(found[1] - found[0]) / 2 for found in intervals if found is not None]
        return math.hypot(*halves) / len(halves) if len(halves) == len(intervals) else None


@dataclass(frozen=True)
class Line:
    """One configuration over several lambdas: the points in order, including that of the rule.

    facts: D, kappa, c_RMS, sources and more, from the report of the merge. beyond: the results at the rule's
    lambda on tasks that the sweep does not see. merging: the seconds that the merge took.
    """

    config: CoramConfig
    facts: dict[str, Any]
    points: tuple[Point, ...]
    beyond: Results
    merging: float = field(default=0.0, compare=False)

    @property
    def name(self) -> str:
        return self.config.line

    @property
    def rule(self) -> Point:
        """The point at lambda = kappa * scale."""
        return next(point for point in self.points if point.lam == self.facts["lam"])

    @property
    def best(self) -> Point:
        """The swept optimum; among equal ones, the nearest to the rule's lambda."""
        return max(self.points, key=lambda p: (p.average, -abs(p.lam - self.facts["lam"])))

    @property
    def gap(self) -> float:
        """The average at the optimum minus that at the rule's lambda; never negative."""
        return self.best.average - self.rule.average

    @property
    def at_edge(self) -> bool:
        """Whether only the first or only the last lambda is the best, so a better one may lie beyond it."""
        others = [point.average for point in self.points if point is not self.best]
        outermost = self.best.lam in (self.points[0].lam, self.points[-1].lam)
        return bool(others) and outermost and self.best.average > max(others)

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain values."""
        return {
            "line": self.name,
            "config": self.config.to_dict(),
            **{key: value for key, value in self.facts.items() if key != "lam"},
            "rule": {"lam": self.rule.lam, "average": self.rule.average},
            "best": {"lam": self.best.lam, "average": self.best.average},
            "kappa_best": self.best.lam * self.facts["effective_kappa"] / self.facts["lam"],
            "gap": self.gap,
            "points": [
                {"lam": p.lam, "average": p.average, "results": plain(p.results)} for p in self.points
            ],
        }


def average(results: Results) -> float:
    """The mean over tasks."""
    return math.fsum(result.value for result in results.values()) / len(results)


def plain(results: Results) -> dict[str, Any]:
    """Results as plain values."""
    return {task: result.brief() for task, result in results.items()}


def percent(value: float) -> str:
    """An accuracy in percent, as in the paper's tables."""
    return f"{100 * value:.2f}"
