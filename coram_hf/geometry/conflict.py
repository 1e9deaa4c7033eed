"""Conflict masks: split each expert's update by whether its columns agree with the consensus."""

from __future__ import annotations

import torch
from torch import Tensor

from coram_hf.config import Conflict


def split_conflicts_(stack: Tensor, weights: Tensor, conflict: Conflict) -> Tensor | None:
    """Keep in `stack`, in place, only the part of each update that is merged geometrically.

    With tau_i = W_i - W_0 and taubar = sum w_i tau_i, column j of expert i is flagged when
    <tau_i[:, j], taubar[:, j]> < 0. `nca` keeps the non-flagged columns and `ca` the flagged ones;
    `+ave` returns eta, the weighted mean of what was taken out.
    """
    base = stack[:, 0]
    stack[:, 1:] -= stack[:, :1]
    mean = combination(stack, [0.0, *weights.tolist()])
    scratch = torch.empty_like(mean)
    for tau in stack[:, 1:].unbind(1):
        agreement = torch.mul(tau, mean, out=scratch).sum(-2, keepdim=True)
        keep = agreement < 0 if conflict.startswith("ca") else agreement >= 0
        torch.addcmul(base, tau, keep.to(tau.dtype), out=tau)
    if not conflict.endswith("+ave"):
        return None
    return mean.add_(combination(stack, [1.0, *(-weights).tolist()]))


def combination(stack: Tensor, coefficients: list[float]) -> Tensor:
    """The linear combination of the models of every slice, in one pass over them."""
    row = torch.tensor(coefficients, dtype=stack.dtype, device=stack.device)
    return torch.bmm(row.expand(len(stack), 1, -1), stack.flatten(2)).view_as(stack[:, 0])
