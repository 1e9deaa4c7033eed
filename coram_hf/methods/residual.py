"""The residual pathway: how tensors outside the target matrices, and OrthoMerge's residuals, are merged."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from coram_hf.config import Residual
from coram_hf.methods.linear import weighted_mean
from coram_hf.methods.ties import ties
from coram_hf.methods.tsvm import tsvm
from coram_hf.methods.updates import Updates

_PATHWAYS: dict[Residual, Callable[[Updates], Tensor]] = {"ta": weighted_mean, "ties": ties, "tsvm": tsvm}
BY_ROWS: tuple[Residual, ...] = ("ta",)
"""The pathways that can process a few rows of a tensor at a time."""


def merge_residual(updates: Updates, residual: Residual, scale: float | None = None) -> Tensor:
    """rho: the mean (`ta`), TIES at density 0.2 (`ties`) or TSV-M (`tsvm`), times `scale` (default 1)."""
    merged = _PATHWAYS[residual](updates)
    return merged if scale is None else merged.mul_(scale)
