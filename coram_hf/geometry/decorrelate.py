"""Decorrelation: the updates of one matrix, changed so that the experts no longer use the same directions.

Every way acts on updates tau_i (m x n, outputs x inputs), and leaves a single one as it is. All depend only
on inner products, so updates of low rank are decorrelated as small cores between orthonormal bases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coram_hf.config import Decorrelate
from coram_hf.geometry.linalg import (
    GRAM_RATIO,
    eigen,
    gram_of_columns,
    inverse,
    inverse_root,
    largest_eigenvalue,
    product,
)

ETA = 0.1
"""The ridge, as a fraction of the largest eigenvalue of the experts' summed Gram matrices."""

KEPT = 0.99
"""The share of every |tau_i|^2 that the singular values kept by `tsv` must hold for `auto` to choose it."""

RANK_ROUNDING = 1e-6
"""What rounding may add to an effective rank before it is rounded up."""

GRAM_NOISE = 1e-6
"""Singular values below this fraction of the largest cannot be told from zero by a Gram matrix."""


def decorrelated(
    updates: Sequence[Tensor], how: Decorrelate, rank: int | None = None, floor: float = 0.0
) -> list[Tensor]:
    """tau~_i of one matrix; `rank` is that of `tsv`, and directions at or below `floor` are noise.

    `auto` takes `tsv` where its rank keeps the updates, which then become exactly orthogonal, and `wudi`
    where it would cut them off.
    """
    if len(updates) == 1 or updates[0].numel() == 0:
        return list(updates)
    if how == "ridge":
        return ridge(updates)
    if how == "tsv" or (how == "auto" and rank_keeps(updates, rank)):
        return tsv(updates, rank, floor)
    return wudi(updates, floor)


