"""The merged model in memory: a copy of the base's model whose tensors are overwritten one by one."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


class ModelSink:
    """A model of its own to write merged tensors into; tied weights stay tied.

    `dtype` is that of its parameters (buffers keep theirs); `vocabulary_size` resizes its embeddings.
    """

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype | None = None, vocabulary_size: int | None = None
    ) -> None:
        self.model = with_format(model, dtype, vocabulary_size)
        self._tensors = self.model.state_dict()

    def tensor(self, name: str) -> Tensor:
        """The result's own tensor."""
        return self._tensors[name]


def with_format(
    model: PreTrainedModel, dtype: torch.dtype | None, vocabulary_size: int | None
) -> PreTrainedModel:
    """The model, changed to the dtype and the number of tokens of the result."""
    if vocabulary_size is not None:
        model.resize_token_embeddings(vocabulary_size, mean_resizing=False)
    if dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    return model
