"""TSV-M: merge the leading singular vectors of all updates after decorrelating them."""

from __future__ import annotations

import torch
from torch import Tensor

from coram_hf.baselines.linalg import leading_svd, polar
from coram_hf.baselines.linear import linear
from coram_hf.baselines.updates import Updates


def tsvm(updates: Updates, *, scale: float = 1.0, rank: int | None = None, cap_rank: bool = False) -> Tensor:
    """W = W_0 + scale * polar([U_1 .. U_N]) diag(S_1 .. S_N) polar([V_1 .. V_N])^T, rank-k SVDs of tau_i

    k is int(min(m, n) / N) by default, at least 1; `cap_rank` lowers it to the numerical rank of each
    tau_i, which low-rank experts need: directions with a zero singular value are arbitrary, yet they
    would take part in the decorrelation. Tensors that are not matrices take the weighted mean.
    """
    if updates.base.ndim != 2:
        return linear(updates).mul_(scale)
    n = len(updates)
    k = rank or max(1, min(updates.base.shape) // n)
    left, spectrum, right = [], [], []
    for i, weight in enumerate(updates.weights):
        U, S, V = leading_svd(updates.tau(i), k)
        if cap_rank:
            kept = int((S > S[0] * max(updates.base.shape) * torch.finfo(updates.dtype).eps).sum())
            U, S, V = U[:, :kept], S[:kept], V[:, :kept]
        left.append(U)
        spectrum.append(S * (n * weight))
        right.append(V)
    U, S, V = (torch.cat(parts, dim=-1) for parts in (left, spectrum, right))
    if S.numel() == 0 or not S.any():
        return updates.shaped(updates.empty().zero_())
    return (polar(U) * (scale * S)) @ polar(V).mT
