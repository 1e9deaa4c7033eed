"""Task arithmetic."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from coram_hf.config import Varies
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.linear import weighted_mean
from coram_hf.methods.mergekit import task_arithmetic_parameters
from coram_hf.methods.updates import Updates


def task_arithmetic(
    updates: Updates,
    *,
    scale: Annotated[float, Varies(), "Coefficient of the sum of the updates."] = 0.4,
    normalize: Annotated[bool, "Whether weights count as N w_i, or as they are given."] = True,
) -> Tensor:
    """W = W_0 + scale * sum tau_i; weights count as N w_i, so that uniform ones change nothing

    With normalize=False they count as they are given. A negative weight subtracts an expert's update.
    """
    if normalize:
        return weighted_mean(updates).mul_(scale * len(updates))
    return weighted_mean(updates, updates.amounts).mul_(scale)


TASK_ARITHMETIC = Baseline(
    task_arithmetic,
    by_rows=True,
    presets={"Task Arithmetic": {}},
    mergebench={"MergeBench Task Arithmetic": {"scale": 0.4}},
    from_mergekit=task_arithmetic_parameters,
)
