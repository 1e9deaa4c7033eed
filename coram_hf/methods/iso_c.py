"""Iso-C: the sum of the updates with all its singular values made equal."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from coram_hf.methods.baseline import Baseline
from coram_hf.methods.linear import weighted_mean
from coram_hf.methods.updates import Updates


def iso_c(
    updates: Updates,
    *,
    scale: Annotated[
        float, "Coefficient of the merged update; the authors tune it on validation data."
    ] = 1.0,
) -> Tensor:
    """W = W_0 + scale * mean(S) U V^T, with sum tau_i = U S V^T

    Directions whose singular value is zero are arbitrary and left out. Weights count as N w_i. Tensors that
    are not matrices get the weighted mean.
    """
    if updates.base.ndim != 2:
        return weighted_mean(updates).mul_(scale)
    total = weighted_mean(updates).double().mul_(len(updates))
    U, S, Vh = torch.linalg.svd(total, full_matrices=False)
    kept = S > max(total.shape) * torch.finfo(S.dtype).eps * S[0]
    return ((scale * S.mean()) * (U[:, kept] @ Vh[kept])).to(updates.dtype)


ISO_C = Baseline(iso_c)
