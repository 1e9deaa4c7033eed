"""CORAM on one matrix, a few rows at a time: load them, merge their slices, yield the update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.config import Branch, CoramConfig
from coram_hf.errors import CoramError
from coram_hf.geometry.conflict import split_conflicts_
from coram_hf.geometry.cores import one_core
from coram_hf.geometry.decorrelated import decorrelate_experts
from coram_hf.geometry.kernel import SliceStats, merge_slices
from coram_hf.geometry.products import BASE, EXPERTS, block_squares
from coram_hf.geometry.slices import (
    Chunk,
    Rows,
    as_float64,
    as_rows,
    chunks,
    compute_dtype,
    gather,
    largest,
    row_blocks,
    scratch,
)
from coram_hf.geometry.spread import order_of
from coram_hf.geometry.staging import Staging, is_far

FAR_BYTES = 128 * 2**20
"""Size of the working buffer on an accelerator, for which small chunks would be too little work."""


class MergedRows(NamedTuple):
    """Some rows of a merged matrix, their update, and |W_0|^2 and |W_i - W_0|^2 if requested.

    The update is in memory that the thread's next rows overwrite, of this merge or another.
    """

    rows: slice | Tensor
    update: Tensor
    stats: SliceStats
    squares: Tensor | None


def merge_matrix(base: Tensor, experts: Sequence[Tensor], config: CoramConfig | None = None) -> Tensor:
    """W_merge of one matrix (d_out x d_in) before amplification; float64 for float64 input, else float32."""
    config = config or CoramConfig()
    if config.factors is not None:
        raise CoramError(
            "factors belong to whole models; scale the experts yourself and pass factors=None, or use "
            "CoramMerger"
        )
    if config.balance is not None:
        raise CoramError(
            "balance needs the update norms of the whole model; use CoramMerger, "
            "or scale the experts yourself and pass balance=None"
        )
    check_tensors(base, experts)
    if base.ndim != 2:
        raise CoramError(f"base must be a 2-D matrix, found shape {tuple(base.shape)}")
    base = base.detach()
    with one_core():
        exact = update_dtype(base)
        merged, _ = merge_update(base, [expert.detach() for expert in experts], config, result=exact)
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
    result: torch.dtype | None = None,
) -> tuple[Tensor, SliceStats]:
    """W_merge - W_0 of one matrix, and what happened to its slices.

    The update goes to `out` if given, else to a new tensor, float64 for float64 input and float32
    otherwise. Experts with negative weights are merged as their mirror images.
    """
    factors = config.weighing(len(experts)).signed(factors or (1.0,) * len(experts))
    if config.decorrelate is not None:
        experts, factors = decorrelate_experts(base, experts, config, factors, device).experts, None
    update = base.new_empty(base.shape, dtype=update_dtype(base)) if out is None else out
    stats = SliceStats()
    for merged in merge_rows(base, experts, config, factors=factors, device=device, result=result):
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
    exact: bool = False,
    result: torch.dtype | None = None,
) -> Iterator[MergedRows]:
    """W_merge - W_0 of one matrix, a few rows at a time, in tens of megabytes regardless of its size.

    `factors` rescales every expert's update first, W_i <- W_0 + f_i (W_i - W_0). Rows are merged on
    `device`, by default where the base is. `measure` adds the norms of the experts' own updates, which are
    as exact as the products are, 1e-7 in float32, unless `exact` requests more. `result` is the dtype in
    which the merged weights will be stored, if not the base's. Experts are merged as they are: decorrelation,
    which needs all rows at once, comes before.
    """
    factors = [1.0] * len(experts) if factors is None else factors
    matrices = [base, *experts]
    device = base.device if device is None else device
    dtypes = [result or base.dtype, *(matrix.dtype for matrix in matrices)]
    compute = compute_dtype(config, dtypes, device)
    source = SliceRows(matrices, config, factors, device, compute)
    for part in source.parts:
        stack, eta, squares = source.load(part, measure=measure, exact=exact)
        update, stats, found = merge_slices(stack, source.weights, config.branch, source.room(part))
        if part.start == 0 and compute != torch.float64:
            _sample(stack, update, source.weights, config.branch, stats)
        if measure and squares is None:
            squares = source.stored_squares(found, stack)
        if eta is not None:
            update += eta
        stats.squared_norm = float(torch.linalg.vector_norm(update)) ** 2
        yield MergedRows(source.of(part), update.flatten(0, 1), stats, squares)


def _sample(stack: Tensor, update: Tensor, weights: Tensor, branch: Branch, stats: SliceStats) -> None:
    """Merge the first and the last of some slices also in float64, and note how much that differs."""
    some = [0, len(stack) - 1] if len(stack) > 1 else [0]
    wide = as_float64(stack[some])
    exact = merge_slices(wide, weights.to(wide), branch, torch.empty_like(wide[:, 0])).update
    stats.sampled = float(torch.linalg.vector_norm(exact)) ** 2
    stats.deviation = float(torch.linalg.vector_norm(exact - update[some].to(exact))) ** 2


class Loaded(NamedTuple):
    """Slices ready to merge, the mean of what was removed from them, and their squares if measured."""

    stack: Tensor
    eta: Tensor | None
    squares: Tensor | None


class SliceRows(Rows):
    """Base and updates of one matrix, in parts."""

    def __init__(
        self,
        matrices: Sequence[Tensor],
        config: CoramConfig,
        factors: Sequence[float],
        device: torch.device,
        compute: torch.dtype,
    ) -> None:
        order = order_of(matrices[0], matrices[1:], config, factors)
        room_for_z = [matrices[0], *matrices]
        super().__init__(room_for_z, config, factors, device, order, compute)
        self._factors = factors
        self._conflict = config.conflict
        budget = FAR_BYTES if is_far(device) else None
        self.parts = list(chunks(self._d_out, config.slice_height, self._slice_bytes, budget))
        near = all(matrix.device == device for matrix in matrices)
        far = is_far(device) and not near
        self._staging = Staging(matrices, self.parts, order, device) if far else None
        self._reserve(self.parts)
        self._result = scratch("update", largest(self.parts) * self._d_in, compute, device)

    def load(self, part: Chunk, *, measure: bool = False, exact: bool = False) -> Loaded:
        """A part as the configuration merges it, laid out as in `products`; the next call overwrites it.

        `measure` requests |W_0|^2 and |W_i - W_0|^2 of the stored weights, if products will not tell them, or
        not exactly.
        """
        stack = self._stack(part)
        updates = stack[:, EXPERTS:]
        rounded = exact and stack.dtype != torch.float64
        told = self._conflict is None and all(self._factors) and not rounded
        squares = block_squares(stack) if measure and not told else None
        for tau, factor in zip(updates.unbind(1), self._factors, strict=True):
            if factor != 1:
                tau *= factor
        eta = split_conflicts_(updates, self.weights, self._conflict) if self._conflict else None
        return Loaded(stack, eta, squares)

    def _stack(self, part: Chunk) -> Tensor:
        """Room for Z, W_0, and W_i - W_0, subtracted in the wider of the two dtypes."""
        n_slices = (part.stop - part.start) // part.height
        shape = (n_slices, len(self._matrices), part.height, self._d_in)
        stack = self._buffer[: math.prod(shape)].view(shape)
        models = (rows.unflatten(0, (n_slices, part.height)) for rows in self._rows(part))
        base = next(models)
        stack[:, BASE].copy_(base)
        for room, expert in zip(stack[:, EXPERTS:].unbind(1), models, strict=True):
            if expert.dtype.itemsize > stack.dtype.itemsize:
                room.copy_(expert - base)
            else:
                room.copy_(expert).sub_(stack[:, BASE])
        return stack

    def _rows(self, part: Chunk) -> Iterator[Tensor]:
        """The rows of a part of W_0 and every W_i."""
        if self._staging is not None:
            yield from self._staging.rows(part)
        else:
            yield from (gather(matrix, part, self._order) for matrix in self._matrices[1:])

    def stored_squares(self, squares: Tensor, stack: Tensor) -> Tensor:
        """|W_0|^2 and |W_i - W_0|^2 from those of base and rescaled updates, unless they overflowed."""
        if not squares.isfinite().all():
            squares = block_squares(stack)
        return squares / squares.new_tensor([1.0, *self._factors]).square()

    def room(self, part: Chunk) -> Tensor:
        """Memory for the update of a part, as (slices, height, d_in), reused for the next part."""
        n_slices = (part.stop - part.start) // part.height
        shape = (n_slices, part.height, self._d_in)
        return self._result[: n_slices * part.height * self._d_in].view(shape)

    def of(self, part: Chunk) -> slice | Tensor:
        """The rows of the matrix that a part contains."""
        rows = slice(part.start, part.stop)
        return rows if self._order is None else self._order[rows]


def update_dtype(base: Tensor) -> torch.dtype:
    """The dtype that holds an update of `base` without losing it: float64 for float64, else float32."""
    return torch.float64 if base.dtype == torch.float64 else torch.float32


def check_tensors(base: Tensor, experts: Sequence[Tensor]) -> None:
    """Raise unless there is an expert, and all tensors are floating-point, finite and of one shape."""
    if not experts:
        raise CoramError("no experts: pass at least one")
    for who, tensor in (("base", base), *((f"expert {i}", expert) for i, expert in enumerate(experts))):
        if not tensor.is_floating_point():
            raise CoramError(f"{who} must be a floating-point tensor, found {tensor.dtype}")
        if tensor.shape != base.shape:
            raise CoramError(
                f"{who} must have the base's shape {tuple(base.shape)}, found {tuple(tensor.shape)}"
            )
        values = as_rows(tensor)
        if not all(values[rows].isfinite().all() for rows in row_blocks(values)):
            raise CoramError(f"{who} contains NaN or infinite values")
