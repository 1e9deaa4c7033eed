"""The weights of a model that is already in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel


class LoadedModel(Mapping[str, Tensor]):
    """Parameters and persistent buffers by name; a tied parameter appears once, under its first name.

    tied: the further names of tied parameters, and their first one; they can be looked up, too.
    overrides: parameters that are made when they are asked for, by an adapter.
    kind: "full", or the PEFT type of the adapter; adapter: the model that holds it, and its name there.
    orthogonality_error: max |R^T R - I| of an OFT adapter.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        overrides: Mapping[str, Callable[[], Tensor]] | None = None,
        *,
        kind: str = "full",
        adapter: tuple[PeftModel, str] | None = None,
        orthogonality_error: float | None = None,
    ) -> None:
        self.model = model
        self.kind = kind
        self.adapter = adapter
        self.orthogonality_error = orthogonality_error
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        every = dict(model.named_parameters(remove_duplicate=False))
        buffers = {k: v for k, v in model.state_dict().items() if k not in every}
        self._tensors: dict[str, Tensor] = {k: p.detach() for k, p in model.named_parameters()} | buffers
        self.tied = {k: first[id(p)] for k, p in every.items() if first[id(p)] != k}
        self.overrides = dict(overrides or {})
        self.class_name = type(model).__name__

    def __getitem__(self, name: str) -> Tensor:
        if name in self.overrides:
            return self.overrides[name]()
        first = self.tied.get(name, name)
        if first in self.overrides:
            return self.overrides[first]()
        tensor = self.original(name)
        return tensor.to(torch.float32) if _is_float8(tensor) else tensor

    def original(self, name: str) -> Tensor:
        """The tensor under an adapter's change, of the same shape and kind, without making anything."""
        return self._tensors[self.tied.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _is_float8(tensor: Tensor) -> bool:
    """8-bit floats have no arithmetic in torch; float32 holds them exactly."""
    return tensor.is_floating_point() and tensor.element_size() == 1
