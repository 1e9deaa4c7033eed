"""Threshold: what the kappa rule decides, as the threshold D_0 moves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from coram_hf.amplitude import choose
from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.report.diagnostics.findings import Findings

THRESHOLDS = range(4, 13)
"""D_0 of the paper's sensitivity table."""


def numbers(findings: Findings) -> dict[str, Any]:
    """kappa and lambda of the rule for thresholds D_0 from 4 to 12."""
    by_rule = replace(findings.strength, kappa=None, lam=None)
    c_rms = findings.c_rms(findings.whole) if by_rule.measures_contraction else None
    found: dict[str, dict[str, float | None]] = {}
    for threshold in THRESHOLDS:
        amplitude = choose(findings.survey.measured, replace(by_rule, threshold=threshold), c_rms)
        found[str(threshold)] = {"kappa": amplitude.kappa, "lam": amplitude.lam}
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
