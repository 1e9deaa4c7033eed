"""DELLA: drop entries at random, the smaller ones more often, then elect signs as TIES does."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from coram_hf.config import Range, Varies
from coram_hf.errors import CoramError
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.mergekit import della_parameters
from coram_hf.methods.pruning import draw, norm_growth
from coram_hf.methods.sparse import Density, Normalize, Rescale, Scale, Seed, merge_pruned
from coram_hf.methods.updates import Updates

Epsilon = Annotated[
    float, Varies(by_expert=True), Range("[0, 1)"), "Largest distance of a probability from `density`."
]


def della(
    updates: Updates,
    *,
    density: Density = 0.5,
    epsilon: Epsilon = 0.15,
    scale: Scale = 1.0,
    normalize: Normalize = True,
    rescale: Rescale = True,
    seed: Seed = 0,
) -> Tensor:
    """W = W_0 + scale * TIES election of m_i tau_i, with masks that keep large entries of a row more often

    The smallest entry of a row is kept with probability density - epsilon, the largest with density +
    epsilon. At density 1 everything is kept. The draw is that of DARE for the same seed.
    """
    return merge_della(updates, density, epsilon, rescale, seed, True, normalize, scale)


def merge_della(
    updates: Updates,
    density: float,
    epsilon: float,
    rescale: bool,
    seed: int,
    consensus: bool,
    normalize: bool,
    scale: float,
) -> Tensor:
    """DELLA with or without the election of signs."""
    densities, epsilons = updates.each(density), updates.each(epsilon)

    def prune(i: int, tau: Tensor) -> Tensor:
        if densities[i] in (0, 1):
            return tau.mul_(densities[i])
        chance = keep_probability(tau, densities[i], epsilons[i])
        kept = torch.where(draw(updates, i, seed) >= 1 - chance, tau, 0.0)
        return kept.mul_(norm_growth(tau, kept)) if rescale else kept

    return merge_pruned(updates, prune, consensus=consensus, normalize=normalize, scale=scale)


def keep_probability(tau: Tensor, density: float, epsilon: float) -> Tensor:
    """The probability of every entry, from density - epsilon to density + epsilon by its rank in its row."""
    if not 0 < density - epsilon <= density + epsilon < 1:
        raise CoramError(
            f"della: density {density:g} and epsilon {epsilon:g} give probabilities outside (0, 1); "
            "choose them so that density - epsilon > 0 and density + epsilon < 1"
        )
    ranks = tau.abs().argsort(-1).argsort(-1).to(tau.dtype)
    longest = max(1, tau.shape[-1] - 1)
    return ranks.mul_(2 * epsilon / longest).add_(density - epsilon)


DELLA = Baseline(della, from_mergekit=della_parameters, usual=False)
