"""Linear averaging (model soups)."""

from __future__ import annotations

import math
from typing import Annotated

from torch import Tensor

from coram_hf.errors import CoramError
from coram_hf.geometry.slices import as_rows
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.mergekit import linear_parameters
from coram_hf.methods.updates import Updates


def linear(
    updates: Updates,
    *,
    normalize: Annotated[bool, "Whether weights are divided by their sum."] = True,
) -> Tensor:
    """W = sum w_i W_i, with w_i summing to 1 unless normalize=False

    Without normalisation the weights are used as given, so W_0 too is scaled by sum w_i.
    """
    if normalize and not any(weight < 0 for weight in updates.given or ()):
        return weighted_mean(updates)
    total = math.fsum(updates.given or updates.weights)
    if normalize and abs(total) < SMALLEST_SUM:
        raise CoramError(
            f"linear: the weights {list(updates.given or ())} sum to 0, so they cannot be normalised; pass "
            "normalize=False, or other weights"
        )
    scale = 1 / total if normalize else 1.0
    weights = tuple(weight * scale for weight in (updates.amounts if updates.given else updates.weights))
    excess = 0.0 if normalize else total - 1
    out = updates.empty()
    for rows, taus in updates.blocks():
        mean = sum_weighted(taus, weights)
        if excess:
            mean.add_(as_rows(updates.base)[rows].to(mean.dtype), alpha=excess)
        out[rows] = mean
    return updates.shaped(out)


SMALLEST_SUM = 1e-8


def weighted_mean(updates: Updates, weights: tuple[float, ...] | None = None) -> Tensor:
    """sum w_i tau_i, with the weights of the updates unless others are given."""
    return updates.shaped(updates.sum(updates.weights if weights is None else weights))


def sum_weighted(taus: list[Tensor], weights: tuple[float, ...]) -> Tensor:
    """sum w_i tau_i."""
    total = taus[0] * weights[0]
    for tau, weight in zip(taus[1:], weights[1:], strict=True):
        total.add_(tau, alpha=weight)
    return total


LINEAR = Baseline(
    linear, by_rows=True, presets={"Linear": {}}, from_mergekit=linear_parameters, mergekit_base="member"
)
