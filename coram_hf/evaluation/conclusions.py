"""The facts that sweeps and comparisons end with: the base, the best rival, the rule, and the optimum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coram_hf.evaluation.scores import Line, Results, percent
from coram_hf.evaluation.suite import Suite


def conclusions(
    suite: Suite, lines: Sequence[Line], references: Mapping[str, Results], cost: Mapping[str, Any]
) -> dict[str, Any]:
    """Names and values for one table; averages are in percent, and None where there is nothing to say.

    The first line is named by itself if another one is better at the rule's lambda.
    """
    averages = {name: suite.score(found) for name, found in references.items()}
    base = averages.pop("base")
    rival = max(averages, key=averages.__getitem__, default=None)
    first, ruled = lines[0], max(lines, key=lambda line: line.rule.average)
    best = max(lines, key=lambda line: line.best.average)
    swept = any(len(line.points) > 1 for line in lines)
    edge = ", ".join(line.name for line in lines if line.at_edge)
    half = ruled.rule.uncertainty
    return {
        "lines": len(lines),
        "points scored": sum(len(line.points) for line in lines),
        "base": percent(base),
        "best baseline": None if rival is None else f"{percent(averages[rival])} ({rival})",
        "first line at the rule's lambda": None if ruled is first else _point(first, first.rule.lam),
        "best at the rule's lambda": _point(ruled, ruled.rule.lam),
        "best at any lambda": _point(best, best.best.lam) if swept else None,
        "95% interval of an average": None if half is None else f"about +- {percent(half)} points",
        "optimum at an end of the range": f"{edge}: widen it" if edge else None,
        **_spent(cost),
    }


def _point(line: Line, lam: float) -> str:
    """The average at one lambda, which the line was scored at, and where it is."""
    point = next(point for point in line.points if point.lam == lam)
    return f"{percent(point.average)} ({line.name}, lambda {lam:.2f})"


def _spent(cost: Mapping[str, Any]) -> dict[str, str]:
    """What the rule's lambda saves, and the seconds of all merges and points, of which some may be older."""
    if not cost:
        return {}
    lines = cost["lines"]
    saved = sum(line["evaluations_saved"] for line in lines), sum(line["seconds_saved"] for line in lines)
    points = sum(point["seconds"] for line in lines for point in line["points"])
    whole = sum(line["merging"] for line in lines) + points + cost["references"]
    return {
        "the rule alone saves": f"{saved[0]} evaluations, {saved[1]:.1f} s",
        "merging and scoring took": f"{whole:.1f} s",
    }
