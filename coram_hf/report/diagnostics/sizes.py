"""Dispersion: how uneven the experts' updates are, where that stands in the paper, and what it decides."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from coram_hf.amplitude import UNEXPLORED_DISPERSION, kappa_rule, measure_amplitude
from coram_hf.report.diagnostics.findings import Findings
from coram_hf.report.figures import PAPER_BASES

THRESHOLDS = range(4, 13)
"""D_0 of the paper's sensitivity table."""


def dispersion_numbers(findings: Findings) -> dict[str, Any]:
    """r_i over all targets and by layer, D = max r / min r, and the paper's bases below and above it."""
    amplitude = findings.engine.amplitude
    D, (low, high) = amplitude.dispersion, UNEXPLORED_DISPERSION
    below = [name for name, value in PAPER_BASES.items() if value <= D]
    above = [name for name, value in PAPER_BASES.items() if value > D]
    layers = {layer: findings.relative(anatomy) for layer, anatomy in findings.by_layer().items()}
    return {
        "D": D,
        "unbalanced_D": amplitude.unbalanced_dispersion,
        "relative_updates": dict(amplitude.relative_updates),
        "by_layer": {
            expert: {layer: found[expert] for layer, found in layers.items()} for expert in findings.experts
        },
        "kappa": amplitude.kappa,
        "lam": findings.lam,
        "threshold": findings.engine.config.dispersion_threshold,
        "paper": dict(PAPER_BASES),
        "below": max(below, key=PAPER_BASES.__getitem__, default=None),
        "above": min(above, key=PAPER_BASES.__getitem__, default=None),
        "unexplored": low < D < high or D > max(PAPER_BASES.values()),
    }


def threshold_numbers(findings: Findings) -> dict[str, dict[str, float | None]]:
    """kappa and lambda of the rule for thresholds D_0 from 4 to 12."""
    engine = findings.engine
    by_rule = replace(engine.config, kappa=None, lam=None)
    amplitude = measure_amplitude(engine.measured, by_rule)
    c_rms = findings.c_rms(findings.whole) if by_rule.scale == "c_rms" else None
    found: dict[str, dict[str, float | None]] = {}
    for threshold in THRESHOLDS:
        D = amplitude.dispersion
        kappa = kappa_rule(D, threshold) if math.isfinite(D) else None
        found[str(threshold)] = {
            "kappa": kappa,
            "lam": replace(amplitude, kappa=kappa).coefficient(by_rule, c_rms),
        }
    return found
