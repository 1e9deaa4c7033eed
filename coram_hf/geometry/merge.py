"""CORAM on one matrix, chunk by chunk: load, balance, split conflicts, merge the slices, store."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from coram_hf.config import CoramConfig
from coram_hf.geometry.conflict import split_conflicts_
from coram_hf.geometry.kernel import SliceStats, merge_slices
from coram_hf.geometry.slices import chunks, load, new_buffer, row_blocks, store
from coram_hf.geometry.spread import spread_order


def merge_matrix(base: Tensor, experts: Sequence[Tensor], config: CoramConfig | None = None) -> Tensor:
    """W_merge of one matrix (d_out x d_in), before amplification; float64 for float64 input, else float32."""
    config = config or CoramConfig()
    if config.balance is not None:
        raise ValueError(
            "balance needs the update norms of the whole model; use CoramMerger, "
            "or scale the experts yourself and pass balance=None"
        )
    merged, _ = merge_update(base, experts, config)
    for rows in row_blocks(base):
        merged[rows] += base[rows]
    return merged


def merge_update(
    base: Tensor,
    experts: Sequence[Tensor],
    config: CoramConfig,
    *,
    factors: Sequence[float] | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, SliceStats]:
    """W_merge - W_0 of one matrix, and what happened to its slices.

    `factors` shrinks or grows every expert first, W_i <- W_0 + f_i (W_i - W_0). The update goes
    to `out` if given, else to a new tensor, float64 for float64 input and float32 otherwise.
    """
    _check(base, experts)
    (d_out, d_in), height, compute = base.shape, config.slice_height, config.torch_compute_dtype
    factors = [1.0] * len(experts) if factors is None else factors
    weights = torch.tensor(config.expert_weights(len(experts)), dtype=compute, device=base.device)
    update = base.new_empty(base.shape, dtype=update_dtype(base)) if out is None else out

    order = None
    if config.spread is not None:
        order = spread_order(base, experts, config.spread, height, factors, compute)
    matrices = [base, *experts]
    slice_numel = len(matrices) * height * d_in
    buffer = new_buffer(d_out, height, slice_numel, base.new_empty(0, dtype=compute))
    stats = SliceStats()
    for chunk in chunks(d_out, height, slice_numel * buffer.element_size()):
        stack = load(matrices, chunk, order, buffer)
        for i, factor in enumerate(factors, start=1):
            if factor != 1:
                torch.lerp(stack[:, 0], stack[:, i], factor, out=stack[:, i])
        eta = split_conflicts_(stack, weights, config.conflict) if config.conflict else None
        merged, chunk_stats = merge_slices(stack, weights, config.branch)
        if eta is not None:
            merged += eta
        store(merged, chunk, order, update)
        chunk_stats.squared_norm = float(torch.linalg.vector_norm(merged)) ** 2
        stats += chunk_stats
    return update, stats


def update_dtype(base: Tensor) -> torch.dtype:
    """The dtype that holds an update of `base` without losing it: float64 for float64, else float32."""
    return torch.float64 if base.dtype == torch.float64 else torch.float32


def _check(base: Tensor, experts: Sequence[Tensor]) -> None:
    if base.ndim != 2 or not base.is_floating_point():
        raise ValueError(f"base must be a floating 2-D tensor, found {base.dtype} {tuple(base.shape)}")
    if not experts:
        raise ValueError("no experts: at least one is needed")
    for i, expert in enumerate(experts):
        if expert.shape != base.shape or not expert.is_floating_point():
            raise ValueError(
                f"expert {i} must be a floating tensor of shape {tuple(base.shape)} like the base, "
                f"found {expert.dtype} {tuple(expert.shape)}"
            )
