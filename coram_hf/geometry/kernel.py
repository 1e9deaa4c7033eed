"""The slice merge: factor, average each factor in its own space, rebuild.

A slice itself is hardly ever factored. With X = [W_0; W_1; ...; W_N] of a slice, one Gram
matrix M = X X^T holds all that the method needs, and the merged update is a small matrix times X.
Forming M squares the condition number, so badly conditioned slices take a true SVD instead.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.config import Branch
from coram_hf.geometry import rotations
from coram_hf.geometry.products import combine

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


@dataclass
class SliceStats:
    """What happened to the slices of a merge, and the squared norm of the update.

    det_flips and near_pi count rotations, one an expert and slice; the others count slices.
    worst_condition: the largest condition number of a slice of the base that has a frame.
    """

    squared_norm: float = 0.0
    slices: int = 0
    det_flips: int = 0
    near_pi: int = 0
    svd_fallbacks: int = 0
    frameless: int = 0
    worst_condition: float = 0.0

    def counts(self) -> dict[str, int]:
        """The counts alone, by name."""
        measures = ("squared_norm", "worst_condition")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in measures}

    def __iadd__(self, other: SliceStats) -> SliceStats:
        worst = max(self.worst_condition, other.worst_condition)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.worst_condition = worst
        return self


class SliceMerge(NamedTuple):
    """L with W_merge - W_0 = L X of some slices, which of them it can be trusted for, and what happened."""

    coefficients: Tensor
    trusted: Tensor
    stats: SliceStats

    def part(self, start: int, count: int) -> SliceMerge:
        """The same for some of the slices."""
        some = slice(start, start + count)
        return SliceMerge(self.coefficients[some], self.trusted[some], self.stats)


def merge_slices(
    stack: Tensor, merge: SliceMerge, weights: Tensor, branch: Branch, out: Tensor
) -> tuple[Tensor, SliceStats]:
    """W_merge - W_0 of every slice of `stack` (slices, 1 + N, height, d_in), base first, written to `out`.

    Also returns what happened to the slices that L cannot be trusted for.
    """
    update = combine(merge.coefficients, stack.flatten(1, 2), out)
    if merge.trusted.all():
        return update, SliceStats()
    update[~merge.trusted], stats = _svd_update(stack[~merge.trusted], weights, branch)
    return update, stats


def gram_squares(gram: Tensor, n_models: int) -> Tensor:
    """|W_0|^2 and |W_i - W_0|^2 = tr M_ii + tr M_00 - 2 tr M_0i, good to the rounding of |W_i|^2."""
    blocks = gram.unflatten(2, (n_models, -1)).unflatten(1, (n_models, -1))
    own = blocks.diagonal(0, 1, 3).diagonal(0, 1, 2).sum((0, 2))
    with_base = blocks[:, 0].diagonal(0, 1, 3).sum((0, 2))
    return torch.cat([own[:1], own[1:] + own[0] - 2 * with_base[1:]])


def slice_merge(gram: Tensor, n_models: int, weights: Tensor, branch: Branch) -> SliceMerge:
    """L with W_merge - W_0 = L X from M = X X^T."""
    n_slices, height = gram.shape[0], gram.shape[1] // n_models
    eye = torch.eye(height, dtype=gram.dtype, device=gram.device)
    blocks = gram.view(n_slices, n_models, height, n_models, height)
    limit = GRAM_CONDITION[gram.dtype]

    own = blocks.diagonal(0, 1, 3).movedim(-1, 1)
    trusted = gram.diagonal(0, 1, 2).sum(-1).isfinite()
    if not trusted.all():
        own = torch.where(trusted[:, None, None, None], own, eye)
    squares, U = (t.flip(-1) for t in torch.linalg.eigh(own))
    trusted &= (squares[..., -1] * limit**2 > squares[..., 0]).all(-1)
    if not trusted.all():
        U = torch.where(trusted[:, None, None, None], U, eye)
        squares = torch.where(trusted[:, None, None], squares, 1.0)
        blocks = torch.where(trusted[:, None, None, None, None], blocks, 0.0)
    S = squares.sqrt()

    U0, Ui = U[:, :1], U[:, 1:]
    v_overlap = ((Ui.mT @ blocks[:, 1:, :, 0]) * U0.mT).sum(-1) / (S[:, 1:] * S[:, :1])
    U[:, 1:] *= pair_signs(U0, Ui, v_overlap).unsqueeze(-2)
    left, reflected, near_pi = _merged_left(U, S, weights, branch)

    coefficients = gram.new_zeros(n_slices, height, n_models, height)
    to_right = U.mT / S.unsqueeze(-1)
    if "v" in FACTORS[branch]:
        P = (weights[:, None, None] * to_right[:, 1:]).transpose(1, 2).flatten(2)
        experts = blocks[:, 1:, :, 1:].flatten(3).flatten(1, 2)
        c, E = torch.linalg.eigh(P @ experts @ P.mT)
        trusted &= c[:, 0] * limit**2 > c[:, -1]
        c = torch.where(trusted[:, None], c, 1.0)
        polar = (E / c.sqrt().unsqueeze(-2)) @ E.mT @ P
        coefficients[:, :, 1:] = (left @ polar).unflatten(-1, (n_models - 1, height))
    else:
        coefficients[:, :, 0] = left @ to_right[:, 0]
    coefficients[:, :, 0] -= eye
    stats = SliceStats(
        slices=n_slices,
        det_flips=int(reflected[trusted].sum()),
        near_pi=int(near_pi[trusted].sum()),
        worst_condition=_worst_condition(S[trusted, 0]),
    )
    return SliceMerge(coefficients.flatten(2), trusted, stats)


def _svd_update(stack: Tensor, weights: Tensor, branch: Branch) -> tuple[Tensor, SliceStats]:
    """The same update by true SVDs; slices without a frame take the weighted mean of the updates.

    A slice that is not finite has no frame either, and its update is not finite.
    """
    tau = stack[:, 1:] - stack[:, :1]
    update = torch.einsum("n,bnhd->bhd", weights, tau)
    n_slices, _, height, d_in = stack.shape
    if d_in < height:
        return update, SliceStats(frameless=n_slices)
    finite = stack.isfinite().flatten(1).all(1)
    U, S, Vh = torch.linalg.svd(torch.where(finite[:, None, None, None], stack, 0.0), full_matrices=False)
    framed = (S[..., -1] > RANK_TOLERANCE[stack.dtype] * S[..., 0]).all(-1)
    stats = SliceStats(frameless=int((~framed).sum()), svd_fallbacks=int(framed.sum()))
    if not framed.any():
        return update, stats

    U, S, Vh = U[framed], S[framed], Vh[framed]
    sign = pair_signs(U[:, :1], U[:, 1:], (Vh[:, 1:] * Vh[:, :1]).sum(-1))
    U[:, 1:] *= sign.unsqueeze(-2)
    Vh[:, 1:] *= sign.unsqueeze(-1)
    left, reflected, near_pi = _merged_left(U, S, weights, branch)
    stats.det_flips, stats.near_pi = int(reflected.sum()), int(near_pi.sum())
    stats.worst_condition = _worst_condition(S[:, 0])
    right = Vh[:, 0]
    if "v" in FACTORS[branch]:
        mean = torch.einsum("n,bnhd->bhd", weights, Vh[:, 1:])
        A, _, B = torch.linalg.svd(mean, full_matrices=False)
        right = A @ B
    update[framed] = left @ right - stack[framed, 0]
    return update, stats


def _worst_condition(S: Tensor) -> float:
    """The largest ratio of the first to the last singular value; 0 for no slices."""
    return float((S[:, 0] / S[:, -1]).max()) if len(S) else 0.0


def pair_signs(U0: Tensor, Ui: Tensor, v_overlap: Tensor) -> Tensor:
    """-1 where the pair (u_ik, v_ik) points away from the base's: <u_ik, u_0k> + <v_ik, v_0k> < 0."""
    return torch.where((U0 * Ui).sum(-2) + v_overlap < 0, -1.0, 1.0).to(U0.dtype)


def _merged_left(U: Tensor, S: Tensor, weights: Tensor, branch: Branch) -> tuple[Tensor, Tensor, Tensor]:
    """U_0 Qbar S_0 (I + dSbar), with the factors that the branch leaves out at the base's values.

    Also returns which Q_i were reflections, and which took the near-pi logarithm.
    """
    left, spectrum = U[:, 0], S[:, 0]
    reflected = near_pi = torch.zeros(S.shape[0], S.shape[1] - 1, dtype=torch.bool, device=S.device)
    if "q" in FACTORS[branch]:
        Q, reflected = rotations.to_special(rotations.orthonormalize(U[:, :1].mT @ U[:, 1:]))
        K, near_pi = rotations.log(Q)
        left = left @ rotations.exp(torch.einsum("n,bnij->bij", weights, K))
    if "s" in FACTORS[branch]:
        shift = S[:, 1:] / S[:, :1].clamp_min(SPECTRUM_FLOOR) - 1
        spectrum = spectrum * (1 + torch.einsum("n,bnk->bk", weights, shift))
    return left * spectrum.unsqueeze(-2), reflected, near_pi
