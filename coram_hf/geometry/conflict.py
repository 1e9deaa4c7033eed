"""Conflict masks: split each expert's update by whether its columns agree with the consensus."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coram_hf.config import Conflict
from coram_hf.geometry.slices import scratch


def split_conflicts_(updates: Tensor, weights: Tensor, conflict: Conflict) -> Tensor | None:
    """Keep in `updates`, in place, only the part of each tau_i that is merged geometrically.

    `+ave` returns eta, the weighted mean of what was removed. The consensus is taken with weights relative to
    the largest: uniform ones are then exactly 1, and updates that cancel do so without rounding errors. Eta
    is in memory that this thread's next call overwrites.
    """
    largest = float(weights.max())
    shares = [float(weight) / largest for weight in weights]
    shape, numel = updates[:, 0].shape, updates[:, 0].numel()
    total, room = (
        scratch(use, numel, updates.dtype, updates.device).view(shape) for use in ("consensus", "conflict")
    )
    combination(updates, shares, total)
    for tau, agreement in agreements(updates, total, room):
        tau *= kept(agreement, conflict)
    if not conflict.endswith("+ave"):
        return None
    return total.sub_(combination(updates, shares, room)).mul_(largest)


def agreements(updates: Tensor, mean: Tensor, room: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Every tau_i, with <tau_i[:, j], taubar[:, j]> of its columns as (slices, 1, d_in).

    With taubar = sum w_i tau_i, column j of expert i conflicts if that is negative. The caller may
    overwrite tau_i. `room` is memory for products, of the shape of the mean.
    """
    product = torch.empty_like(mean) if room is None else room
    for tau in updates.unbind(1):
        yield tau, torch.mul(tau, mean, out=product).sum(-2, keepdim=True)


def kept(agreement: Tensor, conflict: Conflict) -> Tensor:
    """The columns that are merged geometrically: `ca` keeps the conflicting ones, `nca` the others."""
    return agreement < 0 if conflict.startswith("ca") else agreement >= 0


def combination(stack: Tensor, coefficients: list[float], out: Tensor | None = None) -> Tensor:
    """The linear combination of the models of every slice, in one pass over them."""
    row = torch.tensor(coefficients, dtype=stack.dtype, device=stack.device)
    flat = None if out is None else out.flatten(1).unsqueeze(1)
    return torch.bmm(row.expand(len(stack), 1, -1), stack.flatten(2), out=flat).view(stack[:, 0].shape)
