"""CORAM on one matrix, chunk by chunk: load, balance, split conflicts, merge the slices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.config import CoramConfig
from coram_hf.geometry.conflict import split_conflicts_
from coram_hf.geometry.kernel import SliceStats, gram_squares, merge_slices, slice_merge
from coram_hf.geometry.products import gram_of
from coram_hf.geometry.scratch import scratch
from coram_hf.geometry.slices import BLOCK_BYTES, Chunk, chunks, largest, load, parts, row_blocks
from coram_hf.geometry.spread import spread_order

GRAM_SQUARES = 1e-6
"""|W_i - W_0|^2 / |W_0|^2 above which the Gram matrix gives the norm of an update to 1e-9 or better."""


GRAM_BYTES = 6 * 2**20
"""Size of the Gram matrices that are worked on at once, where slices are loaded twice."""


class MergedRows(NamedTuple):
    """Some rows of a merged matrix: which, their update, and |W_0|^2 and |W_i - W_0|^2 if asked for.

    The update lies in memory that the next rows overwrite, of this merge or another in the same thread.
    """

    rows: slice | Tensor
    update: Tensor
    stats: SliceStats
    squares: Tensor | None


class _Prepared(NamedTuple):
    """Slices ready to be merged, what was taken out of them, and |W_0|^2 and |W_i - W_0|^2 if measured."""

    stack: Tensor
    eta: Tensor | None
    squares: Tensor | None


def merge_matrix(base: Tensor, experts: Sequence[Tensor], config: CoramConfig | None = None) -> Tensor:
    """W_merge of one matrix (d_out x d_in) before amplification; float64 for float64 input, else float32."""
    config = config or CoramConfig()
    if config.balance is not None:
        raise ValueError(
            "balance needs the update norms of the whole model; use CoramMerger, "
            "or scale the experts yourself and pass balance=None"
        )
    check_tensors(base, experts)
    if base.ndim != 2:
        raise ValueError(f"base must be a 2-D matrix, found shape {tuple(base.shape)}")
    base = base.detach()
    merged, _ = merge_update(base, [expert.detach() for expert in experts], config)
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
    device: torch.device | None = None,
) -> tuple[Tensor, SliceStats]:
    """W_merge - W_0 of one matrix, and what happened to its slices.

    The update goes to `out` if given, else to a new tensor, float64 for float64 input and float32
    otherwise.
    """
    update = base.new_empty(base.shape, dtype=update_dtype(base)) if out is None else out
    stats = SliceStats()
    for merged in merge_rows(base, experts, config, factors=factors, device=device):
        if isinstance(merged.rows, slice):
            update[merged.rows] = merged.update.to(update)
        else:
            update.index_copy_(0, merged.rows, merged.update.to(update))
        stats += merged.stats
    return update, stats


def merge_rows(
    base: Tensor,
    experts: Sequence[Tensor],
    config: CoramConfig,
    *,
    factors: Sequence[float] | None = None,
    device: torch.device | None = None,
    measure: bool = False,
) -> Iterator[MergedRows]:
    """W_merge - W_0 of one matrix, chunk by chunk, in some tens of megabytes whatever its size.

    `factors` shrinks or grows every expert first, W_i <- W_0 + f_i (W_i - W_0). Chunks are merged on
    `device`, by default where the base is. `measure` adds the norms of the experts' own updates.
    """
    (d_out, d_in), height, compute = base.shape, config.slice_height, config.torch_compute_dtype
    device = base.device if device is None else device
    factors = [1.0] * len(experts) if factors is None else factors
    weights = torch.tensor(config.expert_weights(len(experts)), dtype=compute, device=device)
    order = None
    if config.spread is not None:
        order = spread_order(base, experts, config.spread, height, factors, compute)
    matrices = [base, *experts]
    row_numel = len(matrices) * d_in
    slice_bytes = height * row_numel * compute.itemsize
    changed = config.conflict is not None or any(factor != 1 for factor in factors)
    by_gram = not changed and compute == torch.float64
    if not changed and device.type == "cpu":
        gram_bytes = (len(matrices) * height) ** 2 * compute.itemsize
        work = [
            list(parts(chunk, slice_bytes, BLOCK_BYTES))
            for chunk in chunks(d_out, height, gram_bytes, GRAM_BYTES)
        ]
    else:
        work = [[chunk] for chunk in chunks(d_out, height, slice_bytes)]
    most_rows = largest(part for group in work for part in group)
    buffer = scratch("slices", most_rows * row_numel, compute, device)
    result = scratch("update", most_rows * d_in, compute, device)

    def prepare(part: Chunk) -> _Prepared:
        stack = load(matrices, part, order, buffer)
        squares = update_squares(stack) if measure and not by_gram else None
        for i, factor in enumerate(factors, start=1):
            if factor != 1:
                torch.lerp(stack[:, 0], stack[:, i], factor, out=stack[:, i])
        eta = split_conflicts_(stack, weights, config.conflict) if config.conflict else None
        return _Prepared(stack, eta, squares)

    for group in work:
        grams = []
        for part in group:
            prepared = prepare(part)
            grams.append(gram_of(prepared.stack.flatten(1, 2)))
        merge = slice_merge(torch.cat(grams), len(matrices), weights, config.branch)
        stats, done = merge.stats, 0
        for part, gram in zip(group, grams, strict=True):
            stack, eta, squares = prepare(part) if len(group) > 1 else prepared
            out = result[: len(stack) * part.height * d_in].view(len(stack), part.height, d_in)
            update, svd_stats = merge_slices(stack, merge.part(done, len(stack)), weights, config.branch, out)
            if measure and squares is None:
                squares = gram_squares(gram, len(matrices))
                if (squares[1:] < GRAM_SQUARES * squares[0]).any():
                    squares = update_squares(stack)
            if eta is not None:
                update += eta
            stats += svd_stats
            stats.squared_norm = float(torch.linalg.vector_norm(update)) ** 2
            rows = slice(part.start, part.stop)
            yield MergedRows(rows if order is None else order[rows], update.flatten(0, 1), stats, squares)
            stats, done = SliceStats(), done + len(stack)


def update_squares(stack: Tensor) -> Tensor:
    """|W_0|^2 and |W_i - W_0|^2 over the slices of a chunk, from the differences themselves."""
    base, *experts = stack.unbind(1)
    scratch = torch.empty_like(base)
    norms = [torch.linalg.vector_norm(base)]
    norms += [torch.linalg.vector_norm(torch.sub(expert, base, out=scratch)) for expert in experts]
    return torch.stack(norms).square()


def update_dtype(base: Tensor) -> torch.dtype:
    """The dtype that holds an update of `base` without losing it: float64 for float64, else float32."""
    return torch.float64 if base.dtype == torch.float64 else torch.float32


def check_tensors(base: Tensor, experts: Sequence[Tensor]) -> None:
    """One base and at least one expert, floating, finite, and of one shape."""
    if not experts:
        raise ValueError("no experts: at least one is needed")
    for who, tensor in (("base", base), *((f"expert {i}", expert) for i, expert in enumerate(experts))):
        if not tensor.is_floating_point():
            raise ValueError(f"{who} must be a floating tensor, found {tensor.dtype}")
        if tensor.shape != base.shape:
            raise ValueError(
                f"{who} must have the base's shape {tuple(base.shape)}, found {tuple(tensor.shape)}"
            )
        if not all(tensor.reshape(tensor.shape or 1)[rows].isfinite().all() for rows in row_blocks(tensor)):
            raise ValueError(f"{who} holds NaN or infinite values")
