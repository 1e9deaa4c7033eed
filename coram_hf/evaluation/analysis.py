"""The paper's analyses across suites, on any sweeps: held-out kappa, thresholds, components."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import NamedTuple

from coram_hf.config import CoramConfig
from coram_hf.evaluation.across import SweptLine, SweptSuite

CELLS = tuple(f"{method}{more}" for method in ("CORAM", "CORAM-C") for more in ("", "+RP", "+SS", "+SS+RP"))
"""The eight cells of the paper's component table."""
LOW, HIGH = 1.15, 0.5
"""kappa below and above the threshold."""
ROUNDING = 1e-9
"""What a difference of printed scores may be off in binary."""
CLOSE = 0.05
"""How far, relative to lambda, the nearest evaluated lambda may be for its score to stand for it."""


class Best(NamedTuple):
    """The best score of some lines, and the line that has it."""

    score: float
    line: str


@dataclass(frozen=True)
class HeldOut:
    """A suite's kappa from the other low-dispersion suites, and the score of a line at the nearest lambda."""

    suite: str
    kappa: float
    predicted: float
    line: str
    lam: float
    score: float
    best: float

    @property
    def gap(self) -> float:
        return self.best - self.score


def components(lines: Iterable[SweptLine]) -> dict[str, Best]:
    """The best score at the rule's lambda in every cell of the component table that has a line."""
    found: dict[str, Best] = {}
    for line in lines:
        cell = line.cell
        if cell is not None:
            found[cell] = max(found.get(cell, Best(line.rule, line.line)), Best(line.rule, line.line))
    return found


def held_out(suites: Sequence[SweptSuite], threshold: float, preferred: Sequence[str]) -> list[HeldOut]:
    """Leave one suite out: kappa is the mean of the others' representative kappa_opt, D below the threshold.

    The score is that of the first of the `preferred` lines which the suite has, else of its best line.
    """
    low = [suite for suite in suites if suite.dispersion < threshold]
    found = []
    for suite in low:
        others = [other.kappa for other in low if other is not suite]
        if not others or not suite.lines:
            continue
        kappa = mean(others)
        known = [line for name in preferred if (line := suite.line(name)) is not None]
        line = known[0] if known else max(suite.lines, key=lambda one: one.best)
        lam = line.nearest(kappa * line.scale)
        found.append(
            HeldOut(suite.name, kappa, kappa * line.scale, line.line, lam, line.points[lam], line.best)
        )
    return found


def gap_at(suite: SweptSuite, kappa: float) -> float | None:
    """The best of all swept scores minus the best score at kappa; None if no line has one close to it."""
    scores = []
    for line in suite.lines:
        wanted = kappa * line.scale
        lam = line.nearest(wanted)
        if abs(lam - wanted) <= CLOSE * wanted:
            scores.append(line.points[lam])
    return max(line.best for line in suite.lines) - max(scores) if scores else None


def by_threshold(
    suites: Sequence[SweptSuite], thresholds: Sequence[float]
) -> dict[float, dict[str, tuple[float, float | None]]]:
    """For every threshold D_0 and suite, the assigned kappa and the gap that it leaves."""
    found: dict[float, dict[str, tuple[float, float | None]]] = {}
    for threshold in thresholds:
        found[threshold] = {}
        for suite in suites:
            if suite.lines:
                kappa = LOW if suite.dispersion < threshold else HIGH
                found[threshold][suite.name] = kappa, gap_at(suite, kappa)
    return found


class Gaps(NamedTuple):
    """How far the rule is below the best lambda: mean over lines, the largest, and lines above a bound."""

    lines: int
    mean: float
    largest: float
    line: str
    above: int


def gaps(lines: Sequence[SweptLine], bound: float) -> Gaps:
    """The gaps of lines between their best swept score and that at the rule's lambda."""
    found = {line.line: line.best - line.rule for line in lines}
    worst = max(found, key=found.__getitem__)
    above = sum(gap > bound + ROUNDING for gap in found.values())
    return Gaps(len(found), mean(found.values()), found[worst], worst, above)


class Distribution(NamedTuple):
    """How many lines have their optimum at each lambda, and the median."""

    counts: dict[float, int]
    median: float


def distribution(lines: Sequence[SweptLine]) -> Distribution:
    """The distribution of the best lambdas."""
    return distribution_of([line.best_lam for line in lines])


def distribution_of(best: Sequence[float]) -> Distribution:
    """The distribution of some lambdas."""
    return Distribution(dict(sorted(Counter(best).items())), median(best))


def without_spread_only(suite: SweptSuite) -> list[SweptLine]:
    """The lines without those that only spread slicing was added to: the paper's retained lines of T4."""
    return [line for line in suite.lines if line.cell not in ("CORAM+SS", "CORAM-C+SS")]


class Everywhere(NamedTuple):
    """A line on all suites at the rule's lambda: scores, and how far they are below each suite's best."""

    line: str
    scores: dict[str, float]
    behind: dict[str, float]


def one_configuration(suites: Sequence[SweptSuite]) -> list[Everywhere]:
    """The lines that all suites have, the least behind on average first.

    On a suite without any residual line, whose experts change the targets alone, the residual is left out.
    """
    suites = [suite for suite in suites if suite.lines]
    top = {suite.name: max(line.rule for line in suite.lines) for suite in suites}
    bare = {
        suite.name: all(_without_residual(one.line) == one.line for one in suite.lines) for suite in suites
    }
    found = []
    for name in sorted({line.line for suite in suites for line in suite.lines}):
        lines = {s.name: s.line(_without_residual(name) if bare[s.name] else name) for s in suites}
        scores = {suite: line.rule for suite, line in lines.items() if line is not None}
        if len(scores) == len(suites):
            found.append(Everywhere(name, scores, {suite: top[suite] - scores[suite] for suite in scores}))
    return sorted(found, key=lambda one: mean(one.behind.values()))


def _without_residual(line: str) -> str:
    return replace(CoramConfig.from_line(line), residual=None).line
