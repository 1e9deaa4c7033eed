"""SLERP: spherical interpolation between the base and one expert."""

from __future__ import annotations

import math
from typing import Annotated

from torch import Tensor

from coram_hf.config import Varies
from coram_hf.geometry.slices import as_rows
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.mergekit import slerp_parameters
from coram_hf.methods.updates import Updates

PARALLEL = 0.9995
"""|cosine| above which two tensors are interpolated linearly, as in mergekit."""
ZERO = 1e-8
"""Norm below which a tensor counts as zero and is not normalised."""


def slerp(
    updates: Updates, *, t: Annotated[float, Varies(), "0 for the base, 1 for the expert."] = 0.5
) -> Tensor:
    """W = (sin((1 - t) a) W_0 + sin(t a) W_1) / sin(a), with a the angle between W_0 and W_1

    Almost parallel tensors are interpolated linearly.
    """
    base, tau = as_rows(updates.base).to(updates.dtype), updates.tau(0)
    of_base, of_expert = arc(cosine(base, updates.expert(0)), t, PARALLEL)
    return updates.shaped(tau.mul_(of_expert).add_(base, alpha=of_base + of_expert - 1))


def cosine(a: Tensor, b: Tensor) -> float:
    """<a, b> / (|a| |b|), where the norm of a zero tensor counts as 1."""
    a, b = a.flatten().double(), b.flatten().double()
    lengths = [length if (length := float(v.norm())) > ZERO else 1.0 for v in (a, b)]
    return max(-1.0, min(1.0, float(a @ b) / (lengths[0] * lengths[1])))


def arc(cos: float, t: float, parallel: float) -> tuple[float, float]:
    """The coefficients of both ends of an arc at t; linear ones if |cosine| is above `parallel`."""
    if abs(cos) > parallel:
        return 1 - t, t
    angle = math.acos(cos)
    return math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


SLERP = Baseline(slerp, from_mergekit=slerp_parameters, most=1, usual=False)
