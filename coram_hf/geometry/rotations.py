"""The rotation group SO(h): logarithm, exponential, and projection, batched over leading dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coram_hf.geometry.slices import times

NEAR_PI = 3.0
"""Angles above this take the near-pi logarithm: there the Cayley transform loses its accuracy."""

ARCSINH, ARCSINH_RADIUS = [(-1) ** k * math.comb(2 * k, k) / 4**k / (2 * k + 1) for k in range(16)], 0.4
"""arcsinh(A) = A sum_k (-1)^k (2k choose k) / 4^k A^2k / (2k + 1), and the |A| up to which these terms
suffice: 0.4^32 * 0.004 < 1e-15."""

NEAR = 0.5
"""Q with tr Q > h - 0.5 has |Q - I|_F < 1: it is in SO(h), with all angles below 60 degrees."""

ROOT, ROOT_RADIUS = [(-1) ** k * math.comb(2 * k, k) / 4**k for k in range(1, 17)], 0.1
"""(I + D)^(-1/2) - I = D sum_k c_k D^k, and the |D| up to which these terms suffice: 0.1^17 < 1e-16."""

EXPM1, EXP_RADIUS = [1 / math.factorial(k + 1) for k in range(16)], 0.5
"""exp(K) - I = K sum_k K^k / (k + 1)!, and the |K| up to which these terms suffice: 0.5^17 / 17! < 1e-18."""

EXACTLY_PI = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Eigenvalues this close to -1 are treated as a half turn, whose plane is all that is defined."""


def skew(K: Tensor) -> Tensor:
    """Projection on so(h): (K - K^T) / 2."""
    return (K - K.mT) / 2


def orthonormalize(Q: Tensor) -> Tensor:
    """polar(Q) of a matrix that is orthogonal up to rounding: one Newton-Schulz step, Q (3I - Q^T Q) / 2."""
    return 1.5 * Q - 0.5 * times(Q, times(Q.mT, Q))


def to_special(Q: Tensor) -> tuple[Tensor, Tensor]:
    """Negate the last column where det Q < 0, so that Q is in SO(h); also returns where it did so."""
    reflected = ~_is_near(Q)
    if not reflected.any():
        return Q, reflected
    reflected[reflected.clone()] = torch.linalg.det(Q[reflected]) < 0
    sign = torch.where(reflected, -1.0, 1.0).to(Q.dtype)
    return torch.cat([Q[..., :-1], Q[..., -1:] * sign[..., None, None]], dim=-1), reflected


def log(Q: Tensor) -> tuple[Tensor, Tensor]:
    """Principal logarithm on SO(h); also returns which rotations took the near-pi path.

    A = (Q - Q^T) / 2 has eigenvalues i sin(theta), so log Q = arcsinh A: its series where all angles are
    small. Otherwise C = (Q + I)^-1 (Q - I) is skew with eigenvalues i tan(theta / 2), and the Hermitian
    i C = E diag(x) E^H gives log Q = Im(E diag(2 arctan x) E^H).
    """
    A = skew(Q)
    large = ~_is_near(Q) | (_radius(A) > ARCSINH_RADIUS)
    near_pi = torch.zeros_like(large)
    some = bool(large.any())
    if some:
        A = torch.where(large[..., None, None], 0.0, A)
    K = times(A, _polynomial(times(A, A), ARCSINH))
    if some:
        K[large], near_pi[large] = _log_of_large(Q[large])
    return skew(K), near_pi


def _log_of_large(Q: Tensor) -> tuple[Tensor, Tensor]:
    """log of rotations by any angles; also returns which of them took the near-pi path."""
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    solution, failure = torch.linalg.solve_ex(Q + eye, Q - eye)
    solved = (failure == 0) & (solution.abs().amax((-2, -1)) < 1e6)
    x, E = torch.linalg.eigh(1j * skew(torch.where(solved[..., None, None], solution, 0.0)))
    K = skew(((E * (2 * torch.arctan(x)).unsqueeze(-2)) @ E.mH).imag)
    near_pi = ~solved | (x.abs().amax(-1) > math.tan(NEAR_PI / 2))
    if near_pi.any():
        K[near_pi] = torch.stack([_log_near_pi(q) for q in Q[near_pi]])
    return K, near_pi


