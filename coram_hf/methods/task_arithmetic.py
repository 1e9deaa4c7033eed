"""Task arithmetic."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from coram_hf.methods.baseline import Baseline
from coram_hf.methods.linear import linear
from coram_hf.methods.mergekit import task_arithmetic_parameters
from coram_hf.methods.updates import Updates


def task_arithmetic(
    updates: Updates, *, scale: Annotated[float, "Coefficient of the sum of the updates."] = 0.4
) -> Tensor:
    """W = W_0 + scale * sum tau_i; weights count as N w_i, so that uniform ones change nothing"""
    return linear(updates).mul_(scale * len(updates))


TASK_ARITHMETIC = Baseline(
    task_arithmetic,
    by_rows=True,
    presets={"Task Arithmetic": {}},
    mergebench={"MergeBench Task Arithmetic": {"scale": 0.4}},
    from_mergekit=task_arithmetic_parameters,
)
