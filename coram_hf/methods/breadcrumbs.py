"""Model breadcrumbs: leave out the largest and the smallest entries of every update."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from coram_hf.config import Range, Varies
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.mergekit import breadcrumbs_parameters
from coram_hf.methods.pruning import norm_growth
from coram_hf.methods.sparse import Density, Normalize, Rescale, Scale, merge_pruned
from coram_hf.methods.updates import Updates


def breadcrumbs(
    updates: Updates,
    *,
    density: Density = 0.9,
    gamma: Annotated[
        float, Varies(by_expert=True), Range("[0, 1]"), "Share of the largest entries, which are left out."
    ] = 0.01,
    scale: Scale = 1.0,
    normalize: Normalize = False,
    rescale: Rescale = False,
    consensus: Annotated[bool, "Whether signs are elected as TIES does (breadcrumbs_ties)."] = False,
) -> Tensor:
    """W = W_0 + scale * sum weight_i crumbs(tau_i), without the largest `gamma` and the smallest entries

    `density` is the share that remains; if it leaves no room for `gamma`, fewer of the largest are left out.
    At density 1 everything is kept.
    """
    densities, gammas = updates.each(density), updates.each(gamma)

    def prune(i: int, tau: Tensor) -> Tensor:
        if densities[i] == 1:
            return tau
        order = tau.abs().flatten().argsort()
        count = int(densities[i] * len(order))
        smallest = max(0, len(order) - count - int(gammas[i] * len(order)))
        mask = torch.zeros_like(order, dtype=torch.bool)
        mask[order[smallest : smallest + count]] = True
        kept = torch.where(mask.view(tau.shape), tau, 0.0)
        return kept.mul_(norm_growth(tau, kept)) if rescale else kept

    return merge_pruned(updates, prune, consensus=consensus, normalize=normalize, scale=scale)


BREADCRUMBS = Baseline(breadcrumbs, from_mergekit=breadcrumbs_parameters, usual=False)