def expm1(K: Tensor) -> Tensor:
    """Q - I with Q = exp K of so(h), re-projected on the orthogonal group; it vanishes with K.

    Its series where K is small, and otherwise i K = E diag(x) E^H, exp K = Re(E diag(exp(-i x)) E^H), both
    good to rounding; `torch.linalg.matrix_exp` of a single matrix is only good to 1e-10.
    """
    K = skew(K)
    large = _radius(K) > EXP_RADIUS
    some = bool(large.any())
    small = torch.where(large[..., None, None], 0.0, K) if some else K
    q = times(small, _polynomial(small, EXPM1))
    if some:
        x, E = torch.linalg.eigh(1j * K[large])
        q[large] = ((E * torch.expm1(-1j * x).unsqueeze(-2)) @ E.mH).real
    excess = q + q.mT + times(q.mT, q)
    return q - (excess + times(q, excess)) / 2


def exp(K: Tensor) -> Tensor:
    """Exponential of so(h), re-projected on the orthogonal group."""
    return torch.eye(K.shape[-1], dtype=K.dtype, device=K.device) + expm1(K)


def inverse_root(D: Tensor) -> Tensor:
    """(I + D)^(-1/2) - I of symmetric matrices D with eigenvalues above -1; it vanishes with D."""
    large = torch.linalg.matrix_norm(D) > ROOT_RADIUS
    some = bool(large.any())
    small = torch.where(large[..., None, None], 0.0, D) if some else D
    c = times(small, _polynomial(small, ROOT))
    if some:
        d, E = torch.linalg.eigh(D[large])
        root = (1 + d).sqrt()
        c[large] = (E * (-d / (root * (1 + root))).unsqueeze(-2)) @ E.mT
    return c


def _is_near(Q: Tensor) -> Tensor:
    """Whether a matrix that is orthogonal up to rounding is certainly near the identity."""
    return Q.diagonal(0, -2, -1).sum(-1) > Q.shape[-1] - NEAR


def _radius(K: Tensor) -> Tensor:
    """|K|_F / sqrt 2, a bound on the spectral norm of a skew matrix, whose eigenvalues come in pairs."""
    return torch.linalg.matrix_norm(K) / math.sqrt(2)


def _polynomial(X: Tensor, coefficients: Sequence[float]) -> Tensor:
    """sum_k c_k X^k for 16 coefficients in six products, after Paterson and Stockmeyer."""
    square = times(X, X)
    eye = torch.eye(X.shape[-1], dtype=X.dtype, device=X.device).expand_as(X)
    powers = torch.stack([eye, X, square, times(square, X)])
    table = torch.tensor(coefficients, dtype=X.dtype, device=X.device).view(4, 4)
    *others, total = torch.tensordot(table, powers, 1)
    fourth = times(square, square)
    for block in reversed(others):
        total = times(total, fourth) + block
    return total


def _log_near_pi(Q: Tensor) -> Tensor:
    """log of one rotation with an angle near pi, through a complex eigendecomposition.

    A phase turns the widest gap between the eigenvalues to -1, where the Cayley transform of the
    (now complex) unitary matrix is Hermitian and well conditioned. Its eigenvectors are orthonormal
    even where angles repeat, which those of a general eigensolver are not.
    """
    angles = torch.linalg.eigvals(Q).angle().sort().values
    gaps = torch.diff(angles, append=angles[:1] + 2 * math.pi)
    gap = int(gaps.argmax())
    phase = torch.exp(-1j * (angles[gap] + gaps[gap] / 2 - math.pi))
    eye = torch.eye(Q.shape[-1], dtype=phase.dtype, device=Q.device)
    hermitian = 1j * torch.linalg.solve(eye + phase * Q, eye - phase * Q)
    E = torch.linalg.eigh((hermitian + hermitian.mH) / 2)[1]
    values = (E.conj() * (Q.to(E.dtype) @ E)).sum(-2)
    half_turn = (values + 1).abs() < EXACTLY_PI[Q.dtype]
    theta = torch.where(half_turn, 0.0, values.angle())
    return skew(-((E * theta) @ E.mH).imag) + _half_turn(E[:, half_turn])


def _half_turn(E: Tensor) -> Tensor:
    """A generator of the half turn of the real space that the columns of E span: pi in paired planes."""
    count = E.shape[-1] - E.shape[-1] % 2
    basis = torch.linalg.eigh((E @ E.mH).real)[1][:, E.shape[0] - count :]
    a, b = basis[:, 0::2], basis[:, 1::2]
    return skew(2 * math.pi * b @ a.mT)
