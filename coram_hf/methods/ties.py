"""TIES: trim small entries, elect a sign for every parameter, merge the entries that agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from coram_hf.config import Range, Varies
from coram_hf.errors import CoramError
from coram_hf.methods.baseline import Baseline, Tensors
from coram_hf.methods.cuts import above, cuts_of, tensor_cuts
from coram_hf.methods.linear import sum_weighted
from coram_hf.methods.mergekit import ties_parameters
from coram_hf.methods.pruning import norm_growth
from coram_hf.methods.updates import Updates

Combine = Literal["mean", "sum"]
Tally = Literal["mean", "sum", "total"]
Sign = Literal["sum", "count"]
Entries = Callable[[Updates], Iterable[Tensor]]


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
    cuts: list[float] = updates.prepared
    if trim == "tensor":
        cuts = updates.once("cuts", partial(tensor_cuts, densities=densities))
    growth = updates.once("growth", partial(_growth, cuts=cuts)) if rescale else []
    weights, how = voices(updates, combine, normalize)
    out = updates.empty()
    for rows, taus in updates.blocks():
        trimmed = [above(tau, cut) for tau, cut in zip(taus, cuts, strict=True)]
        if rescale:
            trimmed = [tau.mul_(factor) for tau, factor in zip(trimmed, growth, strict=True)]
        out[rows] = elect(trimmed, weights, how, sign)
    return updates.shaped(out.mul_(scale))


def _growth(updates: Updates, cuts: Sequence[float]) -> list[float]:
    return [norm_growth(tau := updates.tau(i), above(tau, cut)) for i, cut in enumerate(cuts)]


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
    elected = sum_weighted(votes, weights).ge_(0).mul_(2).sub_(1)
    total, share = torch.zeros_like(elected), torch.zeros_like(elected)
    for tau, weight in zip(taus, weights, strict=True):
        agrees = (tau * elected).gt_(0)
        total.addcmul_(tau, agrees, value=weight)
        share.add_(agrees, alpha=weight)
    if combine == "mean":
        return total.div_(share.add_(torch.le(share, 0, out=elected)))
    return total.mul_(len(taus)) if combine == "sum" else total


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
    by_rows=True,
    prepare=global_cuts,
    presets={"TIES": {}},
    mergebench={"MergeBench TIES": {"density": 0.3, "scale": 0.4, "combine": "sum"}},
    from_mergekit=ties_parameters,
)
