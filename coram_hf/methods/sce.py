"""SCE: select the entries in which experts differ most, weigh experts by energy, erase minority signs."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from coram_hf.config import Range, Varies
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.linear import sum_weighted
from coram_hf.methods.mergekit import sce_parameters
from coram_hf.methods.updates import Updates

SMALLEST = 1e-6
"""Sum of energies below which all experts weigh the same, and sum of weights that entries are divided by."""


def sce(
    updates: Updates,
    *,
    select_topk: Annotated[
        float, Varies(), Range("[0, 1]"), "Share of the entries that are merged, by their variance."
    ] = 1.0,
) -> Tensor:
    """W = W_0 + sum e_i tau_i / sum e_i over the tau_i with the sign of their sum, e_i = mean tau_i^2

    Only the `select_topk` of the entries in which the experts differ at all, by their variance over the
    experts, take part.
    """
    taus = [updates.tau(i) for i in range(len(updates))]
    if select_topk < 1:
        mask = _most_different(taus, select_topk)
        taus = [torch.where(mask, tau, 0.0) for tau in taus]
    energies = [float(tau.square().mean(dtype=torch.float64)) for tau in taus]
    total = math.fsum(energies)
    even = total < SMALLEST
    shares = [1 / len(taus) if even else energy / total for energy in energies]
    weights = [len(taus) * w * share for w, share in zip(updates.weights, shares, strict=True)]
    elected = torch.where(sum_weighted(taus, (1.0,) * len(taus)) >= 0, 1.0, -1.0).to(taus[0].dtype)
    merged, below = torch.zeros_like(taus[0]), torch.zeros_like(taus[0])
    for tau, weight in zip(taus, weights, strict=True):
        agrees = (tau * elected > 0).to(tau.dtype)
        merged.addcmul_(tau, agrees, value=weight)
        below.add_(agrees, alpha=weight)
    return updates.shaped(merged.div_(below.clamp(min=SMALLEST)))


def _most_different(taus: list[Tensor], share: float) -> Tensor:
    """Mask of the entries with the largest variance over the experts, of those where it is not zero."""
    variance = torch.stack(taus).var(0, unbiased=False)
    count = int(int(variance.count_nonzero()) * share)
    mask = torch.zeros_like(variance, dtype=torch.bool)
    mask.view(-1)[variance.view(-1).topk(count).indices] = True
    return mask


SCE = Baseline(sce, from_mergekit=sce_parameters, usual=False)
