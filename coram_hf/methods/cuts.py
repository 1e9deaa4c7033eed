"""Cuts: the magnitude of an update's k-th largest entry, found exactly without sorting its entries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from coram_hf.geometry.slices import as_rows, row_blocks
from coram_hf.methods.updates import Updates

SMALL = 1 << 16
"""Number of entries up to which a cut is found by selection among all of them."""
SAMPLE, LARGEST_SAMPLE = 1 << 15, 1 << 21
"""Smallest and largest number of entries from which the range around a cut is estimated."""
DEVIATIONS = 6
"""Half the width of that range, in standard deviations of a quantile of the sample."""


def tensor_cuts(updates: Updates, densities: Sequence[float]) -> list[float]:
    """The magnitude of the k-th largest entry of each tau_i, k = int(density * size), at least 1.

    It is infinite for density 0. In a large tensor, one pass counts the entries above a narrow range that is
    estimated from a sample, and collects those within it, among which the cut is selected.
    """
    size, on_cpu = updates.base.numel(), updates.base.device.type == "cpu"
    if size <= SMALL or updates.dtype != torch.float32 or not on_cpu:
        return [magnitude_cut(updates.tau(i), d) if d > 0 else math.inf for i, d in enumerate(densities)]
    brackets = [_bracket(updates, i, density) for i, density in enumerate(densities)]
    for _, taus in updates.blocks():
        for tau, bracket in zip(taus, brackets, strict=True):
            bracket.add(tau.abs_().flatten().numpy())
    cuts = []
    for i, (density, bracket) in enumerate(zip(densities, brackets, strict=True)):
        found = bracket.largest(max(1, int(density * size)))
        if found is None:  # the sample was not like the tensor
            found = global_cut(partial(_blocks, updates, i), density) if density > 0 else math.inf
        cuts.append(found if density > 0 else math.inf)
    return cuts


class Bracket:
    """The k-th largest of many numbers, if it is in a range of which only the inside is collected."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._high = low, high
        self._above = self._at_high = self._at_low = 0
        self._inside: list[np.ndarray] = []

    def add(self, numbers: np.ndarray) -> None:
        """Count numbers, and keep those between the ends of the range, where many may be equal."""
        self._above += int(np.count_nonzero(numbers > self._high))
        self._at_high += int(np.count_nonzero(numbers == self._high))
        if self._low < self._high:
            self._at_low += int(np.count_nonzero(numbers == self._low))
            self._inside.append(numbers[(numbers > self._low) & (numbers < self._high)])

    def largest(self, k: int) -> float | None:
        """The k-th largest number; None if it is outside the range."""
        inside = np.concatenate([*self._inside, np.empty(0, np.float32)])
        for count, found in ((self._above, None), (self._at_high, self._high)):
            if k <= count:
                return found
            k -= count
        if k <= len(inside):
            inside.partition(len(inside) - k)
            return float(inside[len(inside) - k])
        return self._low if k <= len(inside) + self._at_low else None


def _blocks(updates: Updates, i: int) -> Iterator[Tensor]:
    return (updates.tau(i, rows) for rows in row_blocks(updates.base))


def _bracket(updates: Updates, i: int, density: float) -> Bracket:
    """A range that most probably contains the cut of tau_i, from entries on a regular grid."""
    base, expert = as_rows(updates.base), as_rows(updates.experts[i])
    step = max(1, base.numel() // min(LARGEST_SAMPLE, max(SAMPLE, base.numel() // 64)))
    down = math.isqrt(step) if base.ndim > 1 else 1
    grid = tuple(slice(None, None, by) for by in (down, max(1, step // down)))[-base.ndim :]
    tau = expert[grid].to(torch.float32, copy=True).sub_(base[grid])
    sample = tau.mul_(updates.factors[i]).abs_().flatten().numpy()
    count = len(sample)
    margin = DEVIATIONS * math.sqrt(density * (1 - density) / count) + 2 / count
    lowest, highest = math.ceil((density + margin) * count), math.floor((density - margin) * count)
    sample.partition([max(0, count - lowest), min(count - 1, count - highest)])
    low = float(sample[count - lowest]) if lowest <= count else 0.0
    high = float(sample[count - highest]) if highest >= 1 else math.inf
    return Bracket(low, high)


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
