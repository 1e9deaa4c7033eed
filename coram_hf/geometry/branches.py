"""Every branch of a batch of slices from one Gram matrix per slice, without rebuilding the slices.

With tau_i = W_i - W_0 the rows X = [W_0; tau_1; ...; tau_N] of a slice keep base and updates apart, so
that M = X X^T keeps the digits of even the smallest updates. The update of a branch is a small matrix
times X, delta_b = L_b X, and all norms and inner products are traces: <delta_a, delta_b> = tr(L_a M L_b^T).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.geometry import rotations
from coram_hf.geometry.frame import FACTORS, GramFrame, SvdFrame, Turns, has_digits, has_full_rank
from coram_hf.geometry.products import Products

BRANCHES = tuple(FACTORS)
TINY = 1e-8
"""The sigma_min below which the paper's audit counts slices."""


class Layout(NamedTuple):
    """How slices are stacked: W_0 and N updates, then perhaps eta and the sum of the whole updates.

    eta, task: per block, the coefficients of what a conflict mask adds back, and of delta_TA = sum tau_i.
    """

    n_models: int
    eta: Tensor
    task: Tensor

    @classmethod
    def of(cls, n_experts: int, masked: bool, like: Tensor) -> Layout:
        """The layout for N experts; masked updates do not sum to delta_TA, so it and eta get extra blocks."""
        eta = [0.0] * (1 + n_experts) + [1.0, 0.0] * masked
        task = [0.0] + [float(not masked)] * n_experts + [0.0, 1.0] * masked
        return cls(1 + n_experts, like.new_tensor(eta), like.new_tensor(task))


class Dissected(NamedTuple):
    """|delta|^2 and <delta, delta_TA> per branch, error and angle per rotation, condition per slice.

    error: |exp(log Q) - Q| / |Q|; angle: the largest of the rotation; condition: sigma_max / sigma_min of
    S_0, infinite if the base lacks full rank. Slices without a frame have no rotations. tiny: how many slices
    have a sigma_min of S_0 below `TINY`.
    """

    squares: Tensor
    dots: Tensor
    errors: Tensor
    angles: Tensor
    conditions: Tensor
    frameless: int
    tiny: int


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
        found.tiny + rest.tiny,
    )


def condition_numbers(slices: Tensor) -> Tensor:
    """sigma_max / sigma_min of every slice (slices, height, d_in); infinite without full rank."""
    _, height, d_in = slices.shape
    infinite = slices.new_full((len(slices),), torch.inf)
    if d_in < height:
        return infinite
    squares = torch.linalg.eigvalsh(slices @ slices.mT)
    good = has_digits(squares[:, 0], squares[:, -1])
    conditions = torch.where(good, (squares[:, -1] / squares[:, 0].clamp_min(0)).sqrt(), infinite)
    if not good.all():
        S = torch.linalg.svdvals(slices[~good])
        conditions[~good] = torch.where(has_full_rank(S), S[:, 0] / S[:, -1], infinite[~good])
    return conditions


def _by_gram(gram: Tensor, weights: Tensor, layout: Layout) -> tuple[Dissected, Tensor]:
    """The slices whose Gram matrix (slices, rows, blocks, height) has enough digits, and which they are."""
    n_models, height = layout.n_models, gram.shape[3]
    frame, trusted = _frame_of(gram, weights, n_models)
    if not trusted.all():
        frame, _ = _frame_of(gram[trusted], weights, n_models)

    eye = torch.eye(height, dtype=gram.dtype, device=gram.device)
    L = (layout.eta[:, None] * eye[:, None]).expand(len(frame.S), len(BRANCHES), *(-1,) * 3).clone()
    for b, branch in enumerate(BRANCHES):
        update = frame.update(branch, _combined(gram[trusted], frame.P)).L
        L[:, b, :, 0] += update[..., -height:]
        if "v" in FACTORS[branch]:
            L[:, b, :, 1:n_models] += (update[..., :height] @ frame.P).unflatten(-1, (-1, height))
    rows = L.flatten(3).flatten(1, 2)
    product = (rows @ gram[trusted].flatten(2)).view_as(L)
    dots = torch.einsum("bahnh,n->a", product, layout.task)
    squares = (product * L).sum((0, 2, 3, 4))
    errors, angles = _turn_sizes(frame.turns)
    conditions = frame.S[:, 0, 0] / frame.S[:, 0, -1]
    tiny = int((frame.S[:, 0, -1] < TINY).sum())
    return Dissected(squares, dots, errors, angles, conditions, 0, tiny), trusted


def _frame_of(gram: Tensor, weights: Tensor, n_models: int) -> tuple[GramFrame, Tensor]:
    """The frame of slices from their Gram matrices, and which of them it can be trusted for in any branch."""
    blocks = gram.unflatten(1, (gram.shape[2], -1))[:, :n_models, :, :n_models]
    cross, own = blocks[:, 0, :, 1:].transpose(1, 2), blocks.diagonal(0, 1, 3).movedim(-1, 1)[:, 1:]
    frame = GramFrame(Products(blocks[:, 0, :, 0], cross, own), weights)
    return frame, frame.update("full", _combined(gram, frame.P)).trusted


def _combined(gram: Tensor, P: Tensor) -> Tensor:
    """Z Z^T = P M P^T with the M of the updates alone."""
    height = gram.shape[3]
    updates = gram.flatten(2)[:, height : height + P.shape[2], height : height + P.shape[2]]
    return P @ updates @ P.mT


def _by_svd(stack: Tensor, weights: Tensor, layout: Layout) -> Dissected:
    """The slices that must be factored; those without a frame get the weighted mean."""
    base, updates = stack[:, 0], stack[:, 1 : layout.n_models]
    eta = torch.einsum("n,bnhd->bhd", layout.eta, stack)
    task = torch.einsum("n,bnhd->bhd", layout.task, stack)
    mean = torch.einsum("n,bnhd->bhd", weights, updates) + eta
    frame = SvdFrame(torch.cat([base[:, None], base[:, None] + updates], 1), weights)
    framed, frameless = frame.framed, ~frame.framed
    squares = (mean[frameless] ** 2).sum().expand(len(BRANCHES)).clone()
    dots = (mean[frameless] * task[frameless]).sum().expand(len(BRANCHES)).clone()
    for b, branch in enumerate(BRANCHES):
        delta = frame.merged(branch) - base[framed] + eta[framed]
        squares[b] += (delta**2).sum()
        dots[b] += (delta * task[framed]).sum()
    errors, angles = _turn_sizes(frame.turns)
    tiny = int((torch.linalg.svdvals(base)[:, -1] < TINY).sum())
    return Dissected(squares, dots, errors, angles, condition_numbers(base), int(frameless.sum()), tiny)


def _turn_sizes(turns: Turns) -> tuple[Tensor, Tensor]:
    """|exp(K) - Q| / |Q| of every rotation with its logarithm, and its largest angle, |K|_2."""
    Q, K = turns.Q, turns.K
    norms = torch.linalg.matrix_norm(torch.stack([rotations.exp(K) - Q, Q]))
    angles = torch.linalg.eigvalsh(K.mT @ K)[..., -1].clamp_min(0).sqrt()
    return (norms[0] / norms[1]).flatten(), angles.flatten()
