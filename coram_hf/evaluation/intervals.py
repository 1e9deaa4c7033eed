"""Bootstrap intervals of scores and of their differences, from the outcome of every question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coram_hf.report.eval_results import Result

DRAWS = 2000
LEVEL = 0.95
BLOCK = 2_000_000
"""Drawn questions held at once."""


class Interval(NamedTuple):
    """A number, and the bounds between which the given share of bootstrap draws lies."""

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether both bounds are on the same side of zero."""
        return self.low > 0 or self.high < 0


def bootstrap(
    outcomes: Mapping[str, Sequence[float]], *, draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> Interval:
    """The sum over strata of the mean outcome, with a percentile interval; strata are drawn separately.

    For the average over tasks, outcomes are divided by the number of tasks; for a paired difference of two
    models, each is the difference of the two on one question.
    """
    generator = np.random.default_rng(seed)
    estimate, drawn = 0.0, np.zeros(draws)
    for found in outcomes.values():
        values = np.asarray(found, dtype=np.float64)
        estimate += float(values.mean())
        drawn += values[generator.integers(0, len(values), (draws, len(values)))].mean(1)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(estimate, float(low), float(high))


def paired_difference(
    ours: Mapping[str, Sequence[bool]], theirs: Mapping[str, Sequence[bool]], **options: int
) -> Interval:
    """How far the average over tasks of one model is above that of another, on the same questions."""
    differences = {
        task: [(a - b) / len(ours) for a, b in zip(ours[task], theirs[task], strict=True)] for task in ours
    }
    return bootstrap(differences, **options)


def difference(
    average: Callable[[Mapping[str, Any]], Any],
    ours: Mapping[str, Result],
    theirs: Mapping[str, Result],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """How far the `average` of one model's results is above that of another's, with a bootstrap interval.

    Every task is a stratum. Questions are drawn in pairs where both models' outcomes are known; a task of
    which only standard errors are known is drawn from two normal distributions; others stay as they are.
    """
    generator = np.random.default_rng(seed)
    a: dict[str, Any] = {}
    b: dict[str, Any] = {}
    for task, mine in ours.items():
        other = theirs[task]
        first, second = (np.asarray(one.outcomes, dtype=np.float64) for one in (mine, other))
        if len(first) and len(first) == len(second):
            a[task], b[task] = _resampled(np.stack([first, second]), generator, draws)
        else:
            a[task], b[task] = (
                one.value + (one.standard_error or 0.0) * generator.standard_normal(draws)
                for one in (mine, other)
            )
    drawn = average(a) - average(b)
    estimate = average({t: r.value for t, r in ours.items()}) - average({t: theirs[t].value for t in ours})
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(estimate), float(low), float(high))


def _resampled(outcomes: Any, generator: np.random.Generator, draws: int) -> Any:
    """The means of questions drawn with replacement, the same ones for all rows; some draws at a time."""
    count = outcomes.shape[1]
    at_once = max(1, BLOCK // count)
    parts = []
    for start in range(0, draws, at_once):
        chosen = generator.integers(0, count, (min(at_once, draws - start), count))
        parts.append(outcomes[:, chosen].mean(2))
    return np.concatenate(parts, axis=1)
