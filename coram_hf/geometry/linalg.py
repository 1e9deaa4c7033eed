"""Singular vectors, inverse roots and the largest eigenvalue from Gram matrices, in float64.

On one core, numpy's Gram matrix takes half the products of torch's; its eigendecomposition and its products
are also faster. On several cores its threads and torch's would wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from coram_hf.geometry.slices import row_blocks

GRAM_RATIO = 1e-3
"""Singular values below this fraction of the largest are too inaccurate from a Gram matrix."""

SMALLEST_HALF = 256
"""Smaller blocks are inverted by Cholesky."""

LANCZOS_SIZE, LANCZOS_STEPS, LANCZOS_ERROR = 512, 400, 1e-11
"""Smallest matrix for Lanczos, its most steps, and the relative error of the eigenvalue that ends it."""


def gram(blocks: Iterable[Tensor]) -> Tensor:
    """A^T A in float64, from blocks of rows of A."""
    squares = (gram_of_columns(block.double()) for block in blocks)
    total = next(squares)
    for square in squares:
        total += square
    return total


def _on_one_core(A: Tensor) -> bool:
    return A.device.type == "cpu" and torch.get_num_threads() == 1


def gram_of_columns(A: Tensor) -> Tensor:
    """A^T A in the dtype of A."""
    if not _on_one_core(A):
        return A.mT @ A
    X = A.numpy()
    return torch.from_numpy(X.T @ X)


def product(A: Tensor, B: Tensor) -> Tensor:
    """A B of two large matrices."""
    if not _on_one_core(A):
        return A @ B
    return torch.from_numpy(A.numpy() @ B.numpy())


def rows_through_gram(rows: Tensor, A: Tensor) -> Tensor:
    """Z A^T A for a few rows Z."""
    return product(product(rows, A.mT), A)


def eigen(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order, and eigenvectors, of a symmetric matrix."""
    if not _on_one_core(symmetric):
        values, vectors = torch.linalg.eigh(symmetric)
        return values, vectors
    found = np.linalg.eigh(symmetric.numpy())
    return torch.from_numpy(found.eigenvalues), torch.from_numpy(found.eigenvectors)


def leading_right_vectors(A: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """V (n x k) and S (k) of the k largest singular values of a tall A (m x n), from A^T A."""
    squares, vectors = eigen(gram(A[rows] for rows in row_blocks(A)))
    k = min(k, A.shape[1])
    S = squares[-k:].flip(0).clamp_min(0).sqrt()
    if S[-1] > GRAM_RATIO * S[0] or S[0] == 0:
        return vectors[:, -k:].flip(1), S
    _, S, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    return Vh[:k].mT, S[:k]


def inverse_root(squared: Tensor, matrix: Callable[[], Tensor]) -> Tensor:
    """(A^T A)^(-1/2) from A^T A or, if that is too ill-conditioned, from the SVD of A itself.

    A (A^T A)^(-1/2) is polar(A). The null space of A is left out. Rounding of A^T A distorts the direction of
    its smallest eigenvalue by eps lambda_max / lambda_min, and polar(A) by that over the root of its width.
    """
    squares, E = eigen(squared)
    if squares[0] > GRAM_RATIO**2 / math.sqrt(len(squares)) * squares[-1]:
        return product(E / squares.sqrt(), E.mT)
    A = matrix()
    _, S, Vh = torch.linalg.svd(A, full_matrices=False)
    kept = S > torch.finfo(S.dtype).eps * max(A.shape) * S[0]
    return product(Vh[kept].mT / S[kept], Vh[kept])


def inverse(A: Tensor) -> Tensor:
    """A^-1 of a well-conditioned symmetric positive definite matrix, nearly all of it in products of halves.

    With S = A_22 - A_21 A_11^-1 A_12 and Y = A_11^-1 A_12, the blocks of A^-1 are A_11^-1 + Y S^-1 Y^T,
    -Y S^-1 and S^-1. Factorizations of whole matrices take twice the time.
    """
    half = len(A) // 2
    if half < SMALLEST_HALF:
        return torch.cholesky_inverse(torch.linalg.cholesky(A))
    first = inverse(A[:half, :half])
    Y = product(first, A[:half, half:])
    last = inverse(A[half:, half:] - product(A[half:, :half], Y))
    found = torch.empty_like(A)
    across = found[:half, half:].copy_(product(Y, last)).neg_()
    found[:half, :half] = first.sub_(product(across, Y.mT))
    found[half:, :half] = across.mT
    found[half:, half:] = last
    return found


def largest_eigenvalue(symmetric: Tensor) -> float:
    """lambda_max of a positive semidefinite matrix: of a large one by Lanczos, to 1e-11 of its value."""
    n = len(symmetric)
    if n < LANCZOS_SIZE:
        return max(0.0, float(torch.linalg.eigvalsh(symmetric)[-1]))
    seeded = torch.Generator().manual_seed(0)
    start = torch.randn(n, generator=seeded, dtype=torch.float64).to(symmetric)
    basis = symmetric.new_empty(LANCZOS_STEPS + 1, n)
    basis[0] = start / start.norm()
    T = torch.zeros(LANCZOS_STEPS, LANCZOS_STEPS, dtype=torch.float64)
    for step in range(LANCZOS_STEPS):
        known = basis[: step + 1]
        image = symmetric @ basis[step]
        T[step, step] = float(image @ basis[step])
        for _ in range(2):
            image -= known.mT @ (known @ image)
        rest = float(image.norm())
        values, vectors = torch.linalg.eigh(T[: step + 1, : step + 1])
        residual, gap = rest * abs(float(vectors[-1, -1])), float(values[-1] - values[-2:][0])
        allowed = LANCZOS_ERROR * float(values[-1])
        if residual <= allowed or (step > 8 and residual**2 <= allowed * gap):
            return float(values[-1])
        if step + 1 < LANCZOS_STEPS:
            T[step + 1, step] = T[step, step + 1] = rest
            basis[step + 1] = image / rest
    return max(0.0, float(torch.linalg.eigvalsh(symmetric)[-1]))
