"""DARE-TIES: drop entries at random, rescale the rest, then elect signs as TIES does."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from coram_hf.config import Range, Varies
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.cuts import above, magnitude_cut
from coram_hf.methods.mergekit import dare_ties_parameters
from coram_hf.methods.pruning import draw, generator, norm_growth
from coram_hf.methods.ties import Combine, Sign, elect, voices
from coram_hf.methods.updates import Updates

Drop = Annotated[
    float, Varies(by_expert=True), Range("[0, 1]"), "Share of the entries that are dropped at random."
]
RescaleBy = Annotated[
    Literal["share", "norm"],
    "Rescale survivors by 1 / (1 - drop), or to the L1 norm of the whole update, as mergekit does.",
]


def dare_ties(
    updates: Updates,
    *,
    drop: Drop = 0.9,
    density: Annotated[float, Range("(0, 1]"), "Share of the survivors that is kept, by magnitude."] = 1.0,
    scale: Annotated[float, Varies(), "Coefficient of the merged update."] = 1.0,
    rescale: Annotated[bool, "Whether survivors are rescaled."] = True,
    rescale_by: RescaleBy = "share",
    combine: Annotated[Combine, "How entries that agree are combined."] = "mean",
    sign: Annotated[Sign, "Whether the sum or the number of entries elects the sign."] = "sum",
    normalize: Annotated[bool, "Whether weights in a sum count as N w_i, or as they are given."] = True,
    seed: Annotated[int, "Seed of the random draw."] = 0,
) -> Tensor:
    """W = W_0 + scale * TIES election of m_i tau_i / (1 - drop), with m_i a random 0/1 mask of mean 1 - drop

    `density` < 1 also keeps only that share of the survivors, by magnitude. The draw depends on the seed,
    the tensor's name and the expert's position, not on the order in which tensors are merged.
    """
    drops = updates.each(drop)
    cuts = [0.0] * len(updates)
    if density < 1:
        cuts = [
            magnitude_cut(updates.tau(i)[draw(updates, i, seed) >= share], density)
            for i, share in enumerate(drops)
        ]
    growth = [1.0] * len(updates)
    if rescale and rescale_by == "share":
        growth = [1 / (1 - share) if share < 1 else 1.0 for share in drops]
    elif rescale:
        growth = [
            norm_growth(tau := updates.tau(i), tau * (draw(updates, i, seed) >= share))
            for i, share in enumerate(drops)
        ]
    common = growth[0] if len(set(growth)) == 1 else None
    weights, how = voices(updates, combine, normalize)
    out, draws = updates.empty(), [generator(updates, i, seed) for i in range(len(updates))]
    for rows, taus in updates.blocks():
        survivors = [
            above(tau, cut).mul_(torch.rand(tau.shape, generator=g).ge_(share).to(tau))
            for tau, g, share, cut in zip(taus, draws, drops, cuts, strict=True)
        ]
        if common is None:
            survivors = [tau.mul_(factor) for tau, factor in zip(survivors, growth, strict=True)]
        out[rows] = elect(survivors, weights, how, sign)
    return updates.shaped(out.mul_(scale if common is None else scale * common))


DARE_TIES = Baseline(
    dare_ties,
    presets={"DARE-TIES": {}},
    mergebench={"MergeBench DARE-TIES": {"drop": 0.9, "scale": 0.4, "combine": "sum"}},
    from_mergekit=dare_ties_parameters,
)
