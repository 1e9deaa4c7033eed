"""The anatomy of one matrix as a configuration merges it: with decorrelated experts, if it says so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from coram_hf.config import CoramConfig
from coram_hf.geometry.anatomy import Anatomy, dissect
from coram_hf.geometry.decorrelated import Factors, decorrelate_experts, decorrelate_factors
from coram_hf.inputs.inputs import Matrix

OF_THE_MERGE = (
    *("squares", "dots", "task", "frameless", "errors", "angles", "conditions", "contrast"),
    *("flagged", "columns"),
)
"""The fields of an anatomy that are about the merge; the others describe the experts as they are."""


def dissect_matrix(
    matrix: Matrix,
    config: CoramConfig,
    factors: Sequence[float],
    device: torch.device | None,
    low_rank: Sequence[Factors] | None,
    *,
    geometry: bool,
    entries: bool,
) -> Anatomy:
    """The anatomy of one matrix; what is said of the merge, and delta_TA, is of the decorrelated updates.

    `low_rank`: the factors of the experts' updates, if all have them; they are decorrelated as small cores.
    """
    decorrelates = config.decorrelate is not None and (geometry or entries)
    found = dissect(
        matrix.base,
        matrix.experts,
        config,
        factors=factors,
        device=device,
        geometry=geometry and not decorrelates,
        entries=entries,
    )
    if not decorrelates or not math.isfinite(found.base + found.task):
        return found
    if low_rank is not None:
        experts, measured = decorrelate_factors(matrix.base, low_rank, config, factors, device)
    else:
        experts, measured = decorrelate_experts(matrix.base, matrix.experts, config, factors, device)
    merged = dissect(
        matrix.base,
        experts,
        config,
        factors=[1.0] * len(experts),
        device=device,
        geometry=geometry,
        entries=entries,
    )
    for name in OF_THE_MERGE:
        setattr(found, name, getattr(merged, name))
    found.decorrelation = torch.tensor(measured.flat(), dtype=torch.float64)
    return found
