"""The search for lambda: golden section on its logarithm, between bounds around a first guess."""

from __future__ import annotations

import math
from collections.abc import Callable

GOLDEN = (math.sqrt(5) - 1) / 2
EVALUATIONS = 10
DIGITS = 5
"""Significant digits of the lambdas that are tried, so that the chosen one is short to write."""

Curve = dict[float, float]
"""The loss at every lambda that was tried, in the order of lambda."""


def search_lambda(
    loss: Callable[[float], float], start: float, reach: float, evaluations: int = EVALUATIONS
) -> Curve:
    """The loss at `start` and at the points of a golden section of [start / reach, start * reach].

    If it has one minimum there, every evaluation after the third shrinks the interval of lambda that holds it
    by 0.618 of its logarithm. A loss that is not a number counts as infinite.
    """
    curve: Curve = {start: _number(loss(start))}

    def at(x: float) -> float:
        lam = rounded(math.exp(x))
        if lam not in curve:
            curve[lam] = _number(loss(lam))
        return curve[lam]

    low, high = math.log(start / reach), math.log(start * reach)
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = at(left), at(right)
    for _ in range(evaluations - 3):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = at(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = at(right)
    return dict(sorted(curve.items()))


def best(curve: Curve) -> float:
    """The lambda of the lowest loss; the smallest of several."""
    return min(curve, key=lambda lam: (curve[lam], lam))


def is_at_bound(curve: Curve, start: float, reach: float) -> bool:
    """Whether the lowest loss lies next to a bound of the search, so that the minimum is probably beyond."""
    return abs(math.log(best(curve) / start)) > 0.9 * math.log(reach)


def rounded(value: float, digits: int = DIGITS) -> float:
    """A number to so many significant digits."""
    return float(f"{value:.{digits}g}")


def _number(value: float) -> float:
    return math.inf if math.isnan(value) else value
