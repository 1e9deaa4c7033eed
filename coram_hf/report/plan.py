"""MergePlan: what a merge will do, known before any merging."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MergePlan:
    """The parameters by their fate, and what the experts' update norms decide.

    `kappa` and `lam` are None where they cannot be known yet: the rule has no answer when an expert
    equals the base (`dispersion` is infinite), and `scale="c_rms"` is measured during the merge.
    """

    line: str
    targets: tuple[str, ...]
    residual: tuple[str, ...]
    kept: tuple[str, ...]
    relative_updates: dict[str, float]
    balance_factors: dict[str, float]
    dispersion: float
    unbalanced_dispersion: float
    kappa: float | None
    lam: float | None
    outside_share: dict[str, float]
    warnings: tuple[str, ...]
