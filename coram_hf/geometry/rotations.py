"""The rotation group SO(h): logarithm, exponential, and projection, batched over leading dimensions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEAR_PI = 3.0
"""Angles above this take the near-pi logarithm: there the Cayley transform loses its accuracy."""

EXACTLY_PI = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Eigenvalues this close to -1 are treated as a half turn, whose plane is all that is defined."""


def skew(K: Tensor) -> Tensor:
    """Projection on so(h): (K - K^T) / 2."""
    return (K - K.mT) / 2


def orthonormalize(Q: Tensor) -> Tensor:
    """polar(Q) of a matrix that is orthogonal up to rounding: one Newton-Schulz step, Q (3I - Q^T Q) / 2."""
    return 1.5 * Q - 0.5 * Q @ (Q.mT @ Q)


def to_special(Q: Tensor) -> tuple[Tensor, Tensor]:
    """Negate the last column where det Q < 0, so that Q is in SO(h); also returns where that was."""
    reflected = torch.linalg.det(Q) < 0
    sign = torch.where(reflected, -1.0, 1.0).to(Q.dtype)
    return torch.cat([Q[..., :-1], Q[..., -1:] * sign[..., None, None]], dim=-1), reflected


def log(Q: Tensor) -> tuple[Tensor, Tensor]:
    """Principal logarithm on SO(h); also returns which rotations took the near-pi path.

    C = (Q + I)^-1 (Q - I) is skew with eigenvalues i tan(theta / 2), so i C is Hermitian:
    i C = E diag(x) E^H gives log Q = Im(E diag(2 arctan x) E^H).
    """
    eye = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    solution, failure = torch.linalg.solve_ex(Q + eye, Q - eye)
    solved = (failure == 0) & (solution.abs().amax((-2, -1)) < 1e6)
    x, E = torch.linalg.eigh(1j * torch.where(solved[..., None, None], skew(solution), 0.0))
    K = skew(((E * (2 * torch.arctan(x)).unsqueeze(-2)) @ E.mH).imag)
    near_pi = ~solved | (x.abs().amax(-1) > math.tan(NEAR_PI / 2))
    if near_pi.any():
        K[near_pi] = torch.stack([_log_near_pi(q) for q in Q[near_pi]])
    return K, near_pi


def exp(K: Tensor) -> Tensor:
    """Exponential of so(h), re-projected on the orthogonal group.

    i K = E diag(x) E^H gives exp K = Re(E diag(exp(-i x)) E^H), to rounding for every norm;
    `torch.linalg.matrix_exp` of a single matrix is only good to 1e-10.
    """
    x, E = torch.linalg.eigh(1j * skew(K))
    return orthonormalize(((E * torch.exp(-1j * x).unsqueeze(-2)) @ E.mH).real)


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
