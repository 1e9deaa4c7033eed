"""TIES: trim small entries, elect a sign for every parameter, merge the entries that agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from coram_hf.config import Range, Varies
from coram_hf.errors import CoramError
from coram_hf.geometry.slices import row_blocks
from coram_hf.methods.baseline import Baseline, Tensors
from coram_hf.methods.linear import sum_weighted
from coram_hf.methods.mergekit import ties_parameters
from coram_hf.methods.pruning import norm_growth
from coram_hf.methods.updates import Updates

Combine = Literal["mean", "sum"]
Tally = Literal["mean", "sum", "total"]
Sign = Literal["sum", "count"]
Entries = Callable[[Updates], Iterable[Tensor]]
LARGE = 1 << 24
"""Number of entries above which a tensor's cut is found by counting, not by selection on a copy."""


def ties(
    updates: Updates,
    *,
    density: Annotated[
        float, Varies(by_expert=True), Range("[0, 1]"), "Share of the entries that are kept, by magnitude."
    ] = 0.2,
    scale: Annotated[float, Varies(), "Coefficient of the merged update."] = 1.0,
    combine: Annotated[Combine, "How entries that agree are combined."] = "mean",
    trim: Annotated[Literal["tensor", "global"], "Where the largest entries are sought."] = "tensor",
    sign: Annotated[Sign, "Whether the sum or the number of entries elects the sign."] = "sum",
    normalize: Annotated[bool, "Whether weights in a sum count as N w_i, or as they are given."] = True,
    rescale: Annotated[bool, "Whether what is kept gets the L1 norm of the whole update."] = False,
) -> Tensor:
    """W = W_0 + scale * mean (or sum) of the entries in the top `density` of tau_i that have the elected sign

    The sign is that of the sum of the trimmed tau_i (`sum`) or of their majority (`count`); zero counts as +.
    The top is taken within each tensor, or over all tensors of an expert (`global`, ranked in float32);
    entries that tie with the smallest one kept are kept as well.
    """
    densities = updates.each(density)
    if trim == "global":
        cuts = list(updates.prepared)
    else:
        cuts = [tensor_cut(updates, i, share) for i, share in enumerate(densities)]
    growth = [1.0] * len(updates)
    if rescale:
        growth = [norm_growth(tau := updates.tau(i), _above(tau, cut)) for i, cut in enumerate(cuts)]
    weights, how = voices(updates, combine, normalize)
    out = updates.empty()
    for rows, taus in updates.blocks():
        trimmed = [_above(tau, cut) for tau, cut in zip(taus, cuts, strict=True)]
        if rescale:
            trimmed = [tau.mul_(factor) for tau, factor in zip(trimmed, growth, strict=True)]
        out[rows] = elect(trimmed, weights, how, sign)
    return updates.shaped(out.mul_(scale))


def _above(tau: Tensor, cut: float) -> Tensor:
    return torch.where(tau.abs() >= cut, tau, 0.0)


def voices(updates: Updates, combine: Combine, normalize: bool) -> tuple[tuple[float, ...], Tally]:
    """The weights of an election, and how its entries are combined."""
    if normalize or combine == "mean":
        return updates.weights, combine
    return updates.amounts, "total"


def elect(taus: list[Tensor], weights: tuple[float, ...], combine: Tally, sign: Sign) -> Tensor:
    """Elect a sign for every entry and combine the weighted tau_i that have it.

    `mean` divides by the weights that agree, `sum` multiplies w_i by N, `total` leaves weights as they are.
    """
    votes = taus if sign == "sum" else [tau.sign() for tau in taus]
    elected = torch.where(sum_weighted(votes, weights) >= 0, 1.0, -1.0).to(taus[0].dtype)
    total, share = torch.zeros_like(elected), torch.zeros_like(elected)
    for tau, weight in zip(taus, weights, strict=True):
        agrees = (tau * elected > 0).to(tau.dtype)
        total.addcmul_(tau, agrees, value=weight)
        share.add_(agrees, alpha=weight)
    if combine == "mean":
        return total.div_(torch.where(share > 0, share, 1.0))
    return total.mul_(len(taus)) if combine == "sum" else total


