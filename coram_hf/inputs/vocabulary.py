"""Vocabularies: the rows of embeddings and heads, in the merged model's order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

ABSENT = -1


@dataclass(frozen=True)
class Vocabulary:
    """The merged vocabulary, and which row of each expert belongs to which merged row.

    token_axis: for every tensor with one entry per token, the axis of the tokens.
    size: rows of the merged model, padding included. new_rows: merged rows that the base lacks.
    rows: per expert, its row for each merged row, or ABSENT; empty if all vocabularies agree.
    counts: per expert, rows matched and added, and tokens dropped.
    """

    token_axis: Mapping[str, int] = field(default_factory=dict)
    size: int = 0
    new_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def grows(self) -> bool:
        """Whether the merged model has rows that the base lacks or has no token for."""
        return len(self.new_rows) > 0

    def grown(self, name: str) -> bool:
        """Whether a tensor has rows that the base lacks."""
        return self.grows and name in self.token_axis

    def align(self, name: str, base: Tensor, experts: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One tensor of the base and of every expert, with tokens in the merged order.

        A token that the base lacks gets the mean row of the experts that have it, in the base and in every
        expert; a token that an expert lacks gets the base's row there, so the expert does not move it.
        """
        axis = self.token_axis.get(name)
        if axis is None or not self.rows:
            return base, list(experts.values())
        by_row = {expert: tensor.movedim(axis, 0) for expert, tensor in experts.items()}
        origin = self._extended(base.movedim(axis, 0), by_row)
        ordered = [self._ordered(origin, expert, tensor) for expert, tensor in by_row.items()]
        return origin.movedim(0, axis), [tensor.movedim(0, axis) for tensor in ordered]

    def _extended(self, base: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        """The base with a row for every new token: the mean over the experts that have it."""
        if not self.grows:
            return base
        total = torch.zeros(len(self.new_rows), *base.shape[1:], dtype=torch.float64)
        owners = torch.zeros(len(self.new_rows), dtype=torch.float64)
        dtype = base.dtype
        for expert, tensor in experts.items():
            rows = self.rows[expert][self.new_rows]
            known = rows != ABSENT
            total[known] += tensor[rows[known]].to("cpu", torch.float64)
            owners += known
            dtype = torch.promote_types(dtype, tensor.dtype)
        origin = base.new_empty(self.size, *base.shape[1:], dtype=dtype)
        origin[: len(base)] = base
        origin[self.new_rows] = (total / owners.view(-1, *[1] * (total.ndim - 1))).to(origin)
        return origin

    def _ordered(self, origin: Tensor, expert: str, tensor: Tensor) -> Tensor:
        """An expert's rows in the merged order; the base's for new tokens and those that the expert lacks."""
        rows = self.rows[expert]
        moves = rows != ABSENT
        moves[self.new_rows] = False
        ordered = origin.to(torch.promote_types(origin.dtype, tensor.dtype), copy=True)
        ordered[moves] = tensor[rows[moves]].to(ordered)
        return ordered
