"""The rows of one matrix in all models: cut into slices, loaded part by part, balanced, split by conflict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.config import CoramConfig
from coram_hf.geometry.conflict import split_conflicts_
from coram_hf.geometry.scratch import scratch
from coram_hf.geometry.slices import BLOCK_BYTES, Chunk, chunks, largest, load, parts
from coram_hf.geometry.spread import spread_order

GRAM_BYTES = 4 * 2**20
"""Size of the Gram matrices that are worked on at once, where slices are loaded twice."""


class Loaded(NamedTuple):
    """Slices ready to be merged, the mean of what was taken out of them, and their squares if measured."""

    stack: Tensor
    eta: Tensor | None
    squares: Tensor | None


class SliceRows:
    """Base and experts of one matrix, in groups of parts.

    The slices of a group are merged together, and loaded part by part. Where loading them is all there is to
    do, parts are small enough for a cache, and loaded once for their Gram matrices and once more for the
    result; otherwise a group is one part, which is kept.
    """

    def __init__(
        self,
        base: Tensor,
        experts: Sequence[Tensor],
        config: CoramConfig,
        factors: Sequence[float],
        device: torch.device,
    ) -> None:
        self._matrices = [base, *experts]
        self._factors = factors
        self._conflict = config.conflict
        self._order: Tensor | None = None
        (d_out, self._d_in), height, compute = base.shape, config.slice_height, config.torch_compute_dtype
        self.weights = torch.tensor(config.expert_weights(len(experts)), dtype=compute, device=device)
        if config.spread is not None:
            self._order = spread_order(base, experts, config.spread, height, factors, compute)
        changed = config.conflict is not None or any(factor != 1 for factor in factors)
        self.as_stored = not changed and compute == torch.float64
        row_numel = len(self._matrices) * self._d_in
        slice_bytes = height * row_numel * compute.itemsize
        if not changed and device.type == "cpu":
            gram_bytes = (len(self._matrices) * height) ** 2 * compute.itemsize
            together = chunks(d_out, height, gram_bytes, GRAM_BYTES)
            self.groups = [list(parts(chunk, slice_bytes, BLOCK_BYTES)) for chunk in together]
        else:
            self.groups = [[chunk] for chunk in chunks(d_out, height, slice_bytes)]
        most_rows = largest(part for group in self.groups for part in group)
        self._buffer = scratch("slices", most_rows * row_numel, compute, device)
        self._result = scratch("update", most_rows * self._d_in, compute, device)

    def load(self, part: Chunk, *, measure: bool = False) -> Loaded:
        """A part as the configuration merges it; the next call overwrites it.

        `measure` asks for |W_0|^2 and |W_i - W_0|^2 of what is stored.
        """
        stack = load(self._matrices, part, self._order, self._buffer)
        squares = update_squares(stack) if measure else None
        for i, factor in enumerate(self._factors, start=1):
            if factor != 1:
                torch.lerp(stack[:, 0], stack[:, i], factor, out=stack[:, i])
        eta = split_conflicts_(stack, self.weights, self._conflict) if self._conflict else None
        return Loaded(stack, eta, squares)

    def room(self, part: Chunk) -> Tensor:
        """Memory for the update of a part, as (slices, height, d_in); that of the next part is the same."""
        n_slices = (part.stop - part.start) // part.height
        shape = (n_slices, part.height, self._d_in)
        return self._result[: n_slices * part.height * self._d_in].view(shape)

    def of(self, part: Chunk) -> slice | Tensor:
        """Which rows of the matrix a part holds."""
        rows = slice(part.start, part.stop)
        return rows if self._order is None else self._order[rows]


def update_squares(stack: Tensor) -> Tensor:
    """|W_0|^2 and |W_i - W_0|^2 over some slices, from the differences themselves."""
    base, *experts = stack.unbind(1)
    difference = torch.empty_like(base)
    norms = [torch.linalg.vector_norm(base)]
    norms += [torch.linalg.vector_norm(torch.sub(expert, base, out=difference)) for expert in experts]
    return torch.stack(norms).square()
