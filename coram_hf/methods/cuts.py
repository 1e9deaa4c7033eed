"""Cuts: the magnitude of an update's k-th largest entry, found exactly without sorting its entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from coram_hf.geometry.slices import as_rows, row_blocks
from coram_hf.methods.updates import Updates

SMALL = 1 << 16
"""Number of entries up to which a cut is found by selection among all of them."""
SAMPLE = 1 << 15
"""Number of entries from which the bracket around a cut is estimated."""
DEVIATIONS = 6
"""Half the width of a bracket, in standard deviations of a quantile of the sample."""


def tensor_cuts(updates: Updates, densities: Sequence[float]) -> list[float]:
    """The magnitude of the k-th largest entry of each tau_i, k = int(density * size), at least 1.

    It is infinite for density 0. In a large tensor, one pass counts the entries above a bracket estimated
    from a sample and collects those within it, among which the cut is selected.
    """
    size, on_cpu = updates.base.numel(), updates.base.device.type == "cpu"
    if size <= SMALL or updates.dtype != torch.float32 or not on_cpu:
        return [magnitude_cut(updates.tau(i), d) if d > 0 else math.inf for i, d in enumerate(densities)]
    brackets = [_bracket(updates, i, density) for i, density in enumerate(densities)]
    above = [0] * len(updates)
    within: list[list[np.ndarray]] = [[] for _ in densities]
    for _, taus in updates.blocks():
        for i, (tau, (low, high)) in enumerate(zip(taus, brackets, strict=True)):
            sizes = tau.abs_().flatten().numpy()
            above[i] += int(np.count_nonzero(sizes > high))
            within[i].append(sizes[(sizes >= low) & (sizes <= high)])
    cuts = []
    for i, density in enumerate(densities):
        rank, found = max(1, int(density * size)) - above[i], np.concatenate(within[i])
        if density == 0:
            cuts.append(math.inf)
        elif 1 <= rank <= len(found):
            cuts.append(float(np.partition(found, len(found) - rank)[len(found) - rank]))
        else:  # the sample was not like the tensor
            cuts.append(global_cut(partial(_blocks, updates, i), density))
    return cuts


def _blocks(updates: Updates, i: int) -> Iterator[Tensor]:
    return (updates.tau(i, rows) for rows in row_blocks(updates.base))


def _bracket(updates: Updates, i: int, density: float) -> tuple[float, float]:
    """Magnitudes that most probably enclose the cut of tau_i, from entries on a regular grid."""
    base, expert = as_rows(updates.base), as_rows(updates.experts[i])
    step = max(1, base.numel() // SAMPLE)
    down = math.isqrt(step) if base.ndim > 1 else 1
    across = max(1, step // down)
    grid = (
        (slice(None, None, across),)
        if base.ndim == 1
        else (slice(None, None, down), slice(None, None, across))
    )
    sample = (expert[grid].float() - base[grid].float()).mul_(updates.factors[i]).abs_().flatten()
    count = len(sample)
    margin = DEVIATIONS * math.sqrt(density * (1 - density) / count) + 2 / count
    lowest, highest = math.ceil((density + margin) * count), math.floor((density - margin) * count)
    low = float(sample.kthvalue(count - lowest + 1).values) if lowest <= count else 0.0
    high = float(sample.kthvalue(count - highest + 1).values) if highest >= 1 else math.inf
    return low, high


def above(tau: Tensor, cut: float) -> Tensor:
    """The entries whose magnitude reaches the cut; the others are zero."""
    if cut <= 0:
        return tau
    below = torch.nextafter(torch.tensor(cut, dtype=tau.dtype), torch.tensor(-math.inf, dtype=tau.dtype))
    return torch.nn.functional.hardshrink(tau, below.item())


def magnitude_cut(tau: Tensor, density: float) -> float:
    """The magnitude of the k-th largest entry, k = int(density * size), at least 1."""
    magnitudes = tau.abs().flatten()
    keep = max(1, int(density * magnitudes.numel()))
    return magnitudes.kthvalue(magnitudes.numel() - keep + 1).values.item() if len(magnitudes) else 0.0


def global_cut(blocks: Callable[[], Iterator[Tensor]], density: float) -> float:
    """The magnitude of the k-th largest entry of many tensors, in two counting passes over them.

    Non-negative floats sort like their bits read as integers, so the upper half of the k-th largest
    pattern is found by counting upper halves, and the lower half by counting within that upper half.
    """
    upper = _count(blocks(), lambda bits: bits >> 16)
    keep = max(1, int(density * int(upper.sum())))
    high, above = _kth_from_top(upper, keep)
    lower = _count(blocks(), lambda bits: bits[bits >> 16 == high] & 0xFFFF)
    low, _ = _kth_from_top(lower, keep - above)
    return torch.tensor([high << 16 | low], dtype=torch.int32).view(torch.float32).item()


def _count(blocks: Iterator[Tensor], half: Callable[[Tensor], Tensor]) -> Tensor:
    counts = torch.zeros(1 << 16, dtype=torch.int64)
    for block in blocks:
        bits = block.abs().to("cpu", torch.float32).flatten().view(torch.int32)
        counts += torch.bincount(half(bits), minlength=1 << 16)
    return counts


def _kth_from_top(counts: Tensor, k: int) -> tuple[int, int]:
    """The bin with the k-th largest value, and the number of values in the bins above it."""
    from_top = counts.flip(0).cumsum(0)
    position = int(torch.searchsorted(from_top, k))
    above = int(from_top[position - 1]) if position else 0
    return len(counts) - 1 - position, above
