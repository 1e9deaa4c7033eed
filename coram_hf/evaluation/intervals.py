"""Bootstrap intervals of scores and of their differences, from the outcome of every question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

DRAWS = 2000
LEVEL = 0.95


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
