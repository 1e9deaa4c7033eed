"""Model stock: the mean of the experts, drawn towards the base by how little their updates agree."""

from __future__ import annotations

from itertools import combinations
from typing import Annotated

import torch
from torch import Tensor

from coram_hf.methods.baseline import Baseline
from coram_hf.methods.linear import sum_weighted
from coram_hf.methods.mergekit import model_stock_parameters
from coram_hf.methods.updates import Updates

SMALLEST = 1e-6
"""Product of norms, and denominator, below which no angle is defined and the base is kept, as in mergekit."""


def model_stock(
    updates: Updates,
    *,
    filter_wise: Annotated[bool, "Whether to use an angle per row, not one for the whole tensor."] = False,
) -> Tensor:
    """W = W_0 + t * sum w_i tau_i, t = N c / (1 + (N - 1) c), with c the mean cosine of pairs of updates"""
    n = len(updates)
    taus = [updates.tau(i) for i in range(n)]
    rows = [tau.double() if filter_wise else tau.double().reshape(-1) for tau in taus]
    lengths = [row.norm(dim=-1) for row in rows]
    cosines = [
        ((rows[i] * rows[j]).sum(-1) / (lengths[i] * lengths[j]).clamp(min=SMALLEST)).clamp(-1, 1)
        for i, j in combinations(range(n), 2)
    ]
    c = torch.stack(cosines).mean(0)
    below = 1 + (n - 1) * c
    t = torch.where(below.abs() < SMALLEST, 0.0, n * c / torch.where(below.abs() < SMALLEST, 1.0, below))
    share = t.unsqueeze(-1) if filter_wise and taus[0].ndim > 1 else t
    return updates.shaped(sum_weighted(taus, updates.weights) * share.to(updates.dtype))


MODEL_STOCK = Baseline(model_stock, from_mergekit=model_stock_parameters, fewest=2, usual=False)
