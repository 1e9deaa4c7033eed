"""The anatomy of one matrix: how its updates relate, and what each branch makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from coram_hf.config import CoramConfig, Spread
from coram_hf.geometry.branches import Dissected, Layout, condition_numbers, dissect_slices
from coram_hf.geometry.conflict import agreements, combination, kept
from coram_hf.geometry.products import gram_of
from coram_hf.geometry.slices import Chunk, Rows, buffer_for, chunks, load, with_float64
from coram_hf.geometry.spread import deal_rows, order_of, relative_scores

CONTRAST: Spread = "variance"
"""The spread mode whose slices a contiguous merge is compared with, as in the paper's audit."""


@dataclass
class Anatomy:
    """Sums over the slices of a matrix, or of several.

    base: |W_0|^2; inner: <tau_i, tau_j>, of the balanced updates.
    owned: rows on which an expert's own update is the largest; rows: all, even those that no expert moves.
    agreeing, moved: entries that two experts move in the same direction, and that both move.
    flagged: per expert, columns of slices that conflict with the mean update; columns: all of one expert.
    squares, dots, task: per branch |delta|^2 and <delta, delta_TA>, and |delta_TA|^2.
    decorrelation: the numbers of a `Decorrelation`, if the experts were decorrelated.
    errors, angles, conditions, tiny: see `Dissected`; contrast: the conditions of the other way of slicing.
    """

    base: float = 0.0
    inner: Tensor = field(default_factory=lambda: torch.zeros(()))
    owned: Tensor = field(default_factory=lambda: torch.zeros(()))
    rows: int = 0
    agreeing: Tensor = field(default_factory=lambda: torch.zeros(()))
    moved: Tensor = field(default_factory=lambda: torch.zeros(()))
    flagged: Tensor = field(default_factory=lambda: torch.zeros(()))
    columns: int = 0
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))
    dots: Tensor = field(default_factory=lambda: torch.zeros(()))
    task: float = 0.0
    frameless: int = 0
    tiny: int = 0
    errors: list[Tensor] = field(default_factory=list)
    angles: list[Tensor] = field(default_factory=list)
    conditions: list[Tensor] = field(default_factory=list)
    contrast: list[Tensor] = field(default_factory=list)
    decorrelation: Tensor = field(default_factory=lambda: torch.zeros(()))

    def __iadd__(self, other: Anatomy) -> Anatomy:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))
        return self


def dissect(
    base: Tensor,
    experts: Sequence[Tensor],
    config: CoramConfig,
    *,
    factors: Sequence[float],
    device: torch.device | None = None,
    geometry: bool = True,
    entries: bool = True,
) -> Anatomy:
    """The anatomy of one matrix as `config` slices and masks it, chunk by chunk like the merge.

    `geometry` requests branches, rotations and conditions, `entries` signs and conflicts. If a weight is not
    finite, the norms show it and nothing more is measured.
    """
    device = base.device if device is None else device
    compute = torch.float64 if with_float64(device) == device else torch.float32
    like = torch.empty(0, dtype=compute, device=device)
    layout = Layout.of(len(experts), config.conflict is not None, like)
    spare = len(layout.task) - layout.n_models
    source = UpdateRows(base, experts, config, factors, device, compute, spare)
    row_squares = []
    found = Anatomy()
    for chunk in source.chunks:
        stack = source.load(chunk)
        gram = gram_of(stack[:, : layout.n_models].flatten(1, 2))
        part, squares = _sizes(gram, layout.n_models, source.scale)
        found += part
        if not math.isfinite(part.base + part.task):
            return found
        row_squares.append(squares)
        if entries or config.conflict is not None:
            found += _entries(stack, source.weights, config, layout.n_models)
        if geometry:
            gram = gram if config.conflict is None else gram_of(stack.flatten(1, 2))
            found += _geometry(dissect_slices(stack, gram, source.weights, layout))
    if geometry:
        found.contrast = list(_contrast(base, torch.cat(row_squares, 1), config, like))
    return found


class UpdateRows(Rows):
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
        compute: torch.dtype,
        spare: int,
    ) -> None:
        order = order_of(base, experts, config, factors)
        super().__init__([base, *experts, *[base] * spare], config, factors, device, order, compute)
        self.scale = torch.tensor(factors, dtype=compute, device=device)
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


def _sizes(gram: Tensor, n_models: int, scale: Tensor) -> tuple[Anatomy, Tensor]:
    """Norms and inner products of the updates, the owners of rows, and |.|^2 of every row per model."""
    parts = gram.unflatten(2, (n_models, -1)).unflatten(1, (n_models, -1)).diagonal(0, 2, 4)
    rows = parts.diagonal(0, 1, 2).movedim(-1, 0).flatten(1).to("cpu", torch.float64)
    inner = parts.sum((0, 3)).to("cpu", torch.float64)
    own = rows[1:] / scale.to(rows)[:, None] ** 2
    owner = own.argmax(0)[own.amax(0) > 0]
    found = Anatomy(
        base=float(inner[0, 0]),
        inner=inner[1:, 1:],
        owned=torch.bincount(owner, minlength=len(own)),
        rows=rows.shape[1],
        task=float(inner[1:, 1:].sum()),
    )
    return found, rows


def _entries(stack: Tensor, weights: Tensor, config: CoramConfig, n_models: int) -> Anatomy:
    """Signs and conflicts, entry by entry; then the mask of the configuration is applied in place."""
    updates = stack[:, 1:n_models]
    signs = updates.transpose(0, 1).to(torch.float32, copy=True).sign_().flatten(1)
    same = (signs @ signs.T).to("cpu", torch.float64)
    moved = (signs.abs_() @ signs.T).to("cpu", torch.float64)
    mean = combination(updates, weights.tolist())
    if config.conflict is not None:
        stack[:, -1] = updates.sum(1)
    flagged = []
    for tau, agreement in agreements(updates, mean):
        flagged.append((agreement < 0).sum())
        if config.conflict is not None:
            tau *= kept(agreement, config.conflict)
    if config.conflict is not None:
        with_eta = config.conflict.endswith("+ave")
        stack[:, -2] = mean - combination(updates, weights.tolist()) if with_eta else 0
    return Anatomy(
        agreeing=(same + moved) / 2,
        moved=moved,
        flagged=torch.stack(flagged).to("cpu"),
        columns=mean.shape[0] * mean.shape[2],
    )


def _geometry(found: Dissected) -> Anatomy:
    squares, dots, *lists = (t.to("cpu", torch.float64) for t in found[:5])
    errors, angles, conditions = ([values] for values in lists)
    return Anatomy(
        squares=squares,
        dots=dots,
        errors=errors,
        angles=angles,
        conditions=conditions,
        frameless=found.frameless,
        tiny=found.tiny,
    )


def _contrast(base: Tensor, row_squares: Tensor, config: CoramConfig, like: Tensor) -> Iterator[Tensor]:
    """Condition numbers of the base in spread slices, or in contiguous ones if the merge is spread."""
    height, (d_out, d_in) = config.slice_height, base.shape
    order = None
    if config.spread is None:
        order = deal_rows(relative_scores(row_squares.sqrt()), CONTRAST, height)
    work = list(chunks(d_out, height, 4 * height * d_in * like.element_size()))
    buffer = buffer_for(work, d_in, like.dtype, like.device)
    for chunk in work:
        yield condition_numbers(load([base], chunk, order, buffer)[:, 0]).to("cpu", torch.float64)
