"""Numerical audit: how well rotations survive their logarithm, and how well slices are conditioned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coram_hf.geometry.anatomy import CONTRAST
from coram_hf.geometry.rotations import NEAR_PI
from coram_hf.report.diagnostics.findings import Findings

Array = np.ndarray[Any, Any]
BINS = 30


def audit_numbers(findings: Findings) -> dict[str, Any]:
    """The paper's table of the geometric operators.

    rotation_log: mean and largest |exp(log Q) - Q| / |Q| over all slices and experts, and how many rotations
    turn by more than 3. condition: of S_0, sigma_max / sigma_min, by way of slicing; histogram: its log10.
    """
    whole, spread = findings.whole, findings.engine.config.spread
    errors, angles = _flat(whole.errors), _flat(whole.angles)
    ways = (spread or "contiguous", "contiguous" if spread else CONTRAST)
    conditions = {ways[0]: _flat(whole.conditions), ways[1]: _flat(whole.contrast)}
    finite = np.log10(_finite(np.concatenate(list(conditions.values()))))
    edges = np.histogram_bin_edges(finite, BINS) if len(finite) else np.arange(2.0)
    return {
        "rotation_log": {
            "rotations": len(errors),
            "mean_error": float(errors.mean()) if len(errors) else None,
            "max_error": float(errors.max()) if len(errors) else None,
            "near_pi": int((angles > NEAR_PI).sum()),
            "angles": _histogram(angles, np.histogram_bin_edges(angles, BINS)),
        },
        "condition": {way: _conditioning(conditions[way], edges) for way in sorted(ways)},
        "frameless": whole.frameless,
    }


def _conditioning(conditions: Array, edges: Array) -> dict[str, Any]:
    finite = _finite(conditions)
    quantiles = np.quantile(finite, (0.5, 0.95, 1.0)).tolist() if len(finite) else (None,) * 3
    return {
        "slices": len(conditions),
        "rank_deficient": len(conditions) - len(finite),
        **dict(zip(("median", "p95", "max"), quantiles, strict=True)),
        "histogram": _histogram(np.log10(finite), edges),
    }


def _histogram(values: Array, edges: Array) -> dict[str, list[float]]:
    """Counts between edges."""
    return {"edges": edges.tolist(), "counts": np.histogram(values, edges)[0].tolist()}


def _finite(values: Array) -> Array:
    return values[np.isfinite(values)]


def _flat(parts: Sequence[Tensor]) -> Array:
    return torch.cat(list(parts)).numpy() if parts else np.zeros(0)
