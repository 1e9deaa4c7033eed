"""WUDI in closed form (SWUDI-A): least interference on the inputs that the experts use most."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from coram_hf.geometry.decorrelate import leading_inputs
from coram_hf.geometry.linalg import gram_of_columns, product
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.linear import weighted_mean
from coram_hf.methods.updates import Updates


def wudi(updates: Updates, *, scale: Annotated[float, "Coefficient of the merged update."] = 1.0) -> Tensor:
    """W = W_0 + scale * (sum tau_i (I - E E^T) + D E L^-1 E^T), E and L the leading eigenpairs of C

    C = sum tau_i^T tau_i / |tau_i|^2 and D = sum tau_i tau_i^T tau_i / |tau_i|^2, so D C^-1 minimises
    sum |(delta - tau_i) tau_i^T|^2 / |tau_i|^2. The number of eigenpairs is the effective rank
    (sum sqrt l)^2 / sum l, rounded up. Weights count as N w_i. Tensors that are not matrices get the weighted
    mean.
    """
    if updates.base.ndim != 2:
        return weighted_mean(updates).mul_(scale)
    count, (m, n) = len(updates), updates.base.shape
    total, D = (torch.zeros(m, n, dtype=torch.float64, device=updates.base.device) for _ in range(2))
    C = total.new_zeros(n, n)
    for i, weight in enumerate(updates.weights):
        tau = updates.tau(i).double()
        square = float(torch.linalg.vector_norm(tau)) ** 2
        if square > 0:
            gram = gram_of_columns(tau).mul_(count * weight / square)
            C += gram
            D += product(tau, gram)
            total.add_(tau, alpha=count * weight)
    if not C.any():
        return updates.shaped(updates.empty().zero_())
    L, E = leading_inputs(C)
    change = product(product(D, E) / L - product(total, E), E.mT)
    return (scale * (total + change)).to(updates.dtype)


WUDI = Baseline(wudi)
