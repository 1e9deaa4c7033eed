"""The residual pathway: how tensors outside the target matrices, and OrthoMerge's residuals, are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from coram_hf.config import Residual
from coram_hf.methods.baseline import Tensors
from coram_hf.methods.linear import weighted_mean
from coram_hf.methods.ties import global_cuts, ties
from coram_hf.methods.tsvm import tsvm
from coram_hf.methods.updates import Updates

_PATHWAYS: dict[Residual, Callable[..., Tensor]] = {"ta": weighted_mean, "ties": ties, "tsvm": tsvm}
BY_ROWS: tuple[Residual, ...] = ("ta", "ties")
"""The pathways that can process a few rows of a tensor at a time."""
DENSITY = 0.2


def merge_residual(
    updates: Updates,
    residual: Residual,
    scale: float | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Tensor:
    """rho: the mean (`ta`), TIES at density 0.2 (`ties`) or TSV-M (`tsvm`), times `scale` (default 1).

    `parameters`: density and trim of TIES, rank of TSV-M, and the scale.
    """
    given = dict(parameters or {})
    scale = given.pop("scale", scale)
    merged = _PATHWAYS[residual](updates, **given)
    return merged if scale is None else merged.mul_(scale)


def prepare_residual(tensors: Tensors, parameters: Mapping[str, Any] | None) -> Any:
    """What the pathway must know about all its tensors: the cuts of TIES with trim="global"."""
    given = {"trim": "tensor", "density": DENSITY, **(parameters or {})}
    return global_cuts(tensors, given)
