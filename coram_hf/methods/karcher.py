"""The Karcher mean: the experts' directions averaged on the sphere, at their mean length."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from coram_hf.config import Range
from coram_hf.geometry.slices import as_rows
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.linear import sum_weighted
from coram_hf.methods.mergekit import karcher_parameters
from coram_hf.methods.updates import Updates


def karcher(
    updates: Updates,
    *,
    max_iter: Annotated[int, Range("[1, inf)"), "Largest number of steps."] = 10,
    tol: Annotated[float, Range("(0, inf)"), "Length of a step, and angle, that count as zero."] = 1e-5,
) -> Tensor:
    """W = (sum w_i |W_i|) u, with u the point of the sphere where sum w_i log_u(W_i / |W_i|) = 0

    The sphere is that of the whole tensor. Experts whose tensor is zero have no direction.
    """
    experts = [updates.expert(i) for i in range(len(updates))]
    lengths = [float(expert.double().norm()) for expert in experts]
    pairs = [(w, expert / length) for w, expert, length in zip(updates.weights, experts, lengths, strict=True)
             if length > tol]  # fmt: skip
    base = as_rows(updates.base).to(updates.dtype)
    if not pairs:
        return updates.shaped(-base)
    total = math.fsum(w for w, _ in pairs)
    weights, units = tuple(w / total for w, _ in pairs), [unit for _, unit in pairs]
    mean = _unit(sum_weighted(units, weights), tol)
    mean = units[0] if mean is None else mean
    for _ in range(max_iter):
        step = torch.zeros_like(mean)
        for weight, unit in zip(weights, units, strict=True):
            cos = max(-1.0, min(1.0, float(mean.flatten().double() @ unit.flatten().double())))
            angle = math.acos(cos)
            if angle >= tol:
                step.add_(unit - cos * mean, alpha=weight * angle / math.sin(angle))
        length = float(step.double().norm())
        if length < tol:
            break
        moved = math.cos(length) * mean + math.sin(length) * (step / length)
        mean = _unit(moved, tol)
        mean = moved if mean is None else mean
    size = math.fsum(w * length for w, length in zip(updates.weights, lengths, strict=True))
    return updates.shaped(mean.mul(size).sub_(base))


def _unit(vector: Tensor, tol: float) -> Tensor | None:
    """The vector at length 1; None if it is too short to have a direction."""
    length = float(vector.double().norm())
    return None if length < tol else vector / length


KARCHER = Baseline(karcher, from_mergekit=karcher_parameters, mergekit_base="member", usual=False)
