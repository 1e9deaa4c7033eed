"""Decorrelation: the updates of one matrix, changed so that the experts no longer use the same directions.

Both ways act on updates tau_i (m x n, outputs x inputs), and leave a single one as it is. They depend only on
inner products, so updates of low rank are decorrelated as small cores between orthonormal bases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coram_hf.config import Decorrelate
from coram_hf.geometry.linalg import GRAM_RATIO, eigen, gram_of_columns, inverse_root, largest_eigenvalue

ETA = 0.1
"""The ridge, as a fraction of the largest eigenvalue of the experts' summed Gram matrices."""

GRAM_NOISE = 1e-6
"""Singular values below this fraction of the largest cannot be told from zero by a Gram matrix."""


def decorrelated(
    updates: Sequence[Tensor], how: Decorrelate, rank: int | None = None, floor: float = 0.0
) -> list[Tensor]:
    """tau~_i of one matrix by `tsv` (with the given rank and floor) or `ridge`."""
    if len(updates) == 1 or updates[0].numel() == 0:
        return list(updates)
    return tsv(updates, rank, floor) if how == "tsv" else ridge(updates)


def default_rank(m: int, n: int, n_experts: int) -> int:
    """k = int(min(m, n) / N), at least 1."""
    return max(1, min(m, n) // n_experts)


def tsv(updates: Sequence[Tensor], rank: int | None = None, floor: float = 0.0) -> list[Tensor]:
    """tau~_i = U~_i S_i V~_i^T, with [U~_1 .. U~_N] = polar([U_1 .. U_N]) and V~ likewise.

    U_i S_i V_i^T is the rank-k SVD of tau_i, without the directions of singular values at or below `floor` or
    rounding; directions that two experts share completely are divided between them.
    """
    m, n = updates[0].shape
    k = rank or default_rank(m, n, len(updates))
    if m < n:
        return [right @ left.mT for left, right in _tsv([tau.mT for tau in updates], k, floor)]
    return [left @ right.mT for left, right in _tsv(updates, k, floor)]


def _tsv(updates: Sequence[Tensor], k: int, floor: float) -> list[tuple[Tensor, Tensor]]:
    """U~_i S_i and V~_i of tall updates."""
    parts = [_leading(tau, k, floor) for tau in updates]
    V = torch.cat([vectors for vectors, _ in parts], 1)
    if V.shape[1] == 0:
        return [(tau[:, :0], vectors) for tau, (vectors, _) in zip(updates, parts, strict=True)]
    U = torch.cat([tau @ (v / s) for tau, (v, s) in zip(updates, parts, strict=True)], 1)
    of_left = inverse_root(gram_of_columns(U), lambda: U)
    right = V @ inverse_root(gram_of_columns(V), lambda: V)
    found, start = [], 0
    for _, s in parts:
        own = slice(start, start + len(s))
        found.append((U @ (of_left[:, own] * s), right[:, own]))
        start += len(s)
    return found


def _leading(tau: Tensor, k: int, floor: float) -> tuple[Tensor, Tensor]:
    """V and S of the k largest singular values of a tall matrix, without those that are zero."""
    squares, vectors = eigen(gram_of_columns(tau))
    S, V = squares[-k:].flip(0).clamp_min(0).sqrt(), vectors[:, -k:].flip(1)
    top = float(S[0])
    kept = S > floor
    telling = bool(kept.all()) or floor > GRAM_NOISE * top
    if top == 0 or (telling and (not kept.any() or float(S[kept][-1]) > GRAM_RATIO * top)):
        return V[:, kept], S[kept]
    _, S, Vh = torch.linalg.svd(tau, full_matrices=False)
    S, V = S[:k], Vh[:k].mT
    kept = S > max(floor, max(tau.shape) * torch.finfo(S.dtype).eps * float(S[0]))
    return V[:, kept], S[kept]


def ridge(updates: Sequence[Tensor]) -> list[Tensor]:
    """tau~_i = N tau_i G_i (sum_j G_j + eta lambda_max I)^-1 with G_i = tau_i^T tau_i / |tau_i|^2.

    Each input direction is divided among the experts by how much they use it. The inverse is taken on the
    smaller side: of the inputs, or of the stacked outputs of all experts.
    """
    (m, n), count = updates[0].shape, len(updates)
    sizes = [float(torch.linalg.vector_norm(tau)) for tau in updates]
    if not any(sizes):
        return [torch.zeros_like(tau) for tau in updates]
    if count * m <= n:
        return _ridge_by_outputs(updates, sizes)
    shares = [count / size**2 if size else 0.0 for size in sizes]
    if m < n:
        total = updates[0].new_zeros(n, n)
        for tau, share in zip(updates, shares, strict=True):
            total.add_(gram_of_columns(tau), alpha=share / count)
        inverse = _regularised_inverse(total)
        return [
            (gram_of_columns(tau.mT).mul_(share) @ tau) @ inverse
            for tau, share in zip(updates, shares, strict=True)
        ]
    grams = [gram_of_columns(tau).mul_(share) for tau, share in zip(updates, shares, strict=True)]
    inverse = _regularised_inverse(torch.stack(grams).sum(0) / count)
    return [tau @ (gram @ inverse) for tau, gram in zip(updates, grams, strict=True)]


def _ridge_by_outputs(updates: Sequence[Tensor], sizes: Sequence[float]) -> list[Tensor]:
    """N |tau_i| (T_i T_i^T) [(T T^T + eta lambda_max I)^-1 T]_i, with T the stacked tau_i / |tau_i|."""
    m, count = len(updates[0]), len(updates)
    T = torch.cat([tau / size if size else tau for tau, size in zip(updates, sizes, strict=True)])
    K = gram_of_columns(T.mT)
    rows = [slice(i * m, (i + 1) * m) for i in range(count)]
    own = [count * size * K[some, some] for some, size in zip(rows, sizes, strict=True)]
    inverse = _regularised_inverse(K)
    return [(block @ inverse[some]) @ T for block, some in zip(own, rows, strict=True)]


def _regularised_inverse(gram: Tensor) -> Tensor:
    """(A + eta lambda_max(A) I)^-1 by Cholesky, with A overwritten; its condition is at most 1 + 1 / eta."""
    gram.diagonal().add_(ETA * largest_eigenvalue(gram))
    return torch.cholesky_inverse(torch.linalg.cholesky(gram))
