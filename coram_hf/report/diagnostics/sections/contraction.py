"""Contraction: how much the merge shrinks the update, and coefficients that would restore it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.report.diagnostics.findings import Findings

FORMULAS = {
    "norm_matching": "|sum_i tau_i / N| / |delta|",
    "energy_ratio": "mean over matrices of sqrt(E_task / E_geo) = sqrt(mean_i |tau_i|^2 / |delta|^2)",
    "gram_cross_term": "sqrt(N sum_i |tau_i|^2 / sum_ij <tau_i, tau_j>)",
    "linear_in_n": "(N + 1) / 2",
    "sqrt_n": "sqrt(N), or 1 / sqrt(sum_i w_i^2) with weights",
    "c_rms": "RMS_i |tau_i| / |delta|",
}
"""With tau_i = W_i - W_0 over all targets, and delta = W_merge - W_0 before amplification.

After decorrelation, sums of tau_i are those of the decorrelated updates; RMS_i |tau_i| is always that of the
updates as they were before.
"""


def numbers(findings: Findings) -> dict[str, Any]:
    """c_RMS beside sqrt(N), over all targets and by matrix, and the other coefficients that need no data."""
    whole, n = findings.whole, len(findings.experts)
    c_rms, ideal = findings.c_rms(whole), findings.amplitude.sqrt_n
    by_matrix = {name: findings.c_rms(anatomy) for name, anatomy in findings.targets.items()}
    known = [c for c in by_matrix.values() if c is not None]
    merged = math.sqrt(findings.merged_square(whole))
    energy = findings.energy(whole)
    coefficients = {
        "norm_matching": math.sqrt(max(0.0, whole.task)) / n / merged if merged else None,
        "energy_ratio": math.fsum(known) / len(known) if known else None,
        "gram_cross_term": math.sqrt(n * energy / whole.task) if whole.task > 0 else None,
        "linear_in_n": (n + 1) / 2,
        "sqrt_n": ideal,
        "c_rms": c_rms,
    }
    return {
        "c_rms": c_rms,
        "sqrt_n": ideal,
        "relative_difference": None if c_rms is None else abs(c_rms - ideal) / ideal,
        "lam": findings.lam,
        "by_matrix": by_matrix,
        "coefficients": coefficients,
    }


def tables(numbers: Numbers) -> list[Table]:
    """The coefficients with their formulas, and c_RMS by matrix."""
    found = numbers["contraction"]
    coefficients = [[name, value, FORMULAS[name]] for name, value in found["coefficients"].items()]
    return [
        Table("Coefficients that need no data", ["coefficient", "value", "formula"], coefficients),
        Table("c_RMS by matrix", ["matrix", "c_RMS"], list(found["by_matrix"].items())),
    ]


SECTION = Section(
    "contraction",
    "c_RMS beside sqrt(N), by matrix, and the other coefficients that need no data.",
    numbers,
    tables,
    geometry=True,
)
