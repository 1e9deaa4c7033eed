"""Conflict masks: split each expert's update by whether its columns agree with the consensus."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coram_hf.config import Conflict


def split_conflicts_(updates: Tensor, weights: Tensor, conflict: Conflict) -> Tensor | None:
    """Keep in `updates`, in place, only the part of each tau_i that is merged geometrically.

    `+ave` returns eta, the weighted mean of what was removed. The consensus is taken with weights relative to
    the largest: uniform ones are then exactly 1, and updates that cancel do so without rounding errors.
    """
    largest = float(weights.max())
    shares = [float(weight) / largest for weight in weights]
    total = combination(updates, shares)
    for tau, agreement in agreements(updates, total):
        tau *= kept(agreement, conflict)
    if not conflict.endswith("+ave"):
        return None
    return total.sub_(combination(updates, shares)).mul_(largest)


def agreements(updates: Tensor, mean: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every tau_i, with <tau_i[:, j], taubar[:, j]> of its columns as (slices, 1, d_in).

    With taubar = sum w_i tau_i, column j of expert i conflicts if that is negative. The caller may
    overwrite tau_i.
    """
    product = torch.empty_like(mean)
    for tau in updates.unbind(1):
        yield tau, torch.mul(tau, mean, out=product).sum(-2, keepdim=True)


def kept(agreement: Tensor, conflict: Conflict) -> Tensor:
    """The columns that are merged geometrically: `ca` keeps the conflicting ones, `nca` the others."""
    return agreement < 0 if conflict.startswith("ca") else agreement >= 0


def combination(stack: Tensor, coefficients: list[float]) -> Tensor:
    """The linear combination of the models of every slice, in one pass over them."""
    row = torch.tensor(coefficients, dtype=stack.dtype, device=stack.device)
    return torch.bmm(row.expand(len(stack), 1, -1), stack.flatten(2)).view_as(stack[:, 0])
