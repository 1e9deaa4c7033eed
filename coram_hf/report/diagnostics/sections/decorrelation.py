"""Decorrelation: how far the experts use the same input directions, before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.geometry.anatomy import Anatomy
    from coram_hf.report.diagnostics.findings import Findings

FORMULAS = {
    "c_rms_ratio": "RMS_i |tau~_i| / |delta| / sqrt(N): 1 for updates at right angles to each other",
    "overlap_before": "mean over pairs of <G_i, G_j> / (|G_i| |G_j|), with G_i = tau_i^T tau_i",
    "overlap_after": "the same of the decorrelated updates tau~_i",
}


def numbers(findings: Findings) -> dict[str, Any]:
    """The overlap of the experts' inputs and c_RMS / sqrt(N), over all targets and by matrix.

    None where the configuration does not decorrelate.
    """
    return {
        "how": findings.config.decorrelate,
        **_numbers(findings, findings.whole),
        "by_matrix": {name: _numbers(findings, anatomy) for name, anatomy in findings.targets.items()},
    }


def _numbers(findings: Findings, anatomy: Anatomy) -> dict[str, float | None]:
    from coram_hf.report.decorrelation import decorrelation_numbers

    found = anatomy.decorrelation.tolist() if anatomy.decorrelation.ndim else []
    square = findings.merged_square(anatomy) if found else 0.0
    known = decorrelation_numbers(found, len(findings.experts), square, findings.amplitude.sqrt_n)
    return known or dict.fromkeys(FORMULAS)


def tables(numbers: Numbers) -> list[Table]:
    """The numbers over all targets with their formulas, and by matrix."""
    found = numbers["decorrelation"]
    whole = [[name, found[name], formula] for name, formula in FORMULAS.items()]
    header = ["matrix", "c_RMS / sqrt(N)", "overlap before", "overlap after"]
    rows = [[name, *(at[key] for key in FORMULAS)] for name, at in found["by_matrix"].items()]
    return [
        Table(f"Decorrelation by {found['how'] or 'nothing'}", ["number", "value", "formula"], whole),
        Table("Decorrelation by matrix", header, rows),
    ]


SECTION = Section(
    "decorrelation",
    "Overlap of the experts' input directions before and after decorrelation, and c_RMS / sqrt(N) after it.",
    numbers,
    tables,
    geometry=True,
)
