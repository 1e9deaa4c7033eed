"""Singular vectors and inverse roots from the Gram matrix of the smaller side, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from coram_hf.geometry.slices import row_blocks

GRAM_RATIO = 1e-3
"""Singular values below this fraction of the largest are too inaccurate from a Gram matrix."""


def gram(blocks: Iterable[Tensor]) -> Tensor:
    """A^T A in float64, from blocks of rows of A."""
    wide = (block.double() for block in blocks)
    first = next(wide)
    total = first.mT @ first
    for block in wide:
        total.addmm_(block.mT, block)
    return total


def leading_right_vectors(A: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """V (n x k) and S (k) of the k largest singular values of a tall A (m x n), from A^T A."""
    squares, vectors = torch.linalg.eigh(gram(A[rows] for rows in row_blocks(A)))
    k = min(k, A.shape[1])
    S = squares[-k:].flip(0).clamp_min(0).sqrt()
    if S[-1] > GRAM_RATIO * S[0] or S[0] == 0:
        return vectors[:, -k:].flip(1), S
    _, S, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    return Vh[:k].mT, S[:k]


def inverse_root(squared: Tensor, matrix: Callable[[], Tensor]) -> Tensor:
    """(A^T A)^(-1/2) from A^T A or, if that is too ill-conditioned, from the SVD of A itself.

    A (A^T A)^(-1/2) is polar(A). The null space of A is left out.
    """
    squares, E = torch.linalg.eigh(squared)
    if squares[0] > GRAM_RATIO**2 * squares[-1]:
        return (E / squares.sqrt()) @ E.mT
    A = matrix()
    _, S, Vh = torch.linalg.svd(A, full_matrices=False)
    kept = S > torch.finfo(S.dtype).eps * max(A.shape) * S[0]
    return (Vh[kept].mT / S[kept]) @ Vh[kept]
