"""Working memory that a thread keeps for its next matrix: fresh pages are slow to come."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_local = threading.local()


class Lent:
    """Memory for tensors that come back from other threads, and is then lent again."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def empty_like(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """An uninitialised tensor in the main memory, and the memory that it lies in."""
        size = like.numel() * like.element_size()
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(0, dtype=torch.uint8)
        if len(memory) < size:
            memory = torch.empty(size, dtype=torch.uint8)
        return memory[:size].view(like.dtype).view(like.shape), memory

    def take_back(self, *memory: Tensor) -> None:
        """No one reads this memory any more."""
        self._free += memory


def scratch(use: str, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised flat tensor; the next call of this thread for the same use overwrites it."""
    kept: dict[str, Tensor] = _local.__dict__
    key = f"{use} {dtype} {device}"
    buffer = kept.get(key)
    if buffer is None or len(buffer) < numel:
        with torch.inference_mode(False):
            buffer = kept[key] = torch.empty(numel, dtype=dtype, device=device)
    return buffer[:numel]
