"""Linear DARE: drop entries at random, rescale the rest, and add them up."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from coram_hf.methods.baseline import Baseline
from coram_hf.methods.dare_ties import Drop, RescaleBy
from coram_hf.methods.mergekit import dare_parameters
from coram_hf.methods.pruning import draw, norm_growth
from coram_hf.methods.sparse import Normalize, Scale, Seed, merge_pruned
from coram_hf.methods.updates import Updates


def dare_linear(
    updates: Updates,
    *,
    drop: Drop = 0.9,
    scale: Scale = 1.0,
    normalize: Normalize = False,
    rescale: Annotated[bool, "Whether survivors are rescaled."] = True,
    rescale_by: RescaleBy = "share",
    seed: Seed = 0,
) -> Tensor:
    """W = W_0 + scale * sum weight_i m_i tau_i / (1 - drop), with m_i a random 0/1 mask of mean 1 - drop

    The draw is that of DARE-TIES for the same seed.
    """
    drops = updates.each(drop)

    def prune(i: int, tau: Tensor) -> Tensor:
        kept = torch.where(draw(updates, i, seed) >= drops[i], tau, 0.0)
        if not rescale or drops[i] in (0, 1):
            return kept
        return kept.mul_(1 / (1 - drops[i]) if rescale_by == "share" else norm_growth(tau, kept))

    return merge_pruned(updates, prune, consensus=False, normalize=normalize, scale=scale)


DARE_LINEAR = Baseline(dare_linear, from_mergekit=dare_parameters, usual=False)
