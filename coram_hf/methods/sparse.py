"""Merging updates of which only a part is kept, shared by DARE, DELLA and breadcrumbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from torch import Tensor

from coram_hf.config import Range, Varies
from coram_hf.methods.linear import sum_weighted
from coram_hf.methods.ties import elect
from coram_hf.methods.updates import Updates

Density = Annotated[float, Varies(by_expert=True), Range("[0, 1]"), "Share of the entries that are kept."]
Scale = Annotated[float, Varies(), "Coefficient of the merged update."]
Normalize = Annotated[bool, "Whether the weighted sum is divided by the sum of its weights."]
Rescale = Annotated[bool, "Whether what is kept gets the L1 norm of the whole update."]
Seed = Annotated[int, "Seed of the random draw."]


def merge_pruned(
    updates: Updates,
    prune: Callable[[int, Tensor], Tensor],
    *,
    consensus: bool,
    normalize: bool,
    scale: float,
) -> Tensor:
    """scale * sum_i |weight_i| prune(tau_i), of all entries or (`consensus`) of those with the elected sign.

    `prune` gets the expert's position and its tau_i. `normalize` divides by the sum of the
    weights, or with `consensus` of those that agree.
    """
    kept = [prune(i, updates.tau(i)) for i in range(len(updates))]
    if consensus:
        merged = elect(kept, updates.amounts, "mean" if normalize else "total", "sum")
    else:
        merged = sum_weighted(kept, updates.weights if normalize else updates.amounts)
    return updates.shaped(merged.mul_(scale))
