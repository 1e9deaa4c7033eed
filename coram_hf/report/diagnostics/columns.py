"""Conflict: the share of the columns of slices on which an expert works against the mean update."""

from __future__ import annotations

from typing import Any

from coram_hf.geometry.anatomy import Anatomy
from coram_hf.report.diagnostics.findings import Findings


def conflict_numbers(findings: Findings) -> dict[str, Any]:
    """Flagged columns, <tau_i[:, j], taubar[:, j]> < 0, over all experts, by expert, and by layer."""
    whole = findings.whole
    shares = (whole.flagged.double() / whole.columns).tolist()
    return {
        "rate": conflict_rate(whole),
        "by_expert": dict(zip(findings.experts, shares, strict=True)),
        "by_layer": {layer: conflict_rate(anatomy) for layer, anatomy in findings.by_layer().items()},
    }


def conflict_rate(anatomy: Anatomy) -> float:
    """The share of flagged columns, of all experts together."""
    return float(anatomy.flagged.sum()) / (anatomy.columns * len(anatomy.flagged))
