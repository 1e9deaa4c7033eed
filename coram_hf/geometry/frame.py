"""The frame of a slice: the algebra of the method, derived once for merging and for diagnostics.

Base and experts have W_i = U_i S_i V_i^T, with the signs of singular pairs matched to the base's. Rotations
Q_i = U_0^T U_i, spectral shifts dS_i = S_i / S_0 - 1 and right factors V_i are averaged, each in its own
space: W_merge = U_0 Qbar S_0 (I + dSbar) Vbar^T. A frame computes only what a branch needs, and caches it
for the next branch.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.config import Branch
from coram_hf.geometry import rotations
from coram_hf.geometry.products import Products
from coram_hf.geometry.slices import times

FACTORS: dict[Branch, str] = {
    "full": "qsv",
    "lr": "qv",
    "q": "q",
    "s": "s",
    "v": "v",
    "qs": "qs",
    "sv": "sv",
}
"""Which of the rotation Q, the spectral shift dS and the right factor V a branch merges."""

SPECTRUM_FLOOR = 1e-12
"""epsilon in dS_i = S_i / max(S_0, epsilon) - 1."""

GRAM_CONDITION = 1e3
"""Condition number above which Gram matrices in float64 have lost too many digits."""

ROUNDED_CONDITION, ROUNDED_POLAR, ROUNDED_TURN, ROUNDED_GAP = 100.0, 10.0, 0.3, 5e-4
"""Bounds on what products in float32 determine: condition numbers of slices and of sum w_i V_i, and either
the largest entry of Q_i - I or, if that is larger, the smallest gap in S_i^2 / max S_i^2.

Over 23,000 random slices (h = 4 to 64, d_in = 16 to 1024, spectra from degenerate to condition 300, updates
of 1e-5 to 0.5 of the base) the update differs from float64's by at most 1e-6 of its norm below the first two
bounds, by 9e-6 with the gap in place of the second, and by 9e-5 without any.
"""

SMALLEST_SQUARE = 1e-24
"""|W_0|^2 of a slice below which products of its updates could underflow in float32."""

RANK_TOLERANCE = 1e-10
"""A slice with sigma_min <= tolerance * sigma_max has no frame."""


class Turns(NamedTuple):
    """Q_i in SO(h) and K_i = log Q_i, which Q_i were reflections, and which took the near-pi logarithm."""

    Q: Tensor
    K: Tensor
    reflected: Tensor
    near_pi: Tensor


class Update(NamedTuple):
    """W_merge - W_0 = A Z + L_0 W_0 of some slices as L = [A, L_0], or L_0 alone if Vbar is not merged.

    trusted: the slices that this is good for.
    """

    L: Tensor
    trusted: Tensor


class Frame:
    """S_i of some slices, base first, U_0 and Q_i, and the merged left factor; subclasses add the right one.

    S: (slices, models, height), in descending order; U0: (slices, height, height); Q: (slices, experts,
    height, height), not yet without reflections.
    """

    def __init__(self, U0: Tensor, S: Tensor, Q: Tensor, weights: Tensor) -> None:
        self.U0, self.S, self.Q, self.weights = U0, S, Q, weights

    @cached_property
    def turns(self) -> Turns:
        """Rotations of the experts' frames and their logarithms."""
        Q, reflected = rotations.to_special(self.Q)
        K, near_pi = rotations.log(Q)
        return Turns(Q, K, reflected, near_pi)

    @cached_property
    def turn(self) -> Tensor:
        """Qbar - I with Qbar = exp(sum w_i log Q_i)."""
        return rotations.expm1(self.mean(self.turns.K))

    @cached_property
    def shift(self) -> Tensor:
        """dSbar = sum w_i dS_i, with dS_i = (S_i^2 - S_0^2) / (S_0 (S_i + S_0))."""
        S0 = self.S[:, :1]
        floored = S0.clamp_min(SPECTRUM_FLOOR)
        return self.mean((self.S[:, 1:] - S0) / floored + (S0 / floored - 1))

    def mean(self, values: Tensor) -> Tensor:
        """sum w_i x_i over the experts."""
        return torch.einsum("n,bn...->b...", self.weights, values)


