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

GRAM_CONDITION = {torch.float64: 1e3, torch.float32: 30.0}
"""Condition number above which the Gram matrix has lost too many digits."""

RANK_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""A slice with sigma_min <= tolerance * sigma_max has no frame."""


class Turns(NamedTuple):
    """Q_i in SO(h) and K_i = log Q_i, which Q_i were reflections, and which took the near-pi logarithm."""

    Q: Tensor
    K: Tensor
    reflected: Tensor
    near_pi: Tensor


class Polar(NamedTuple):
    """(P M P^T)^(-1/2) P of some slices, and which of them it can be trusted for."""

    coefficients: Tensor
    trusted: Tensor


class Frame:
    """U_i and S_i of some slices, base first, and the merged left factor; subclasses add the right one.

    U: (slices, models, height, height); S: (slices, models, height), in descending order.
    """

    def __init__(self, U: Tensor, S: Tensor, weights: Tensor) -> None:
        self.U, self.S, self.weights = U, S, weights

    def left(self, branch: Branch) -> Tensor:
        """U_0 Qbar S_0 (I + dSbar), with the factors that the branch leaves out at the base's values."""
        U = self.turned if "q" in FACTORS[branch] else self.U[:, 0]
        S = self.shifted if "s" in FACTORS[branch] else self.S[:, 0]
        return U * S.unsqueeze(-2)

    @cached_property
    def turns(self) -> Turns:
        """Rotations of the experts' frames and their logarithms."""
        Q, reflected = rotations.to_special(rotations.orthonormalize(self.U[:, :1].mT @ self.U[:, 1:]))
        K, near_pi = rotations.log(Q)
        return Turns(Q, K, reflected, near_pi)

    @cached_property
    def turned(self) -> Tensor:
        """U_0 Qbar with Qbar = exp(sum w_i log Q_i)."""
        return self.U[:, 0] @ rotations.exp(torch.einsum("n,bnij->bij", self.weights, self.turns.K))

    @cached_property
    def shifted(self) -> Tensor:
        """S_0 (I + dSbar) with dSbar = sum w_i dS_i."""
        shift = self.S[:, 1:] / self.S[:, :1].clamp_min(SPECTRUM_FLOOR) - 1
        return self.S[:, 0] * (1 + torch.einsum("n,bnk->bk", self.weights, shift))


class GramFrame(Frame):
    """Frames from M = X X^T with X = [W_0; W_1; ...; W_N], so that W_merge is a small matrix times X.

    trusted: slices whose own Gram matrices W_i W_i^T have enough digits; the others hold neutral values.
    """

    def __init__(self, gram: Tensor, n_models: int, weights: Tensor) -> None:
        n_slices, height = gram.shape[0], gram.shape[1] // n_models
        self._eye = torch.eye(height, dtype=gram.dtype, device=gram.device)
        blocks = gram.view(n_slices, n_models, height, n_models, height)

        own = blocks.diagonal(0, 1, 3).movedim(-1, 1)
        trusted = gram.diagonal(0, 1, 2).sum(-1).isfinite()
        if not trusted.all():
            own = torch.where(trusted[:, None, None, None], own, self._eye)
        squares, U = (t.flip(-1) for t in torch.linalg.eigh(own))
        trusted &= has_digits(squares[..., -1], squares[..., 0]).all(-1)
        if not trusted.all():
            U = torch.where(trusted[:, None, None, None], U, self._eye)
            squares = torch.where(trusted[:, None, None], squares, 1.0)
            blocks = torch.where(trusted[:, None, None, None, None], blocks, 0.0)
        S = squares.sqrt()
        v_overlap = ((U[:, 1:].mT @ blocks[:, 1:, :, 0]) * U[:, :1].mT).sum(-1) / (S[:, 1:] * S[:, :1])
        U[:, 1:] *= pair_signs(U, v_overlap).unsqueeze(-2)
        super().__init__(U, S, weights)
        self.trusted = trusted
        self._blocks = blocks

    def update(self, branch: Branch) -> tuple[Tensor, Tensor]:
        """L with W_merge - W_0 = L X, as (slices, height, models, height), and the slices it is valid for."""
        n_slices, n_models, height = self.S.shape
        left, trusted = self.left(branch), self.trusted
        L = left.new_zeros(n_slices, height, n_models, height)
        if "v" in FACTORS[branch]:
            polar, trusted = self.polar
            L[:, :, 1:] = (left @ polar).unflatten(-1, (n_models - 1, height))
        else:
            L[:, :, 0] = left @ self._to_right[:, 0]
        L[:, :, 0] -= self._eye
        return L, trusted

    @cached_property
    def polar(self) -> Polar:
        """polar(sum w_i V_i^T) = (P M P^T)^(-1/2) P X over the experts of X, P = [w_1 S_1^-1 U_1^T, ...]."""
        P = (self.weights[:, None, None] * self._to_right[:, 1:]).transpose(1, 2).flatten(2)
        experts = self._blocks[:, 1:, :, 1:].flatten(3).flatten(1, 2)
        c, E = torch.linalg.eigh(P @ experts @ P.mT)
        trusted = self.trusted & has_digits(c[:, 0], c[:, -1])
        c = torch.where(trusted[:, None], c, 1.0)
        return Polar((E / c.sqrt().unsqueeze(-2)) @ E.mT @ P, trusted)

    @cached_property
    def _to_right(self) -> Tensor:
        """S_i^-1 U_i^T, which times W_i is V_i^T."""
        return self.U.mT / self.S.unsqueeze(-1)


