"""Linear averaging (model soups)."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from coram_hf.geometry.slices import as_rows
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.mergekit import linear_parameters
from coram_hf.methods.updates import Updates


def linear(
    updates: Updates,
    *,
    normalize: Annotated[bool, "Whether weights are normalised to sum 1."] = True,
) -> Tensor:
    """W = sum w_i W_i, with w_i summing to 1 unless normalize=False

    Without normalisation the weights are used as given, so W_0 too is scaled by sum w_i.
    """
    weights = updates.weights if normalize or updates.given is None else updates.given
    excess = 0.0 if normalize else sum(weights) - 1
    out = updates.empty()
    for rows, taus in updates.blocks():
        total = sum_weighted(taus, weights)
        if excess:
            total.add_(as_rows(updates.base)[rows].to(total.dtype), alpha=excess)
        out[rows] = total
    return updates.shaped(out)


def sum_weighted(taus: list[Tensor], weights: tuple[float, ...]) -> Tensor:
    """sum w_i tau_i."""
    total = taus[0] * weights[0]
    for tau, weight in zip(taus[1:], weights[1:], strict=True):
        total.add_(tau, alpha=weight)
    return total


LINEAR = Baseline(
    linear, by_rows=True, presets={"Linear": {}}, from_mergekit=linear_parameters, baseless=True
)
