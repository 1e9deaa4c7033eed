"""The slice merge of one branch: factor, average each factor in its own space, rebuild.

Slices are rarely factored themselves. All that the method needs of W_0 and tau_i is in their products M_00,
M_0i and M_ii, from which small matrices follow: P_i, then with Z = sum P_i tau_i the merged update,
A Z + L_0 W_0. The products may be computed in float32; all that follows from them is in float64. Slices
whose products do not determine their frame take products in float64 and, if that is not enough, a true SVD.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.config import Branch
from coram_hf.geometry.frame import FACTORS, Frame, GramFrame, SvdFrame
from coram_hf.geometry.products import BASE, EXPERTS, combine, combine_updates, products_of
from coram_hf.geometry.slices import as_float64


@dataclass
class SliceStats:
    """What happened to the slices of a merge, and the squared norm of the update.

    det_flips and near_pi count rotations, one per expert and slice; the others count slices.
    float32: slices merged from products in float32; float64_fallbacks: those that needed them in float64.
    worst_condition: the largest condition number of a slice of the base that has a frame.
    sampled, deviation: of some slices that were also merged in float64, the squared norm of the update, and
    of its difference to the one in float32.
    """

    squared_norm: float = 0.0
    slices: int = 0
    det_flips: int = 0
    near_pi: int = 0
    float32: int = 0
    float64_fallbacks: int = 0
    svd_fallbacks: int = 0
    frameless: int = 0
    worst_condition: float = 0.0
    sampled: float = 0.0
    deviation: float = 0.0

    def counts(self) -> dict[str, int]:
        """The counts alone, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in MEASURES}

    @property
    def float32_difference(self) -> float | None:
        """|update in float32 - update in float64| / |update| of the sampled slices."""
        return math.sqrt(self.deviation / self.sampled) if self.sampled else None

    def __iadd__(self, other: SliceStats) -> SliceStats:
        worst = max(self.worst_condition, other.worst_condition)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.worst_condition = worst
        return self


SUMS = ("squared_norm", "sampled", "deviation")
MEASURES = (*SUMS, "worst_condition")
"""The fields of SliceStats that are not counts, and those of them that are summed."""


class Merged(NamedTuple):
    """W_merge - W_0 of some slices, what happened to them, and |W_0|^2 and |tau_i|^2 over all of them."""

    update: Tensor
    stats: SliceStats
    squares: Tensor


AGAIN_BYTES = 4 * 2**20
"""Bytes of the slices that are merged again at a time, in float64 or by SVD, beside the chunk."""


def merge_slices(stack: Tensor, weights: Tensor, branch: Branch, out: Tensor) -> Merged:
    """Merge every slice of `stack`, laid out as in `products`, and write the updates to `out`."""
    products = products_of(stack)
    frame = GramFrame(products, weights)
    ZZ = combine_updates(frame.P, stack) if "v" in FACTORS[branch] else None
    L, trusted = frame.update(branch, ZZ)
    update = combine(L, stack, out)
    stats = _frame_stats(frame, branch, trusted)
    stats.slices = len(stack)
    stats.float32 = int(trusted.sum()) if products.rounded else 0
    if not trusted.all():
        again = _in_float64 if products.rounded else _svd_update
        count = max(1, AGAIN_BYTES // (8 * stack[0].numel()))
        for few in (~trusted).nonzero()[:, 0].to(stack.device).split(count):
            update[few], more = again(stack[few], weights, branch)
            stats += more
    return Merged(update, stats, products.squares())


def _in_float64(stack: Tensor, weights: Tensor, branch: Branch) -> tuple[Tensor, SliceStats]:
    """W_merge - W_0 of slices whose products in float32 are not enough."""
    wide = as_float64(stack)
    update, stats, _ = merge_slices(wide, weights, branch, torch.empty_like(wide[:, 0]))
    stats.slices, stats.float64_fallbacks = 0, stats.slices
    return update.to(stack), stats


def _svd_update(stack: Tensor, weights: Tensor, branch: Branch) -> tuple[Tensor, SliceStats]:
    """W_merge - W_0 by true SVDs; slices without a frame get the weighted mean of the updates.

    A slice that is not finite has no frame either, and its update is not finite.
    """
    update = torch.einsum("n,bnhd->bhd", weights, stack[:, EXPERTS:])
    models = stack[:, BASE:].clone()
    models[:, 1:] += models[:, :1]
    frame = SvdFrame(models, weights)
    update[frame.framed] = frame.merged(branch) - stack[frame.framed, BASE]
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
