"""Threshold: what the kappa rule decides, as the threshold D_0 moves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coram_hf.amplitude import kappa_rule, measure_amplitude
from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.report.diagnostics.findings import Findings

THRESHOLDS = range(4, 13)
"""D_0 of the paper's sensitivity table."""


def numbers(findings: Findings) -> dict[str, Any]:
    """kappa and lambda of the rule for thresholds D_0 from 4 to 12."""
    by_rule = replace(findings.config, kappa=None, lam=None)
    amplitude = measure_amplitude(findings.measured, by_rule)
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


def tables(numbers: Numbers) -> list[Table]:
    """kappa and lambda by threshold."""
    rows = [[int(d), at["kappa"], at["lam"]] for d, at in numbers["threshold"].items()]
    return [Table("Threshold sensitivity", ["D_0", "kappa", "lambda"], rows)]


SECTION = Section(
    "threshold",
    "kappa and lambda by the rule, for thresholds D_0 from 4 to 12.",
    numbers,
    tables,
    geometry=True,
)