def default_rank(m: int, n: int, n_experts: int) -> int:
    """k = int(min(m, n) / N), at least 1."""
    return max(1, min(m, n) // n_experts)


def rank_keeps(updates: Sequence[Tensor], rank: int | None = None) -> bool:
    """Whether the k largest singular values of every update hold KEPT of its square."""
    m, n = updates[0].shape
    k = rank or default_rank(m, n, len(updates))
    return min(m, n) <= k or all(_share_of_leading(tau if m >= n else tau.mT, k) >= KEPT for tau in updates)


def _share_of_leading(tall: Tensor, k: int) -> float:
    squares = torch.linalg.eigvalsh(gram_of_columns(tall)).clamp_min(0)
    total = float(squares.sum())
    return float(squares[-k:].sum()) / total if total else 1.0


def tsv(updates: Sequence[Tensor], rank: int | None = None, floor: float = 0.0) -> list[Tensor]:
    """tau~_i = U~_i S_i V~_i^T, with [U~_1 .. U~_N] = polar([U_1 .. U_N]) and V~ likewise.

    U_i S_i V_i^T is the rank-k SVD of tau_i, without the directions of singular values at or below `floor` or
    rounding; directions that two experts share completely are divided between them.
    """
    m, n = updates[0].shape
    k = rank or default_rank(m, n, len(updates))
    if m < n:
        return [product(right, left.mT) for left, right in _tsv([tau.mT for tau in updates], k, floor)]
    return [product(left, right.mT) for left, right in _tsv(updates, k, floor)]


def _tsv(updates: Sequence[Tensor], k: int, floor: float) -> list[tuple[Tensor, Tensor]]:
    """U~_i S_i and V~_i of tall updates."""
    parts = [_leading(tau, k, floor) for tau in updates]
    V = torch.cat([vectors for vectors, _ in parts], 1)
    if V.shape[1] == 0:
        return [(tau[:, :0], vectors) for tau, (vectors, _) in zip(updates, parts, strict=True)]
    U = torch.cat([product(tau, v / s) for tau, (v, s) in zip(updates, parts, strict=True)], 1)
    of_left = inverse_root(gram_of_columns(U), lambda: U)
    right = product(V, inverse_root(gram_of_columns(V), lambda: V))
    found, start = [], 0
    for _, s in parts:
        own = slice(start, start + len(s))
        found.append((product(U, of_left[:, own] * s), right[:, own]))
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
        shared = _regularised_inverse(total)
        return [
            product(product(gram_of_columns(tau.mT).mul_(share), tau), shared)
            for tau, share in zip(updates, shares, strict=True)
        ]
    grams = [gram_of_columns(tau).mul_(share) for tau, share in zip(updates, shares, strict=True)]
    shared = _regularised_inverse(torch.stack(grams).sum(0) / count)
    return [product(tau, product(gram, shared)) for tau, gram in zip(updates, grams, strict=True)]


def _ridge_by_outputs(updates: Sequence[Tensor], sizes: Sequence[float]) -> list[Tensor]:
    """N |tau_i| (T_i T_i^T) [(T T^T + eta lambda_max I)^-1 T]_i, with T the stacked tau_i / |tau_i|."""
    m, count = len(updates[0]), len(updates)
    T = torch.cat([tau / size if size else tau for tau, size in zip(updates, sizes, strict=True)])
    K = gram_of_columns(T.mT)
    rows = [slice(i * m, (i + 1) * m) for i in range(count)]
    own = [count * size * K[some, some] for some, size in zip(rows, sizes, strict=True)]
    shared = _regularised_inverse(K)
    return [product(product(block, shared[some]), T) for block, some in zip(own, rows, strict=True)]


def _regularised_inverse(gram: Tensor) -> Tensor:
    """(A + eta lambda_max(A) I)^-1, with A overwritten; its condition is at most 1 + 1 / eta."""
    gram.diagonal().add_(ETA * largest_eigenvalue(gram))
    return inverse(gram)


def wudi(updates: Sequence[Tensor], floor: float = 0.0) -> list[Tensor]:
    """tau~_i = tau_i (I - E E^T) + tau_i G_i E L^-1 E^T, with E and L the leading eigenpairs of sum_j G_j.

    G_i = tau_i^T tau_i / |tau_i|^2. The updates add up to WUDI in closed form: on the inputs that the experts
    use most, each direction is divided among them as in `ridge`; on all others, updates stay as they are.
    """
    (m, n), count = updates[0].shape, len(updates)
    if count * m < n:
        basis = torch.linalg.qr(torch.cat(list(updates)).mT).Q
        return [product(core, basis.mT) for core in wudi([product(tau, basis) for tau in updates], floor)]
    squares = [float(torch.linalg.vector_norm(tau)) ** 2 for tau in updates]
    if not any(squares):
        return [torch.zeros_like(tau) for tau in updates]
    total, noise = updates[0].new_zeros(n, n), 0.0
    for tau, square in zip(updates, squares, strict=True):
        if square:
            total.add_(gram_of_columns(tau), alpha=1 / square)
            noise += floor**2 / square
    L, E = leading_inputs(total, noise)
    found = []
    for tau, square in zip(updates, squares, strict=True):
        on_E = product(tau, E)
        shared = product(tau, product(tau.mT, on_E)).div_(L * (square or 1.0))
        found.append(product(shared.sub_(on_E), E.mT).add_(tau))
    return found


def leading_inputs(total: Tensor, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """The leading eigenvalues and eigenvectors of a Gram matrix, as many as its effective rank.

    That rank is (sum sqrt l)^2 / sum l, rounded up; eigenvalues at or below `noise` or rounding do not count.
    """
    values, vectors = eigen(total)
    kept = values > max(noise, len(values) * torch.finfo(values.dtype).eps * float(values[-1]))
    values, vectors = values[kept], vectors[:, kept]
    rank = math.ceil(float(values.sqrt().sum()) ** 2 / float(values.sum()) - RANK_ROUNDING)
    return values[-rank:], vectors[:, -rank:]
