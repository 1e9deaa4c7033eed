"""Means, quantiles and histograms of what the walk has collected from every slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coram_hf.geometry.rotations import NEAR_PI

Array = np.ndarray[Any, Any]
BINS = 30


def rotation_log(errors: Sequence[Tensor], angles: Sequence[Tensor]) -> dict[str, Any]:
    """Mean and largest error, the number of rotations near pi, and a histogram of the angles."""
    error, angle = _flat(errors), _flat(angles)
    return {
        "rotations": len(error),
        "mean_error": float(error.mean()) if len(error) else None,
        "max_error": float(error.max()) if len(error) else None,
        "near_pi": int((angle > NEAR_PI).sum()),
        "angles": _histogram(angle, np.histogram_bin_edges(angle, BINS)),
    }


def conditioning(conditions: Mapping[str, Sequence[Tensor]]) -> dict[str, dict[str, Any]]:
    """Quantiles of condition numbers by kind of slicing, and histograms of their log10 with shared edges.

    A slice whose condition number is infinite is rank-deficient; it is counted, and left out of the rest.
    """
    flat = {way: _flat(parts) for way, parts in conditions.items()}
    finite = {way: found[np.isfinite(found)] for way, found in flat.items()}
    every = np.log10(np.concatenate(list(finite.values())))
    edges = np.histogram_bin_edges(every, BINS) if len(every) else np.arange(2.0)
    return {
        way: {
            "slices": len(flat[way]),
            "rank_deficient": len(flat[way]) - len(found),
            **_quantiles(found),
            "histogram": _histogram(np.log10(found), edges),
        }
        for way, found in finite.items()
    }


def _quantiles(values: Array) -> dict[str, float | None]:
    found = np.quantile(values, (0.5, 0.95, 1.0)).tolist() if len(values) else (None,) * 3
    return dict(zip(("median", "p95", "max"), found, strict=True))


def _histogram(values: Array, edges: Array) -> dict[str, list[float]]:
    """Counts between edges."""
    return {"edges": edges.tolist(), "counts": np.histogram(values, edges)[0].tolist()}


def _flat(parts: Sequence[Tensor]) -> Array:
    return torch.cat(list(parts)).numpy() if parts else np.zeros(0)
