"""The merged model in memory: a copy of the base whose tensors are overwritten one by one."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coram_hf.geometry.slices import row_blocks


class ModelSink:
    """A copy of `model` to write merged tensors into; the original is left alone, tied weights stay tied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model)
        self._tensors = self.model.state_dict()

    def write(self, name: str, base: Tensor, update: Tensor, coefficient: float = 1.0) -> None:
        """W_0 + coefficient * update, summed in float64 and rounded once to the model's dtype."""
        out, origin, delta = (t.reshape(t.shape or 1) for t in (self._tensors[name], base, update))
        for rows in row_blocks(out):
            wide = origin[rows].to("cpu", torch.float64)
            out[rows] = torch.add(wide, delta[rows].to("cpu"), alpha=coefficient)
