"""The slice merge of one branch: factor, average each factor in its own space, rebuild.

Slices are rarely factored themselves. With X = [W_0; W_1; ...; W_N] of a slice, one Gram
matrix M = X X^T contains all that the method needs, and the merged update is a small matrix times X.
Forming M squares the condition number, so ill-conditioned slices use a true SVD instead.

The large products are X X^T and L X. On one core, numpy's BLAS multiplies matrices of so few rows in about
two thirds of torch's time; on several cores, or another device, torch processes slices in parallel.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coram_hf.config import Branch
from coram_hf.geometry.frame import FACTORS, Frame, GramFrame, SvdFrame


@dataclass
class SliceStats:
    """What happened to the slices of a merge, and the squared norm of the update.

    det_flips and near_pi count rotations, one per expert and slice; the others count slices.
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
        """L and `trusted` of `count` slices from `start` on; the stats remain those of all."""
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
    frame = GramFrame(gram, n_models, weights)
    L, trusted = frame.update(branch)
    stats = _frame_stats(frame, branch, trusted)
    stats.slices = len(gram)
    return SliceMerge(L.flatten(2), trusted, stats)


def _svd_update(stack: Tensor, weights: Tensor, branch: Branch) -> tuple[Tensor, SliceStats]:
    """W_merge - W_0 by true SVDs; slices without a frame get the weighted mean of the updates.

    A slice that is not finite has no frame either, and its update is not finite.
    """
    update = torch.einsum("n,bnhd->bhd", weights, stack[:, 1:] - stack[:, :1])
    frame = SvdFrame(stack, weights)
    update[frame.framed] = frame.merged(branch) - stack[frame.framed, 0]
    stats = _frame_stats(frame, branch, slice(None))
    stats.svd_fallbacks = int(frame.framed.sum())
    stats.frameless = len(stack) - stats.svd_fallbacks
    return update, stats


def _frame_stats(frame: Frame, branch: Branch, some: Tensor | slice) -> SliceStats:
    """The rotations and the worst condition number of some slices of a frame."""
    S = frame.S[some, 0]
    stats = SliceStats(worst_condition=float((S[:, 0] / S[:, -1]).max()) if len(S) else 0.0)
    if "q" in FACTORS[branch]:
        stats.det_flips = int(frame.turns.reflected[some].sum())
        stats.near_pi = int(frame.turns.near_pi[some].sum())
    return stats


def gram_of(rows: Tensor) -> Tensor:
    """X X^T of every slice; it is symmetric, so part of it is copied instead of computed."""
    if _one_core(rows):
        X = rows.numpy()
        with np.errstate(over="ignore", invalid="ignore"):
            return torch.from_numpy(np.matmul(X, X.transpose(0, 2, 1)))
    half = rows.shape[1] // 2
    upper = torch.bmm(rows[:, :half], rows.mT)
    lower = torch.bmm(rows[:, half:], rows[:, half:].mT)
    return torch.cat([upper, torch.cat([upper[:, :, half:].mT, lower], dim=2)], dim=1)


def combine(coefficients: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """L X of every slice, written to `out`."""
    if _one_core(rows):
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(coefficients.numpy(), rows.numpy(), out=out.numpy())
        return out
    return torch.bmm(coefficients, rows, out=out)


def _one_core(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype == torch.float64 and torch.get_num_threads() == 1