def tensor_cut(updates: Updates, i: int, density: float) -> float:
    """The cut of one tensor; that of a large one is found by counting, without a copy."""
    if density == 0:
        return math.inf
    if updates.base.numel() <= LARGE or updates.dtype != torch.float32:
        return magnitude_cut(updates.tau(i), density)
    return global_cut(lambda: (updates.tau(i, rows) for rows in row_blocks(updates.base)), density)


def magnitude_cut(tau: Tensor, density: float) -> float:
    """The magnitude of the k-th largest entry, k = int(density * size), at least 1."""
    magnitudes = tau.abs().flatten()
    keep = max(1, int(density * magnitudes.numel()))
    return magnitudes.kthvalue(magnitudes.numel() - keep + 1).values.item() if len(magnitudes) else 0.0


def global_cut(blocks: Callable[[], Iterator[Tensor]], density: float) -> float:
    """The magnitude of the k-th largest entry of many tensors, in two counting passes over them."""
    (cut,) = cuts_of(lambda: ((block,) for block in blocks()), (density,))
    return cut


def cuts_of(
    blocks: Callable[[], Iterator[Iterable[Tensor]]], densities: Sequence[float]
) -> tuple[float, ...]:
    """The cut of each expert over all its tensors; a block has one tensor of every expert.

    Non-negative floats sort like their bits read as integers, so the upper half of the k-th largest
    pattern is found by counting upper halves, and the lower half by counting within that upper half.
    """
    found = []
    for upper, density in zip(_count(blocks(), len(densities)), densities, strict=True):
        keep = max(1, int(density * int(upper.sum())))
        high, above = _kth_from_top(upper, keep)
        found.append((high, keep - above))
    highs = [high for high, _ in found]
    lows = [
        _kth_from_top(lower, rest)[0]
        for lower, (_, rest) in zip(_count(blocks(), len(densities), highs), found, strict=True)
    ]
    patterns = [high << 16 | low for high, low in zip(highs, lows, strict=True)]
    return tuple(torch.tensor(patterns, dtype=torch.int32).view(torch.float32).tolist())


def _count(
    blocks: Iterator[Iterable[Tensor]], n_experts: int, highs: Sequence[int] | None = None
) -> list[Tensor]:
    """By expert, how often every upper half of the bits occurs, or with `highs` every lower half below it."""
    counts = [torch.zeros(1 << 16, dtype=torch.int64) for _ in range(n_experts)]
    for block in blocks:
        for i, (count, tensor) in enumerate(zip(counts, block, strict=True)):
            bits = tensor.abs().to("cpu", torch.float32).flatten().view(torch.int32)
            half = bits >> 16 if highs is None else bits[bits >> 16 == highs[i]] & 0xFFFF
            count += torch.bincount(half, minlength=1 << 16)
    return counts


def _kth_from_top(counts: Tensor, k: int) -> tuple[int, int]:
    """The bin with the k-th largest value, and the number of values in the bins above it."""
    from_top = counts.flip(0).cumsum(0)
    position = int(torch.searchsorted(from_top, k))
    above = int(from_top[position - 1]) if position else 0
    return len(counts) - 1 - position, above


def every_tau(updates: Updates) -> Iterator[Tensor]:
    """tau_i of every expert."""
    return map(updates.tau, range(len(updates)))


def global_cuts(
    tensors: Tensors, parameters: Mapping[str, Any], entries: Entries = every_tau
) -> tuple[float, ...] | None:
    """The cut of each expert over all its tensors together, for trim="global"; else None.

    `entries` are what is trimmed of one tensor, by expert.
    """
    if parameters["trim"] != "global":
        return None
    n_experts, given = len(next(tensors())), parameters["density"]
    densities = given if isinstance(given, tuple) else (given,) * n_experts
    if not all(isinstance(density, int | float) and density > 0 for density in densities):
        raise CoramError(
            f'ties: trim="global" needs one positive density per expert for all tensors, found {given!r}'
        )
    return cuts_of(lambda: map(entries, tensors()), densities)


TIES = Baseline(
    ties,
    prepare=global_cuts,
    presets={"TIES": {}},
    mergebench={"MergeBench TIES": {"density": 0.3, "scale": 0.4, "combine": "sum"}},
    from_mergekit=ties_parameters,
)
