"""Spread slicing: deal the rows that the experts change most evenly over the slices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coram_hf.config import CoramConfig, Spread
from coram_hf.geometry.slices import buffer_for, chunks, load, with_float64


def order_of(
    base: Tensor, experts: Sequence[Tensor], config: CoramConfig, factors: Sequence[float]
) -> Tensor | None:
    """The row permutation of a configuration; None if rows stay as they are stored."""
    if config.spread is None:
        return None
    return spread_order(base, experts, config.spread, config.slice_height, factors)


def spread_order(
    base: Tensor,
    experts: Sequence[Tensor],
    mode: Spread,
    height: int,
    factors: Sequence[float],
) -> Tensor:
    """The row permutation whose consecutive runs of h rows are the spread slices."""
    scores = row_scores(base, experts) * torch.tensor(factors, dtype=torch.float64).abs()[:, None]
    return deal_rows(scores, mode, height).to(base.device)


def deal_rows(scores: Tensor, mode: Spread, height: int) -> Tensor:
    """The row permutation of the spread slices from the scores (experts, rows) of every row."""
    priority = row_priority(scores, mode)
    ranked = priority.sort(descending=True, stable=True).indices
    n_slices = scores.shape[1] // height
    dealt, left_over = ranked[: n_slices * height], ranked[n_slices * height :]
    if mode == "owner" and n_slices:
        dealt = _balance_owners(dealt, priority, scores.argmax(0), n_slices, height)
    else:
        dealt = dealt.view(height, n_slices).T.reshape(-1)
    return torch.cat([dealt, left_over])


def row_scores(base: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """s_i(r) = |dW_i[r]| / |W_0[r]| as (experts, rows); a row that is zero in the base scores 0.

    In float64 whatever the precision of the merge, since rounding errors could change the order of rows.
    """
    matrices = [base, *experts]
    dtype = torch.float64 if with_float64(base.device) == base.device else torch.float32
    d_out, d_in = base.shape
    work = list(chunks(d_out, 1, 4 * len(matrices) * d_in * dtype.itemsize))
    buffer = buffer_for(work, len(matrices) * d_in, dtype, base.device)
    norms = torch.empty(len(matrices), d_out, dtype=torch.float64)
    for chunk in work:
        stack = load(matrices, chunk, None, buffer)
        stack[:, 1:] -= stack[:, :1]
        norms[:, chunk.start : chunk.stop] = torch.linalg.vector_norm(stack, dim=-1)[..., 0].T
    return relative_scores(norms)


def relative_scores(norms: Tensor) -> Tensor:
    """Row norms of the updates over those of the base, from (1 + experts, rows), base first."""
    size = norms[0]
    return torch.where(size > 0, norms[1:] / torch.where(size > 0, size, 1.0), 0.0)


def row_priority(scores: Tensor, mode: Spread) -> Tensor:
    """The paper's priorities, from the scores (experts, rows) of every row."""
    largest = scores.amax(0)
    if mode == "mean":
        return scores.mean(0)
    if mode == "energy":
        return largest
    if mode == "variance":
        return scores.var(0, correction=0) * largest
    second = scores.topk(2, dim=0).values[1] if len(scores) > 1 else torch.zeros_like(largest)
    return (largest - second) * largest


def _balance_owners(ranked: Tensor, priority: Tensor, owners: Tensor, n_slices: int, height: int) -> Tensor:
    """Assign each row to the open slice of least load; ties: fewest rows of its owner, then the index."""
    weight_of = np.zeros(n_slices)
    filled = np.zeros(n_slices, dtype=np.int64)
    owned = np.zeros((int(owners.max()) + 1, n_slices), dtype=np.int64)
    order = np.empty((n_slices, height), dtype=np.int64)
    for row, weight, owner in zip(
        ranked.tolist(), priority[ranked].tolist(), owners[ranked].tolist(), strict=True
    ):
        lightest = np.flatnonzero(weight_of == weight_of.min())
        g = lightest[owned[owner, lightest].argmin()]
        order[g, filled[g]] = row
        filled[g] += 1
        owned[owner, g] += 1
        weight_of[g] = weight_of[g] + weight if filled[g] < height else np.inf
    return torch.from_numpy(order.reshape(-1))
