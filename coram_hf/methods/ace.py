"""ACE-Merging: regression on input covariances that are estimated from the updates (arXiv 2603.02945).

It is a relative of our `ridge` decorrelation, which always divides by the trace, adds a multiple of the
identity to the denominator alone, and keeps the experts' parts apart for the geometry. ACE's `eps` is
absolute and on both sides, so that updates that are small beside it are averaged. Formulas and constants are
those of the authors' code.
"""

from __future__ import annotations

import math
import statistics
from typing import Annotated

import torch
from torch import Tensor

from coram_hf.config import Range
from coram_hf.geometry.linalg import gram_of_columns, product
from coram_hf.methods.baseline import Baseline
from coram_hf.methods.linear import weighted_mean
from coram_hf.methods.updates import Updates

UNEVEN = 0.3
"""Var(log tr) / mean(log tr)^2 above which the covariances are normalised and the spectrum is refined."""
TINY = 1e-12


def ace(
    updates: Updates,
    *,
    scale: Annotated[float, "Coefficient of the merged update."] = 1.0,
    eps: Annotated[float, Range("(0, inf)"), "Multiple of the identity added to every covariance."] = 0.01,
    fraction: Annotated[float, Range("[0, 1]"), "Share of the spectrum that is refined."] = 0.3,
) -> Tensor:
    """W = W_0 + scale * sum t_i (S_i + e_i I) (sum (S_i + e_i I) + 1 p^T)^-1, S_i = t_i^T t_i, t_i centred

    t_i is tau_i without the mean of its rows, e_i is `eps`, and the prior p is the mean row of sum S_i. If
    the traces are uneven, S_i and e_i are divided by tr S_i, p by mean |tau_i|^2, and mean(s) U V^T of the
    leading `fraction` of the singular values s of delta + sum tau_i (S_i - mean S) is added. In the sums,
    weights count as N w_i; experts that do not differ from the base are left out. Tensors that are not
    matrices get the weighted mean.
    """
    if updates.base.ndim != 2:
        return weighted_mean(updates).mul_(scale)
    taus = [updates.tau(i).double() for i in range(len(updates))]
    pairs = [(w * len(updates), tau) for w, tau in zip(updates.weights, taus, strict=True) if tau.any()]
    if not pairs:
        return updates.shaped(updates.empty().zero_())
    energies = [float(torch.linalg.vector_norm(tau)) ** 2 for _, tau in pairs]
    uneven = is_uneven(energies)
    n = updates.base.shape[1]
    A, covariance = (pairs[0][1].new_zeros(n, n) for _ in range(2))
    B, used = torch.zeros_like(pairs[0][1]), []
    for weight, tau in pairs:
        centred = tau - tau.mean(0)
        S = gram_of_columns(centred)
        trace = float(S.trace()) + TINY if uneven else 1.0
        S /= trace
        used.append(S)
        covariance.add_(S, alpha=weight)
        regular = S.clone()
        regular.diagonal().add_(eps / trace)
        A.add_(regular, alpha=weight)
        B.add_(product(centred, regular), alpha=weight)
    prior = covariance.mean(0) / (statistics.mean(energies) + TINY if uneven else 1.0)
    delta = torch.linalg.solve(A + prior, B, left=False)
    if uneven:
        residual = sum(w * product(tau, S - A / len(pairs)) for (w, tau), S in zip(pairs, used, strict=True))
        delta += leading_isotropic(delta + residual, fraction)
    return (scale * delta).to(updates.dtype)


def is_uneven(energies: list[float]) -> bool:
    """Whether Var(log tr) / mean(log tr)^2 of the experts' |tau_i|^2 is above the threshold."""
    logs = [math.log(energy + TINY) for energy in energies]
    if len(logs) < 2:
        return False
    return statistics.variance(logs) / (statistics.mean(logs) ** 2 + TINY) > UNEVEN


def leading_isotropic(fused: Tensor, fraction: float) -> Tensor:
    """mean(s) U V^T of the leading share of the singular values."""
    U, S, Vh = torch.linalg.svd(fused, full_matrices=False)
    k = int(len(S) * fraction)
    return S[:k].mean() * (U[:, :k] @ Vh[:k]) if k else torch.zeros_like(fused)


ACE = Baseline(ace)
