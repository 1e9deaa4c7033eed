"""What decorrelation did, in three numbers."""

from __future__ import annotations

from collections.abc import Sequence

from coram_hf.amplitude import contraction
from coram_hf.geometry.decorrelated import Decorrelation, mean_overlap


def decorrelation_numbers(
    numbers: Sequence[float], n_experts: int, merged_square: float, sqrt_n: float
) -> dict[str, float | None]:
    """c_RMS / sqrt(N) of the decorrelated updates, and the overlap of the experts' inputs before and after.

    From the flat numbers of a `Decorrelation` and |W_merge - W_0|^2; empty if nothing was decorrelated.
    """
    if not numbers:
        return {}
    found = Decorrelation.of(numbers, n_experts)
    c_rms = contraction(found.energies.sqrt().tolist(), merged_square**0.5)
    return {
        "c_rms_ratio": None if c_rms is None else c_rms / sqrt_n,
        "overlap_before": mean_overlap(found.before),
        "overlap_after": mean_overlap(found.after),
    }
