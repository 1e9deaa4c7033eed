"""The destination of a merged parameter: a tensor in memory or in a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from coram_hf.geometry.scratch import scratch
from coram_hf.inputs.targets import Target


class Output(Protocol):
    """A tensor whose rows can be written in any order."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...

    def view(self, shape: torch.Size) -> Output:
        """This output in another shape."""
        ...

    def matrices(self, target: Target) -> Sequence[Output]:
        """The matrices of a target, as (output neurons x inputs)."""
        ...

    def put(self, rows: slice | Tensor, total: Tensor) -> Tensor:
        """Write rows, rounded to the dtype of the output, and return the rounded rows."""
        ...


class InMemory:
    """A tensor of the result, or a buffer for one that has another form on disk."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape, self.dtype, self.nbytes = tensor.shape, tensor.dtype, tensor.nbytes

    def view(self, shape: torch.Size) -> InMemory:
        """This tensor in another shape."""
        return InMemory(self.tensor.view(shape))

    def matrices(self, target: Target) -> list[InMemory]:
        """The matrices of a target, as views of the tensor."""
        return [InMemory(matrix) for matrix in target.matrices(self.tensor)]

    def put(self, rows: slice | Tensor, total: Tensor) -> Tensor:
        """Write rows, rounded to the dtype of the tensor, and return the rounded rows."""
        if isinstance(rows, slice) and self.tensor.device.type == "cpu":
            return self.tensor[rows].copy_(total)
        rounded = scratch("rounded", total.numel(), self.dtype).view(total.shape).copy_(total)
        self.tensor[rows] = rounded.to(self.tensor.device)
        return rounded
