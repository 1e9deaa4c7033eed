"""TSV-M: merge the leading singular vectors of all updates after decorrelating them."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from coram_hf.config import Range
from coram_hf.geometry.linalg import gram, inverse_root, leading_right_vectors, product
from coram_hf.geometry.slices import row_blocks
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.linear import weighted_mean
from coram_hf.methods.updates import Updates


def tsvm(
    updates: Updates,
    *,
    scale: Annotated[float, "Coefficient of the merged update."] = 1.0,
    rank: Annotated[
        int | None, Range("[1, inf)"), "Singular vectors per expert; by default min(m, n) / N."
    ] = None,
    cap_rank: Annotated[bool, "Leave out directions that rounding explains; for low-rank experts."] = False,
) -> Tensor:
    """W = W_0 + scale * polar([U_1 .. U_N]) diag(S_1 .. S_N) polar([V_1 .. V_N])^T, rank-k SVDs of tau_i

    k is int(min(m, n) / N) by default, at least 1. Directions whose singular value is zero are arbitrary
    and always left out; `cap_rank` also leaves out those within the rounding error of the weights' dtype, as
    low-rank experts require. Tensors that are not matrices get the weighted mean.
    """
    if updates.base.ndim != 2:
        return weighted_mean(updates).mul_(scale)
    if updates.base.shape[0] < updates.base.shape[1]:
        return tsvm(updates.transposed(), scale=scale, rank=rank, cap_rank=cap_rank).mT
    n = len(updates)
    k = rank or max(1, updates.base.shape[1] // n)
    floor = _rounding_floor(updates) if cap_rank else 0.0
    right, spectrum = [], []
    for i in range(n):
        V, S = leading_right_vectors(updates.tau(i), k)
        kept = int((S > max(floor, len(updates.base) * torch.finfo(torch.float64).eps * float(S[0]))).sum())
        right.append(V[:, :kept])
        spectrum.append(S[:kept])
    return _decorrelated(updates, right, spectrum, scale)


def _decorrelated(updates: Updates, right: list[Tensor], spectrum: list[Tensor], scale: float) -> Tensor:
    """polar(U) diag(S) polar(V)^T with U_i = tau_i V_i / S_i, in float64, a block of rows at a time."""
    out = updates.empty().zero_()
    V = torch.cat(right, dim=1)
    S = torch.cat([len(updates) * w * values for w, values in zip(updates.weights, spectrum, strict=True)])
    if S.numel() == 0:
        return out
    projections = [vectors / values for vectors, values in zip(right, spectrum, strict=True)]

    def left_vectors(rows: slice = slice(None)) -> Tensor:
        parts = [product(updates.tau(i, rows).double(), P) for i, P in enumerate(projections)]
        return torch.cat(parts, dim=1)

    of_left = gram(left_vectors(rows) for rows in row_blocks(out))
    polar_V = product(V, inverse_root(gram([V]), lambda: V))
    from_left = product(inverse_root(of_left, left_vectors) * (scale * S), polar_V.mT)
    for rows in row_blocks(out):
        out[rows] = product(left_vectors(rows), from_left).to(out.dtype)
    return out


def _rounding_floor(updates: Updates) -> float:
    """The largest singular value that rounding weights to their dtype may cause: noise of eps |W_0| / 2."""
    m, n = updates.base.shape
    eps = max(torch.finfo(t.dtype).eps for t in (updates.base, *updates.experts))
    size = math.sqrt(float(updates.base.double().square().mean()))
    return eps / 2 * size * (math.sqrt(m) + math.sqrt(n))


TSVM = Baseline(tsvm)
