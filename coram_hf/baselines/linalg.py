"""Singular vectors and polar factors through the Gram matrix of the smaller side."""

from __future__ import annotations

import torch
from torch import Tensor

from coram_hf.geometry.slices import row_blocks

GRAM_RATIO = 1e-4
"""Singular values below this share of the largest are not trusted to a (float64) Gram matrix."""


def gram(A: Tensor) -> Tensor:
    """A^T A in float64, summed over blocks of rows."""
    total = A.new_zeros(A.shape[1], A.shape[1], dtype=torch.float64)
    for rows in row_blocks(A):
        block = A[rows].double()
        total.addmm_(block.mT, block)
    return total


def leading_svd(A: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (m x k), S (k), V (n x k) with A ~ U diag(S) V^T, the k largest singular values."""
    if A.shape[0] < A.shape[1]:
        V, S, U = leading_svd(A.mT, k)
        return U, S, V
    k = min(k, A.shape[1])
    squares, vectors = torch.linalg.eigh(gram(A))
    S = squares[-k:].flip(0).clamp_min(0).sqrt()
    if S[-1] <= GRAM_RATIO * S[0]:
        U, S, Vh = torch.linalg.svd(A, full_matrices=False)
        return U[:, :k], S[:k], Vh[:k].mT
    V = vectors[:, -k:].flip(1)
    return A @ (V / S).to(A.dtype), S.to(A.dtype), V.to(A.dtype)


def polar(A: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns (rows, if A is wide): A (A^T A)^(-1/2)."""
    if A.shape[0] < A.shape[1]:
        return polar(A.mT).mT
    squares, E = torch.linalg.eigh(gram(A))
    if squares[0] <= GRAM_RATIO**2 * squares[-1]:
        U, _, Vh = torch.linalg.svd(A, full_matrices=False)
        return U @ Vh
    return A @ ((E / squares.sqrt()) @ E.mT).to(A.dtype)