class GramFrame(Frame):
    """Frames from the products of W_0 and tau_i alone, so that the update is a small matrix times [Z; W_0].

    In the basis of U_0 all is near the identity: Q_i and S_i^2 are the eigenvectors and eigenvalues of
    H_i = S_0^2 + U_0^T (M_0i + M_0i^T + M_ii) U_0, and every factor is computed as its difference from the
    base's. So all vanishes with the updates, and errors in M are relative to them, not to the weights.

    trusted: slices whose products determine their frame; the others get an identity for their frame.
    """

    def __init__(self, products: Products, weights: Tensor) -> None:
        M, cross, own, rounded = products
        eye = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
        self._eye, self._rounded = eye, rounded
        trusted = (M.sum((1, 2)) + cross.sum((1, 2, 3)) + own.sum((1, 2, 3))).isfinite()
        M, cross, own = _where(trusted, M, eye), _where(trusted, cross, 0.0), _where(trusted, own, 0.0)
        squares, U0 = (t.flip(-1) for t in torch.linalg.eigh(M))
        trusted &= self._has_digits(squares, ROUNDED_CONDITION)
        if rounded:
            trusted &= squares.sum(-1) > SMALLEST_SQUARE

        U = U0.unsqueeze(1)
        F = times(times(U.mT, cross), U)
        H = torch.diag_embed(squares).unsqueeze(1) + F + F.mT + times(times(U.mT, own), U)
        found, Q = (t.flip(-1) for t in torch.linalg.eigh(H))
        trusted &= self._has_digits(found, ROUNDED_CONDITION).all(1)
        if rounded:
            trusted &= _is_determined(found, Q).all(1)
        Q, F, U0 = _where(trusted, Q, eye), _where(trusted, F, 0.0), _where(trusted, U0, eye)
        S = _where(trusted, torch.cat([squares.unsqueeze(1), found], 1), 1.0).sqrt()
        overlap = (S[:, :1] / S[:, 1:] + 1) * Q.diagonal(0, 2, 3) + (F * Q.mT).sum(-1) / (S[:, 1:] * S[:, :1])
        Q = Q * torch.where(overlap < 0, -1.0, 1.0).to(Q).unsqueeze(-2)
        super().__init__(U0, S, Q, weights.to(M))
        self.trusted, self._F = trusted, F

    def _has_digits(self, squares: Tensor, rounded: float) -> Tensor:
        """Whether the products determine matrices with these squared singular values, in descending order."""
        return has_digits(squares[..., -1], squares[..., 0], rounded if self._rounded else GRAM_CONDITION)

    @cached_property
    def P(self) -> Tensor:
        """[P_1, ..., P_N], P_i = w_i S_i^-1 U_i^T: sum w_i V_i^T = sum P_i W_0 + Z with Z = sum P_i tau_i."""
        return times(self._turned_P, self.U0.mT.unsqueeze(1)).transpose(1, 2).flatten(2)

    @cached_property
    def _turned_P(self) -> Tensor:
        """P_i U_0."""
        return self.weights[:, None, None] * (self.Q.mT / self.S[:, 1:].unsqueeze(-1))

    def update(self, branch: Branch, ZZ: Tensor | None = None) -> Update:
        """The update of a branch, where ZZ = Z Z^T, which branches without V do not need.

        With q = Qbar - I, e = dSbar, V = sum w_i V_i^T = (I + rho) V_0^T + Z and c = (V V^T)^(-1/2) - I,
        A = U_0 (I + q) S_0 (1 + e) (I + c) and
        L_0 = U_0 (q S_0 + (I + q) S_0 (e + (1 + e) (c + (I + c) rho))) S_0^-1 U_0^T.
        """
        factors, S0, trusted = FACTORS[branch], self.S[:, 0], self.trusted
        turned = self._eye + self.turn if "q" in factors else self._eye.expand_as(self.U0)
        scaled = S0 * (1 + self.shift) if "s" in factors else S0
        inner = torch.diag_embed(S0 * self.shift) if "s" in factors else torch.zeros_like(self.U0)
        if "v" in factors:
            assert ZZ is not None
            root, right, trusted = self._polar(ZZ)
            inner = inner + scaled.unsqueeze(-1) * right
        outer = times(turned, inner)
        if "q" in factors:
            outer = outer + self.turn * S0.unsqueeze(-2)
        L = times(times(self.U0, outer / S0.unsqueeze(-2)), self.U0.mT)
        if "v" in factors:
            L = torch.cat([times(times(self.U0, turned * scaled.unsqueeze(-2)), root), L], -1)
        return Update(L, trusted)

    def _polar(self, ZZ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """C^(-1/2) = I + c, c + (I + c) rho, and where they can be trusted; see `update`."""
        S0, S = self.S[:, :1], self.S[:, 1:]
        turns = (self.Q.mT - self._eye) * (S0.unsqueeze(-2) / S.unsqueeze(-1))
        rho = self.mean(turns + torch.diag_embed((S0 - S) / S))
        mixed = times(self._F, self._turned_P.mT).sum(1) / S0.mT
        half = rho + mixed + times(rho, mixed)
        D = half + half.mT + times(rho, rho.mT) + _where(self.trusted, ZZ.to(rho), 0.0)
        trusted = self.trusted.clone()
        uncertain = torch.linalg.matrix_norm(D) > 0.5
        if uncertain.any():
            squares = 1 + torch.linalg.eigvalsh(D[uncertain]).flip(-1)
            trusted[uncertain] &= self._has_digits(squares, ROUNDED_POLAR)
            D = _where(trusted, D, 0.0)
        c = rotations.inverse_root(D)
        return self._eye + c, c + rho + times(c, rho), trusted


class SvdFrame(Frame):
    """Frames by true SVDs of the slices W_0, ..., W_N (slices, models, height, d_in) that have one.

    framed: which slices these are; a slice that is not finite or lacks full rank in any model has no frame.
    """

    def __init__(self, stack: Tensor, weights: Tensor) -> None:
        height, d_in = stack.shape[2:]
        usable = stack.isfinite().flatten(1).all(1) & (d_in >= height)
        stack = torch.where(usable[:, None, None, None], stack, 0.0)
        U, S, Vh = torch.linalg.svd(stack, full_matrices=False)
        self.framed = has_full_rank(S).all(-1)
        U, S, self._Vh = U[self.framed], S[self.framed], Vh[self.framed]
        overlaps = (U[:, 1:] * U[:, :1]).sum(-2) + (self._Vh[:, 1:] * self._Vh[:, :1]).sum(-1)
        sign = torch.where(overlaps < 0, -1.0, 1.0).to(U)
        self._Vh[:, 1:] *= sign.unsqueeze(-1)
        Q = U[:, :1].mT @ (U[:, 1:] * sign.unsqueeze(-2))
        super().__init__(U[:, 0], S, rotations.orthonormalize(Q), weights)

    def merged(self, branch: Branch) -> Tensor:
        """W_merge of the slices that have a frame."""
        factors = FACTORS[branch]
        left = self.U0 + self.U0 @ self.turn if "q" in factors else self.U0
        S = self.S[:, 0] * (1 + self.shift) if "s" in factors else self.S[:, 0]
        return left * S.unsqueeze(-2) @ (self.polar if "v" in factors else self._Vh[:, 0])

    @cached_property
    def polar(self) -> Tensor:
        """polar(sum w_i V_i^T)."""
        A, _, B = torch.linalg.svd(self.mean(self._Vh[:, 1:]), full_matrices=False)
        return A @ B


def has_digits(least: Tensor, most: Tensor, condition: float = GRAM_CONDITION) -> Tensor:
    """Whether eigenvalues (squared singular values) with these extremes stay below a condition number."""
    return least * condition**2 > most


def has_full_rank(S: Tensor) -> Tensor:
    """Whether the smallest of the singular values, in descending order, exceeds rounding errors."""
    return S[..., -1] > RANK_TOLERANCE * S[..., 0]


def _is_determined(squares: Tensor, Q: Tensor) -> Tensor:
    """Whether products in float32 determine Q_i: its entries are small beside the diagonal, or gaps wide."""
    turn = (Q.abs() - torch.eye(Q.shape[-1]).to(Q)).abs().amax((-2, -1))
    gaps = squares.diff(dim=-1).abs()
    wide = (gaps > ROUNDED_GAP * squares[..., :1]).all(-1)
    return (turn < ROUNDED_TURN) | wide


def _where(some: Tensor, values: Tensor, other: Tensor | float) -> Tensor:
    """The values of some slices, and another in place of those of the rest."""
    return values if some.all() else torch.where(some.view(-1, *[1] * (values.ndim - 1)), values, other)
