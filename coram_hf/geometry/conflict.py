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
    base, experts = stack[:, 0], stack[:, 1:].unbind(1)
    mean = torch.zeros_like(base)
    for tau, weight in zip(experts, weights.tolist(), strict=True):
        tau -= base
        mean.add_(tau, alpha=weight)
    eta = mean.clone() if conflict.endswith("+ave") else None
    scratch = torch.empty_like(base)
    for tau, weight in zip(experts, weights.tolist(), strict=True):
        agreement = torch.mul(tau, mean, out=scratch).sum(-2, keepdim=True)
        tau *= agreement < 0 if conflict.startswith("ca") else agreement >= 0
        if eta is not None:
            eta.sub_(tau, alpha=weight)
        tau += base
    return eta
