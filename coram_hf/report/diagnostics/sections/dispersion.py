"""Dispersion: how uneven the experts' updates are, and where that stands among the paper's bases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coram_hf.amplitude import UNEXPLORED_DISPERSION
from coram_hf.report.charts import PAPER_BASES
from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.report.diagnostics.findings import Findings


def numbers(findings: Findings) -> dict[str, Any]:
    """r_i over all targets and by layer, D = max r / min r, and the paper's bases below and above it."""
    amplitude = findings.amplitude
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
        "threshold": findings.config.dispersion_threshold,
        "paper": dict(PAPER_BASES),
        "below": max(below, key=PAPER_BASES.__getitem__, default=None),
        "above": min(above, key=PAPER_BASES.__getitem__, default=None),
        "unexplored": low < D < high or D > max(PAPER_BASES.values()),
    }


def tables(numbers: Numbers) -> list[Table]:
    """r_i by expert, D among the paper's bases, and r_i by layer."""
    found = numbers["dispersion"]
    experts = list(found["relative_updates"])
    layers = list(next(iter(found["by_layer"].values())))
    known = [*found["paper"].items(), ("this merge", found["D"])]
    return [
        Table("Update sizes", ["expert", "r_i"], list(found["relative_updates"].items())),
        Table("D among the paper's bases", ["base", "D"], sorted(known, key=lambda row: float(row[1]))),
        Table(
            "r_i by layer",
            ["layer", *experts],
            [[layer, *(found["by_layer"][expert][layer] for expert in experts)] for layer in layers],
        ),
    ]


SECTION = Section(
    "dispersion",
    "Update sizes r_i by expert and layer, D, and where it stands among the paper's bases.",
    numbers,
    tables,
)
