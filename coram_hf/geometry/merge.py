"""CORAM on one matrix, a few rows at a time: load them, merge their slices, yield the update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.config import CoramConfig
from coram_hf.errors import CoramError
from coram_hf.geometry.conflict import split_conflicts_
from coram_hf.geometry.cores import one_core
from coram_hf.geometry.decorrelated import decorrelate_experts
from coram_hf.geometry.kernel import SliceStats, gram_of, gram_squares, merge_slices, slice_merge
from coram_hf.geometry.slices import (
    BLOCK_BYTES,
    Chunk,
    Rows,
    as_rows,
    chunks,
    largest,
    parts,
    row_blocks,
    scratch,
)
from coram_hf.geometry.spread import order_of

GRAM_SQUARES = 1e-6
"""|W_i - W_0|^2 / |W_0|^2 above which the Gram matrix gives the norm of an update to 1e-9 or better."""

GRAM_BYTES = 4 * 2**20
"""Size of the Gram matrices processed at once, if slices are loaded twice."""


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
    otherwise. Experts with negative weights are merged as their mirror images.
    """
    factors = config.weighing(len(experts)).signed(factors or (1.0,) * len(experts))
    if config.decorrelate is not None:
        experts, factors = decorrelate_experts(base, experts, config, factors, device).experts, None
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
    """W_merge - W_0 of one matrix, a few rows at a time, in tens of megabytes regardless of its size.

    `factors` rescales every expert's update first, W_i <- W_0 + f_i (W_i - W_0). Rows are merged on
    `device`, by default where the base is. `measure` adds the norms of the experts' own updates. Experts are
    merged as they are: decorrelation, which needs all rows at once, comes before.
    """
    factors = [1.0] * len(experts) if factors is None else factors
    source = SliceRows(base, experts, config, factors, base.device if device is None else device)
    n_models, weights = 1 + len(experts), source.weights
    by_difference = measure and not source.as_stored
    for group in source.groups:
        grams = []
        for part in group:
            loaded = source.load(part, measure=by_difference and len(group) == 1)
            grams.append(gram_of(loaded.stack.flatten(1, 2)))
        merge = slice_merge(torch.cat(grams), n_models, weights, config.branch)
        stats, done = merge.stats, 0
        for part, gram in zip(group, grams, strict=True):
            if len(group) > 1:
                loaded = source.load(part, measure=by_difference)
            stack, eta, squares = loaded
            own = merge.part(done, len(stack))
            update, svd_stats = merge_slices(stack, own, weights, config.branch, source.room(part))
            if measure and squares is None:
                squares = gram_squares(gram, n_models)
                if (squares[1:] < GRAM_SQUARES * squares[0]).any():
                    squares = update_squares(stack)
            if eta is not None:
                update += eta
            stats += svd_stats
            stats.squared_norm = float(torch.linalg.vector_norm(update)) ** 2
            yield MergedRows(source.of(part), update.flatten(0, 1), stats, squares)
            stats, done = SliceStats(), done + len(stack)


class Loaded(NamedTuple):
    """Slices ready to merge, the mean of what was removed from them, and their squares if measured."""

    stack: Tensor
    eta: Tensor | None
    squares: Tensor | None


class SliceRows(Rows):
    """Base and experts of one matrix, in groups of parts.

    The slices of a group are merged together, and loaded part by part. If they only need loading, parts fit
    in a cache, and are loaded once for their Gram matrices and once more for the result; otherwise a group
    is one part, which is kept.
    """

    def __init__(
        self,
        base: Tensor,
        experts: Sequence[Tensor],
        config: CoramConfig,
        factors: Sequence[float],
        device: torch.device,
    ) -> None:
        order = order_of(base, experts, config, factors)
        super().__init__([base, *experts], config, factors, device, order)
        self._factors = factors
        self._conflict = config.conflict
        height, compute = config.slice_height, config.torch_compute_dtype
        changed = config.conflict is not None or self._balanced
        self.as_stored = not changed and compute == torch.float64
        if not changed and device.type == "cpu":
            gram_bytes = (len(self._matrices) * height) ** 2 * compute.itemsize
            together = chunks(self._d_out, height, gram_bytes, GRAM_BYTES)
            self.groups = [list(parts(chunk, self._slice_bytes, BLOCK_BYTES)) for chunk in together]
        else:
            self.groups = [[chunk] for chunk in chunks(self._d_out, height, self._slice_bytes)]
        every = [part for group in self.groups for part in group]
        self._reserve(every)
        self._result = scratch("update", largest(every) * self._d_in, compute, device)

    def load(self, part: Chunk, *, measure: bool = False) -> Loaded:
        """A part as the configuration merges it; the next call overwrites it.

        `measure` requests |W_0|^2 and |W_i - W_0|^2 of the stored weights.
        """
        stack = self._load(part)
        squares = update_squares(stack) if measure else None
        for i, factor in enumerate(self._factors, start=1):
            if factor != 1:
                torch.lerp(stack[:, 0], stack[:, i], factor, out=stack[:, i])
        eta = split_conflicts_(stack, self.weights, self._conflict) if self._conflict else None
        return Loaded(stack, eta, squares)

    def room(self, part: Chunk) -> Tensor:
        """Memory for the update of a part, as (slices, height, d_in), reused for the next part."""
        n_slices = (part.stop - part.start) // part.height
        shape = (n_slices, part.height, self._d_in)
        return self._result[: n_slices * part.height * self._d_in].view(shape)

    def of(self, part: Chunk) -> slice | Tensor:
        """The rows of the matrix that a part contains."""
        rows = slice(part.start, part.stop)
        return rows if self._order is None else self._order[rows]


def update_squares(stack: Tensor) -> Tensor:
    """|W_0|^2 and |W_i - W_0|^2 over some slices, from the differences themselves."""
    base, *experts = stack.unbind(1)
    difference = torch.empty_like(base)
    norms = [torch.linalg.vector_norm(base)]
    norms += [torch.linalg.vector_norm(torch.sub(expert, base, out=difference)) for expert in experts]
    return torch.stack(norms).square()


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
