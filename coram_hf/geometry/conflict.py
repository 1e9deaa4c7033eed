"""Conflict masks: split each expert's update by whether its columns agree with the consensus."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coram_hf.config import Conflict


def split_conflicts_(stack: Tensor, weights: Tensor, conflict: Conflict) -> Tensor | None:
    """Keep in `stack`, in place, only the part of each update that is merged geometrically.

    `stack` holds W_0 and W_i = W_0 + tau_i. `+ave` returns eta, the weighted mean of what was removed.
    """
    base = stack[:, 0]
    stack[:, 1:] -= stack[:, :1]
    mean = combination(stack, [0.0, *weights.tolist()])
    for tau, agreement in agreements(stack[:, 1:], mean):
        torch.addcmul(base, tau, kept(agreement, conflict).to(tau.dtype), out=tau)
    if not conflict.endswith("+ave"):
        return None
    return mean.add_(combination(stack, [1.0, *(-weights).tolist()]))


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
