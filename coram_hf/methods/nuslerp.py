"""NuSLERP: spherical interpolation between two experts, or between their updates."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from coram_hf.methods.baseline import Baseline
from coram_hf.methods.mergekit import nuslerp_parameters
from coram_hf.methods.slerp import arc, cosine
from coram_hf.methods.updates import Updates


def nuslerp(
    updates: Updates,
    *,
    of: Annotated[
        Literal["updates", "weights"], "Interpolate updates, or the weights themselves."
    ] = "updates",
    along: Annotated[
        Literal["tensor", "rows", "columns"],
        "What is interpolated: the tensor as one vector, its rows, or its columns.",
    ] = "tensor",
) -> Tensor:
    """W = W_0 + (sin(w_1 a) tau_1 + sin(w_2 a) tau_2) / sin(a), with a the angle between tau_1 and tau_2

    With of="weights", W_1 and W_2 take the place of tau_1 and tau_2, and the base has no part in it.
    """
    parts = [updates.tau(i) if of == "updates" else updates.expert(i) for i in range(2)]
    first, second = (part.reshape(updates.base.shape) for part in parts)
    t = updates.weights[1]
    if along == "tensor" or first.ndim < 2:
        a, b = arc(cosine(first, second), t, PARALLEL)
        merged = first * a + second * b
    else:
        merged = _by_vectors(first, second, t, -1 if along == "rows" else 0)
    return merged if of == "updates" else merged.sub_(updates.base)


PARALLEL = 1 - 1e-16
SHORTEST = 1e-7
"""Norm to which shorter vectors are lengthened before their angle is measured, as in mergekit."""


def _by_vectors(first: Tensor, second: Tensor, t: float, dim: int) -> Tensor:
    """Interpolate all vectors along one dimension, each by its own angle."""
    units = [v.double() / v.double().norm(dim=dim, keepdim=True).clamp(min=SHORTEST) for v in (first, second)]
    cos = (units[0] * units[1]).sum(dim, keepdim=True).clamp(-1, 1)
    parallel = cos.abs() > PARALLEL
    angle = torch.acos(torch.where(parallel, 0.0, cos))
    a = torch.where(parallel, 1 - t, torch.sin((1 - t) * angle) / torch.sin(angle))
    b = torch.where(parallel, t, torch.sin(t * angle) / torch.sin(angle))
    return first * a.to(first.dtype) + second * b.to(first.dtype)


NUSLERP = Baseline(
    nuslerp, from_mergekit=nuslerp_parameters, mergekit_base="optional", fewest=2, most=2, usual=False
)
