"""The weights of a model that is already in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from transformers import PreTrainedModel


class LoadedModel(Mapping[str, Tensor]):
    """Parameters and persistent buffers by name; a tied parameter appears once, under its first name."""

    def __init__(self, model: PreTrainedModel) -> None:
        every_parameter = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {k: v for k, v in model.state_dict().items() if k not in every_parameter}
        self._tensors: dict[str, Tensor] = {k: p.detach() for k, p in model.named_parameters()} | buffers
        self.model_type = model.config.model_type
        self.class_name = type(model).__name__

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
