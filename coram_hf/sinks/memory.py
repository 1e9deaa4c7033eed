"""The merged model in memory: a copy of the base's model whose tensors are overwritten one by one."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.geometry.slices import row_blocks


class ModelSink:
    """A model of its own to write merged tensors into; tied weights stay tied.

    `dtype` is that of its parameters (buffers keep theirs); `vocabulary_size` resizes its
    embeddings. What rounding to that dtype takes from the updates is measured on the way.
    """

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype | None = None, vocabulary_size: int | None = None
    ) -> None:
        self.model = model
        if vocabulary_size is not None:
            self.model.resize_token_embeddings(vocabulary_size, mean_resizing=False)
        if dtype is not None:
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(dtype)
        self._tensors = self.model.state_dict()
        self._moved = self._lost = 0.0

    def write(self, name: str, base: Tensor, update: Tensor, coefficient: float = 1.0) -> None:
        """W_0 + coefficient * update, summed in float64 and rounded to the model's dtype."""
        out, origin, delta = (t.reshape(t.shape or 1) for t in (self._tensors[name], base, update))
        for rows in row_blocks(out):
            self.write_rows(out, origin, rows, delta[rows], coefficient)

    def write_rows(
        self, out: Tensor, base: Tensor, rows: slice | Tensor, update: Tensor, coefficient: float
    ) -> None:
        """The same for some rows of a tensor of this sink, or of a view of one."""
        wide, change = base[rows].to("cpu", torch.float64), update.to("cpu", torch.float64)
        total = torch.add(wide, change, alpha=coefficient)
        rounded = total.to(out.dtype)
        out[rows] = rounded.to(out.device)
        self._moved += (coefficient * float(change.norm())) ** 2
        self._lost += float((total - rounded.double()).norm()) ** 2

    def tensor(self, name: str) -> Tensor:
        """The result's own tensor."""
        return self._tensors[name]

    def keep(self, name: str, base: Tensor) -> None:
        """W_0, where the copy does not hold it already: rows of new tokens."""
        self._tensors[name].copy_(base)

    @property
    def rounding_loss(self) -> float:
        """|rounding error| / |update| over all that was written."""
        return math.sqrt(self._lost / self._moved) if self._moved else 0.0
