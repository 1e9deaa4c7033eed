"""Experts with decorrelated updates, W_0 + tau~_i, and how far their input subspaces overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from coram_hf.config import CoramConfig, Decorrelate
from coram_hf.geometry.decorrelate import decorrelated, default_rank
from coram_hf.geometry.linalg import gram_of_columns, rows_through_gram
from coram_hf.geometry.slices import as_float64, compute_dtype

Factors = tuple[Tensor, Tensor]
"""B (m x r) and A (r x n) of an update B A of low rank."""

PROBES = 16
"""Random directions from which the overlap of wide matrices is estimated."""

EXACT_WIDTH = 256
"""The widest matrix whose overlap is computed exactly."""


ROUNDING = 100
"""Singular values of a core are zero below this multiple of the precision, relative to the largest."""


class Decorrelation(NamedTuple):
    """Sums over matrices: |tau~_i|^2 of every expert, and <G_i, G_j> before and after, with G = tau^T tau."""

    energies: Tensor
    before: Tensor
    after: Tensor

    def flat(self) -> list[float]:
        """All numbers in a list, which can be added to those of other matrices."""
        return torch.cat([part.flatten() for part in self]).tolist()

    @classmethod
    def of(cls, numbers: Sequence[float], n_experts: int) -> Decorrelation:
        """The inverse of `flat`."""
        size = (n_experts, n_experts)
        energies, before, after = torch.tensor(numbers, dtype=torch.float64).split(
            [n_experts, n_experts**2, n_experts**2]
        )
        return cls(energies, before.view(size), after.view(size))


class Decorrelated(NamedTuple):
    """W_0 + tau~_i of one matrix, and what its decorrelation did."""

    experts: list[Tensor]
    measured: Decorrelation


def decorrelate_experts(
    base: Tensor,
    experts: Sequence[Tensor],
    config: CoramConfig,
    factors: Sequence[float] | None = None,
    device: torch.device | None = None,
) -> Decorrelated:
    """Decorrelate the updates f_i (W_i - W_0) of dense experts.

    Directions that rounding to float32 (float64 for float64 weights) explains count as zero.
    """
    W0 = _loaded(base, config, device, [base.dtype, *(expert.dtype for expert in experts)])
    raw = [expert.detach().to(W0) - W0 for expert in experts]
    before = _shared(raw)
    changed = decorrelated(raw, _how(config), floor=_rounding_floor(base, experts, W0))
    del raw
    return _assembled(W0, _measured(before, changed, factors), changed, factors)


def decorrelate_factors(
    base: Tensor,
    low_rank: Sequence[Factors],
    config: CoramConfig,
    factors: Sequence[float] | None = None,
    device: torch.device | None = None,
) -> Decorrelated:
    """Decorrelate updates B_i A_i of low rank as cores between orthonormal bases of all B's and all A's."""
    W0 = _loaded(base, config, device)
    frame, cores, changed = _decorrelated_cores(low_rank, config, W0)
    measured = _measured(_shared(cores), changed, factors)
    made = [left @ right for left, right in (_between(frame, core) for core in changed)]
    return _assembled(W0, measured, made, factors)


def decorrelated_factors(
    base: Tensor, low_rank: Sequence[Factors], config: CoramConfig, device: torch.device | None = None
) -> list[Factors]:
    """tau~_i of updates B_i A_i of low rank, again as factors; as they are without decorrelation."""
    if config.decorrelate is None:
        return list(low_rank)
    frame, _, changed = _decorrelated_cores(low_rank, config, _loaded(base, config, device))
    return [_between(frame, core) for core in changed]


def _decorrelated_cores(
    low_rank: Sequence[Factors], config: CoramConfig, W0: Tensor
) -> tuple[Factors, list[Tensor], list[Tensor]]:
    """Orthonormal bases of all B's and of all A's, and the cores between them before and after."""
    lefts, rights = [B.detach().to(W0) for B, _ in low_rank], [A.detach().to(W0).mT for _, A in low_rank]
    (Q, R), (P, T) = torch.linalg.qr(torch.cat(lefts, 1)), torch.linalg.qr(torch.cat(rights, 1))
    ranks = [left.shape[1] for left in lefts]
    cores = [r @ t.mT for r, t in zip(R.split(ranks, 1), T.split(ranks, 1), strict=True)]
    rank = default_rank(W0.shape[0], W0.shape[1], len(low_rank))
    return (Q, P), cores, decorrelated(cores, _how(config), rank)


def _loaded(
    base: Tensor,
    config: CoramConfig,
    device: torch.device | None,
    dtypes: Sequence[torch.dtype] = (torch.float64,),
) -> Tensor:
    """W_0 in float64; for `ridge`, which is well-conditioned, as products of weights of these dtypes are."""
    device = base.device if device is None else device
    asked = compute_dtype(config, dtypes, device)
    return base.detach().to(device, asked if config.decorrelate == "ridge" else torch.float64)


def _measured(before: Tensor, after: Sequence[Tensor], factors: Sequence[float] | None) -> Decorrelation:
    scale = torch.tensor([1.0] * len(after) if factors is None else list(factors), dtype=torch.float64)
    norms = torch.stack([torch.linalg.vector_norm(tau).to("cpu", torch.float64) for tau in after])
    squares = (scale[:, None] * scale).square()
    return Decorrelation((scale * norms).square(), before * squares, _shared(after) * squares)


def _assembled(
    W0: Tensor, measured: Decorrelation, updates: Sequence[Tensor], factors: Sequence[float] | None
) -> Decorrelated:
    """W_0 + f_i tau~_i, over float64 updates in place; balancing commutes with every way to decorrelate."""
    base, wide = as_float64(W0), [as_float64(tau) for tau in updates]
    for tau, factor in zip(wide, factors or [1.0] * len(wide), strict=True):
        torch.add(base, tau, alpha=factor, out=tau)
    return Decorrelated(wide, measured)


def _between(frame: Factors, core: Tensor) -> Factors:
    """Q core P^T as factors of the rank of the core."""
    (Q, P), (U, S, Vh) = frame, torch.linalg.svd(core, full_matrices=False)
    rank = int((S > ROUNDING * torch.finfo(S.dtype).eps * float(S[0])).sum()) if len(S) else 0
    return Q @ (U[:, :rank] * S[:rank]), Vh[:rank] @ P.mT


def _shared(updates: Sequence[Tensor]) -> Tensor:
    """<G_i, G_j> with G = tau^T tau; of wide matrices, the mean of <G_i z, G_j z> over random signs z."""
    width = updates[0].shape[1]
    if width <= EXACT_WIDTH:
        images = [gram_of_columns(tau) for tau in updates]
    else:
        seeded = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, (PROBES, width), generator=seeded).to(updates[0])
        probes = (2 * signs - 1) / math.sqrt(PROBES)
        images = [rows_through_gram(probes, tau) for tau in updates]
    flat = torch.stack([image.flatten() for image in images])
    return (flat @ flat.mT).to("cpu", torch.float64)


def mean_overlap(shared: Tensor) -> float | None:
    """The mean over pairs i < j of <G_i, G_j> / (|G_i| |G_j|); None without a pair of non-zero updates."""
    sizes = shared.diagonal().sqrt()
    pairs = [(i, j) for i in range(len(sizes)) for j in range(i) if sizes[i] > 0 and sizes[j] > 0]
    cosines = [float(shared[i, j] / (sizes[i] * sizes[j])) for i, j in pairs]
    return math.fsum(cosines) / len(cosines) if cosines else None


def _how(config: CoramConfig) -> Decorrelate:
    assert config.decorrelate is not None
    return config.decorrelate


def _rounding_floor(base: Tensor, experts: Sequence[Tensor], W0: Tensor) -> float:
    """The largest singular value that rounding weights may cause: noise of eps |W_0| / 2 in every entry."""
    exact = all(t.dtype == torch.float64 for t in (base, *experts))
    m, n = base.shape
    size = float(torch.linalg.vector_norm(W0)) / math.sqrt(max(1, W0.numel()))
    return (
        torch.finfo(torch.float64 if exact else torch.float32).eps / 2 * size * (math.sqrt(m) + math.sqrt(n))
    )
