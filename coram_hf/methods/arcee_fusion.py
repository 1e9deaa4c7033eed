"""Arcee fusion: adopt only the most important changes of one expert."""

from __future__ import annotations

import torch
from torch import Tensor

from coram_hf.geometry.slices import as_rows
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.mergekit import arcee_fusion_parameters
from coram_hf.methods.updates import Updates

FLOOR = 1e-8
"""Added to probabilities, so that none is zero."""


def arcee_fusion(updates: Updates) -> Tensor:
    """W = W_0 + tau where |tau| KL(softmax(W_1 row) | softmax(W_0 row)) >= median + 1.5 (q_3 - q_1), else W_0

    The quartiles are those of the products over the whole tensor.
    """
    tau, base, expert = updates.tau(0), as_rows(updates.base).to(updates.dtype), updates.expert(0)
    p, q = (torch.softmax(weights, -1).add_(FLOOR) for weights in (expert, base))
    importance = tau.abs().mul_((p * torch.log(p / q)).sum(-1, keepdim=True))
    ordered = importance.flatten().sort().values
    low, middle, high = (ordered[int(share * (len(ordered) - 1))] for share in (0.25, 0.5, 0.75))
    return updates.shaped(torch.where(importance >= middle + 1.5 * (high - low), tau, 0.0))


ARCEE_FUSION = Baseline(arcee_fusion, from_mergekit=arcee_fusion_parameters, most=1, usual=False)
