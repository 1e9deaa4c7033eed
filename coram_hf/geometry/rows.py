"""The rows of one matrix in all models, cut into slices and loaded: as models to merge, or as updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.config import CoramConfig
from coram_hf.geometry.conflict import split_conflicts_
from coram_hf.geometry.scratch import scratch
from coram_hf.geometry.slices import BLOCK_BYTES, Chunk, buffer_for, chunks, largest, load, parts
from coram_hf.geometry.spread import spread_order

GRAM_BYTES = 4 * 2**20
"""Size of the Gram matrices processed at once, if slices are loaded twice."""


class Loaded(NamedTuple):
    """Slices ready to merge, the mean of what was removed from them, and their squares if measured."""

    stack: Tensor
    eta: Tensor | None
    squares: Tensor | None


class _Rows:
    """Matrices of one shape, base first: the order of their rows, and the memory to load slices in."""

    def __init__(
        self,
        matrices: Sequence[Tensor],
        config: CoramConfig,
        factors: Sequence[float],
        device: torch.device,
    ) -> None:
        n_experts, compute, height = len(factors), config.torch_compute_dtype, config.slice_height
        self.weights = torch.tensor(config.expert_weights(n_experts), dtype=compute, device=device)
        self._matrices = matrices
        self._d_out, self._d_in = matrices[0].shape
        self._row_numel = len(matrices) * self._d_in
        self._slice_bytes = height * self._row_numel * compute.itemsize
        self._balanced = any(factor != 1 for factor in factors)
        self._order: Tensor | None = None
        if config.spread is not None:
            base, *experts = matrices[: 1 + n_experts]
            self._order = spread_order(base, experts, config.spread, height, factors, compute)

    def _reserve(self, work: Iterable[Chunk]) -> None:
        self._buffer = buffer_for(work, self._row_numel, self.weights.dtype, self.weights.device)

    def _load(self, chunk: Chunk) -> Tensor:
        return load(self._matrices, chunk, self._order, self._buffer)


class SliceRows(_Rows):
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
        super().__init__([base, *experts], config, factors, device)
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


class UpdateRows(_Rows):
    """W_0 and the balanced updates f_i (W_i - W_0) of one matrix, in chunks, with all their digits.

    spare: the number of extra blocks of memory after the updates of every slice.
    """

    def __init__(
        self,
        base: Tensor,
        experts: Sequence[Tensor],
        config: CoramConfig,
        factors: Sequence[float],
        device: torch.device,
        spare: int,
    ) -> None:
        super().__init__([base, *experts, *[base] * spare], config, factors, device)
        self.scale = torch.tensor(factors, dtype=self.weights.dtype, device=device)
        self.chunks = list(chunks(self._d_out, config.slice_height, self._slice_bytes))
        self._reserve(self.chunks)

    def load(self, chunk: Chunk) -> Tensor:
        """W_0, updates and spare blocks as (slices, blocks, height, d_in); the next call overwrites them."""
        stack = self._load(chunk)
        updates = stack[:, 1 : 1 + len(self.scale)]
        updates -= stack[:, :1]
        if self._balanced:
            updates *= self.scale[:, None, None]
        return stack


def update_squares(stack: Tensor) -> Tensor:
    """|W_0|^2 and |W_i - W_0|^2 over some slices, from the differences themselves."""
    base, *experts = stack.unbind(1)
    difference = torch.empty_like(base)
    norms = [torch.linalg.vector_norm(base)]
    norms += [torch.linalg.vector_norm(torch.sub(expert, base, out=difference)) for expert in experts]
    return torch.stack(norms).square()
