"""Linear DELLA: drop entries at random, the smaller ones more often, and add up the rest."""

from __future__ import annotations

from torch import Tensor

from coram_hf.methods.baseline import Baseline
from coram_hf.methods.della import Epsilon, merge_della
from coram_hf.methods.mergekit import della_linear_parameters
from coram_hf.methods.sparse import Density, Normalize, Rescale, Scale, Seed
from coram_hf.methods.updates import Updates


def della_linear(
    updates: Updates,
    *,
    density: Density = 0.5,
    epsilon: Epsilon = 0.15,
    scale: Scale = 1.0,
    normalize: Normalize = False,
    rescale: Rescale = True,
    seed: Seed = 0,
) -> Tensor:
    """W = W_0 + scale * sum weight_i m_i tau_i, with masks that keep large entries of a row more often"""
    return merge_della(updates, density, epsilon, rescale, seed, False, normalize, scale)


DELLA_LINEAR = Baseline(della_linear, from_mergekit=della_linear_parameters, usual=False)