class SvdFrame(Frame):
    """Frames by true SVDs of the slices (slices, models, height, d_in) that have one.

    framed: which slices these are; a slice that is not finite or lacks full rank in any model has no frame.
    """

    def __init__(self, stack: Tensor, weights: Tensor) -> None:
        height, d_in = stack.shape[2:]
        usable = stack.isfinite().flatten(1).all(1) & (d_in >= height)
        stack = torch.where(usable[:, None, None, None], stack, 0.0)
        U, S, Vh = torch.linalg.svd(stack, full_matrices=False)
        self.framed = has_full_rank(S).all(-1)
        U, S, self._Vh = U[self.framed], S[self.framed], Vh[self.framed]
        sign = pair_signs(U, (self._Vh[:, 1:] * self._Vh[:, :1]).sum(-1))
        U[:, 1:] *= sign.unsqueeze(-2)
        self._Vh[:, 1:] *= sign.unsqueeze(-1)
        super().__init__(U, S, weights)

    def merged(self, branch: Branch) -> Tensor:
        """W_merge of the slices that have a frame."""
        return self.left(branch) @ (self.polar if "v" in FACTORS[branch] else self._Vh[:, 0])

    @cached_property
    def polar(self) -> Tensor:
        """polar(sum w_i V_i^T)."""
        mean = torch.einsum("n,bnhd->bhd", self.weights, self._Vh[:, 1:])
        A, _, B = torch.linalg.svd(mean, full_matrices=False)
        return A @ B


def pair_signs(U: Tensor, v_overlap: Tensor) -> Tensor:
    """-1 where the pair (u_ik, v_ik) points away from the base's: <u_ik, u_0k> + <v_ik, v_0k> < 0."""
    return torch.where((U[:, :1] * U[:, 1:]).sum(-2) + v_overlap < 0, -1.0, 1.0).to(U.dtype)


def has_digits(least: Tensor, most: Tensor) -> Tensor:
    """Whether a Gram matrix with these extreme eigenvalues (squared singular values) can be trusted."""
    return least * GRAM_CONDITION[least.dtype] ** 2 > most


def has_full_rank(S: Tensor) -> Tensor:
    """Whether the smallest of the singular values, in descending order, exceeds rounding errors."""
    return S[..., -1] > RANK_TOLERANCE[S.dtype] * S[..., 0]
