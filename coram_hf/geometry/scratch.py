"""Working memory that a thread reuses for its next matrix, because fresh pages are slow."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_local = threading.local()


def scratch(use: str, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An uninitialised flat tensor; the next call of this thread for the same use overwrites it.

    Each use belongs to one module, which passes the buffer to others if they must share it.
    """
    kept: dict[str, Tensor] = _local.__dict__
    key = f"{use} {dtype} {device}"
    buffer = kept.get(key)
    if buffer is None or len(buffer) < numel:
        with torch.inference_mode(False):
            buffer = kept[key] = torch.empty(numel, dtype=dtype, device=device)
    return buffer[:numel]
