"""Task arithmetic."""

from __future__ import annotations

from torch import Tensor

from coram_hf.methods.linear import linear
from coram_hf.methods.updates import Updates


def task_arithmetic(updates: Updates, *, scale: float = 0.4) -> Tensor:
    """W = W_0 + scale * sum tau_i; weights count as N w_i, so that uniform ones change nothing"""
    return linear(updates).mul_(scale * len(updates))
