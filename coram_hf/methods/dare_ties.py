"""DARE-TIES: drop entries at random, rescale the rest, then elect signs as TIES does."""

from __future__ import annotations

import hashlib
from typing import Annotated

import torch
from torch import Tensor

from coram_hf.config import Range
from coram_hf.geometry.slices import as_rows
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.mergekit import dare_ties_parameters
from coram_hf.methods.ties import Combine, Sign, elect, magnitude_cut
from coram_hf.methods.updates import Updates


def dare_ties(
    updates: Updates,
    *,
    drop: Annotated[float, Range("[0, 1)"), "Share of the entries that are dropped at random."] = 0.9,
    density: Annotated[float, Range("(0, 1]"), "Share of the survivors that is kept, by magnitude."] = 1.0,
    scale: Annotated[float, "Coefficient of the merged update."] = 1.0,
    rescale: Annotated[bool, "Whether survivors are divided by 1 - drop."] = True,
    combine: Annotated[Combine, "How entries that agree are combined."] = "mean",
    sign: Annotated[Sign, "Whether the sum or the number of entries elects the sign."] = "sum",
    seed: Annotated[int, "Seed of the random draw."] = 0,
) -> Tensor:
    """W = W_0 + scale * TIES election of m_i tau_i / (1 - drop), with m_i a random 0/1 mask of mean 1 - drop

    `density` < 1 also keeps only that share of the survivors, by magnitude. The draw depends on the seed,
    the tensor's name and the expert's position, not on the order in which tensors are merged.
    """
    keep = [survival_mask(updates, i, drop, seed) for i in range(len(updates))]
    growth = 1 / (1 - drop) if rescale else 1.0
    cuts = [0.0] * len(updates)
    if density < 1:
        cuts = [magnitude_cut(updates.tau(i)[mask], density) for i, mask in enumerate(keep)]
    out = updates.empty()
    for rows, taus in updates.blocks():
        survivors = [
            torch.where(mask[rows] & (tau.abs() >= cut), tau, 0.0)
            for tau, mask, cut in zip(taus, keep, cuts, strict=True)
        ]
        out[rows] = elect(survivors, updates.weights, combine, sign)
    return updates.shaped(out.mul_(scale * growth))


def survival_mask(updates: Updates, i: int, drop: float, seed: int) -> Tensor:
    """Mask of the surviving entries of tau_i: a uniform draw >= drop, seeded by sha256 of "seed/name/i"."""
    digest = hashlib.sha256(f"{seed}/{updates.name}/{i}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    draw = as_rows(torch.rand(updates.base.shape, generator=generator))
    return (draw >= drop).to(updates.base.device)


DARE_TIES = Baseline(
    dare_ties,
    presets={"DARE-TIES": {}},
    mergebench={"MergeBench DARE-TIES": {"drop": 0.9, "scale": 0.4, "combine": "sum"}},
    from_mergekit=dare_ties_parameters,
)
