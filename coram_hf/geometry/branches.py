"""Every branch of some slices from one Gram matrix, without rebuilding any of them.

With tau_i = W_i - W_0 the rows X = [W_0; tau_1; ...; tau_N] of a slice hold base and updates apart, so
that M = X X^T keeps the digits of updates however small they are. The update of a branch is a small matrix
times X, delta_b = L_b X, and all norms and inner products are traces: <delta_a, delta_b> = tr(L_a M L_b^T).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.config import Branch
from coram_hf.geometry import rotations
from coram_hf.geometry.kernel import FACTORS, GRAM_CONDITION, RANK_TOLERANCE, SPECTRUM_FLOOR, pair_signs

BRANCHES = tuple(FACTORS)


class Layout(NamedTuple):
    """How slices are stacked: W_0 and N updates, then perhaps eta and the sum of the whole updates.

    eta, task: by block, the coefficients of what a conflict mask adds back, and of delta_TA = sum tau_i.
    """

    n_models: int
    eta: Tensor
    task: Tensor

    @classmethod
    def of(cls, n_experts: int, masked: bool, like: Tensor) -> Layout:
        """Masked updates no longer add up to delta_TA, so it gets a block of its own, and eta one, too."""
        eta = [0.0] * (1 + n_experts) + [1.0, 0.0] * masked
        task = [0.0] + [float(not masked)] * n_experts + [0.0, 1.0] * masked
        return cls(1 + n_experts, like.new_tensor(eta), like.new_tensor(task))


class Dissected(NamedTuple):
    """Some slices: by branch |delta|^2 and <delta, delta_TA>, by rotation its error and angle, by slice S_0.

    error: |exp(log Q) - Q| / |Q|; angle: the largest of the rotation; condition: sigma_max / sigma_min of
    S_0, infinite where the base has no full rank. Slices without a frame have no rotations.
    """

    squares: Tensor
    dots: Tensor
    errors: Tensor
    angles: Tensor
    conditions: Tensor
    frameless: int


def dissect_slices(stack: Tensor, gram: Tensor, weights: Tensor, layout: Layout) -> Dissected:
    """All branches of every slice of `stack` (slices, blocks, height, d_in), whose Gram matrix is given."""
    found, trusted = _by_gram(gram.unflatten(2, (stack.shape[1], -1)), weights, layout)
    if trusted.all():
        return found
    rest = _by_svd(stack[~trusted], weights, layout)
    conditions = torch.empty(len(stack), dtype=stack.dtype, device=stack.device)
    conditions[trusted], conditions[~trusted] = found.conditions, rest.conditions
    return Dissected(
        found.squares + rest.squares,
        found.dots + rest.dots,
        torch.cat([found.errors, rest.errors]),
        torch.cat([found.angles, rest.angles]),
        conditions,
        rest.frameless,
    )


def condition_numbers(slices: Tensor) -> Tensor:
    """sigma_max / sigma_min of every slice (slices, height, d_in); infinite without full rank."""
    _, height, d_in = slices.shape
    infinite = slices.new_full((len(slices),), torch.inf)
    if d_in < height:
        return infinite
    squares = torch.linalg.eigvalsh(slices @ slices.mT)
    good = squares[:, 0] * GRAM_CONDITION[slices.dtype] ** 2 > squares[:, -1]
    conditions = torch.where(good, (squares[:, -1] / squares[:, 0].clamp_min(0)).sqrt(), infinite)
    if not good.all():
        S = torch.linalg.svdvals(slices[~good])
        framed = S[:, -1] > RANK_TOLERANCE[slices.dtype] * S[:, 0]
        conditions[~good] = torch.where(framed, S[:, 0] / S[:, -1], infinite[~good])
    return conditions


def _by_gram(gram: Tensor, weights: Tensor, layout: Layout) -> tuple[Dissected, Tensor]:
    """The slices whose Gram matrix (slices, rows, blocks, height) has digits enough, and which they are."""
    n_models, height = layout.n_models, gram.shape[3]
    blocks = gram.unflatten(1, (gram.shape[2], height))
    models = blocks[:, :n_models, :, :n_models].clone()
    models[:, 1:] += models[:, :1]
    models[:, :, :, 1:] += models[:, :, :, :1]

    limit = GRAM_CONDITION[gram.dtype] ** 2
    squares, U = (t.flip(-1) for t in torch.linalg.eigh(models.diagonal(0, 1, 3).movedim(-1, 1)))
    trusted = (squares[..., -1] * limit > squares[..., 0]).all(-1)
    models, U, S = models[trusted], U[trusted], squares[trusted].sqrt()
    overlap = ((U[:, 1:].mT @ models[:, 1:, :, 0]) * U[:, :1].mT).sum(-1) / (S[:, 1:] * S[:, :1])
    U[:, 1:] *= pair_signs(U[:, :1], U[:, 1:], overlap).unsqueeze(-2)
    to_right = U.mT / S.unsqueeze(-1)
    P = (weights[:, None, None] * to_right[:, 1:]).transpose(1, 2).flatten(2)
    c, E = torch.linalg.eigh(P @ models[:, 1:, :, 1:].flatten(3).flatten(1, 2) @ P.mT)
    good = c[:, 0] * limit > c[:, -1]
    trusted[trusted.clone()] = good
    U, S, to_right, P, c, E = (t[good] for t in (U, S, to_right, P, c, E))

    merged = _merge_left(U, S, weights)
    right = ((E / c.sqrt().unsqueeze(-2)) @ E.mT @ P).unflatten(-1, (n_models - 1, height))
    eye = torch.eye(height, dtype=gram.dtype, device=gram.device)
    L = (layout.eta[:, None] * eye[:, None]).expand(len(U), len(BRANCHES), *(-1,) * 3).clone()
    for b, branch in enumerate(BRANCHES):
        left = merged.left[branch]
        if "v" in FACTORS[branch]:
            updates = torch.einsum("bij,bjnk->bink", left, right)
            L[:, b, :, 1:n_models] += updates
            L[:, b, :, 0] += updates.sum(2) - eye
        else:
            L[:, b, :, 0] += left @ to_right[:, 0] - eye
    rows = L.flatten(3).flatten(1, 2)
    product = (rows @ gram[trusted].flatten(2)).view_as(L)
    dots = torch.einsum("bahnh,n->a", product, layout.task)
    squares = (product * L).sum((0, 2, 3, 4))
    return Dissected(squares, dots, merged.errors, merged.angles, S[:, 0, 0] / S[:, 0, -1], 0), trusted


def _by_svd(stack: Tensor, weights: Tensor, layout: Layout) -> Dissected:
    """The same for slices that must be factored; those without a frame take the weighted mean."""
    n_models, height, d_in = layout.n_models, stack.shape[2], stack.shape[3]
    base, updates = stack[:, 0], stack[:, 1:n_models]
    eta = torch.einsum("n,bnhd->bhd", layout.eta, stack)
    task = torch.einsum("n,bnhd->bhd", layout.task, stack)
    mean = torch.einsum("n,bnhd->bhd", weights, updates) + eta
    conditions = condition_numbers(base)
    framed = torch.zeros(len(stack), dtype=torch.bool, device=stack.device)
    if d_in >= height:
        U, S, Vh = torch.linalg.svd(
            torch.cat([base[:, None], base[:, None] + updates], 1), full_matrices=False
        )
        framed = (S[..., -1] > RANK_TOLERANCE[stack.dtype] * S[..., 0]).all(-1)
    squares = (mean[~framed] ** 2).sum().expand(len(BRANCHES)).clone()
    dots = (mean[~framed] * task[~framed]).sum().expand(len(BRANCHES)).clone()
    frameless = int((~framed).sum())
    nothing = stack.new_empty(0)
    if not framed.any():
        return Dissected(squares, dots, nothing, nothing, conditions, frameless)

    U, S, Vh, base, eta, task = (t[framed] for t in (U, S, Vh, base, eta, task))
    sign = pair_signs(U[:, :1], U[:, 1:], (Vh[:, 1:] * Vh[:, :1]).sum(-1))
    U[:, 1:] *= sign.unsqueeze(-2)
    Vh[:, 1:] *= sign.unsqueeze(-1)
    merged = _merge_left(U, S, weights)
    A, _, B = torch.linalg.svd(torch.einsum("n,bnhd->bhd", weights, Vh[:, 1:]), full_matrices=False)
    for b, branch in enumerate(BRANCHES):
        right = A @ B if "v" in FACTORS[branch] else Vh[:, 0]
        delta = merged.left[branch] @ right - base + eta
        squares[b] += (delta**2).sum()
        dots[b] += (delta * task).sum()
    return Dissected(squares, dots, merged.errors, merged.angles, conditions, frameless)


class _Left(NamedTuple):
    """U_0 Qbar S_0 (I + dSbar) by branch, and the error and angle of every rotation."""

    left: dict[Branch, Tensor]
    errors: Tensor
    angles: Tensor


def _merge_left(U: Tensor, S: Tensor, weights: Tensor) -> _Left:
    Q, _ = rotations.to_special(rotations.orthonormalize(U[:, :1].mT @ U[:, 1:]))
    K, _ = rotations.log(Q)
    norms = torch.linalg.matrix_norm(torch.stack([rotations.exp(K) - Q, Q]))
    angles = torch.linalg.eigvalsh(K.mT @ K)[..., -1].clamp_min(0).sqrt()
    turned = U[:, 0] @ rotations.exp(torch.einsum("n,bnij->bij", weights, K))
    shift = S[:, 1:] / S[:, :1].clamp_min(SPECTRUM_FLOOR) - 1
    shifted = S[:, 0] * (1 + torch.einsum("n,bnk->bk", weights, shift))
    left = {
        branch: (turned if "q" in factors else U[:, 0])
        * (shifted if "s" in factors else S[:, 0]).unsqueeze(-2)
        for branch, factors in FACTORS.items()
    }
    return _Left(left, (norms[0] / norms[1]).flatten(), angles.flatten())
