"""Dispersion: how uneven the experts' updates are, and where that stands among the paper's bases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from coram_hf.amplitude import UNEXPLORED_DISPERSION, dispersion
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
        "merged": findings.is_merged,
        "threshold": findings.config.dispersion_threshold,
        "paper": dict(PAPER_BASES),
        "below": max(below, key=PAPER_BASES.__getitem__, default=None),
        "above": min(above, key=PAPER_BASES.__getitem__, default=None),
        "without": _without(findings),
        "dominant": _dominant(findings),
        "unexplored": low < D < high or D > max(PAPER_BASES.values()),
    }


def _without(findings: Findings) -> dict[str, float | None]:
    """D of the other experts, without each of them; None for fewer than two others or infinite D."""
    relative = {
        name: factor * r
        for (name, r), factor in zip(
            findings.amplitude.relative_updates.items(), findings.amplitude.factors, strict=True
        )
    }
    found = {}
    for name in relative:
        others = {other: r for other, r in relative.items() if other != name}
        D = dispersion(others) if len(others) > 1 else math.inf
        found[name] = D if math.isfinite(D) else None
    return found


def _dominant(findings: Findings) -> dict[str, int]:
    """In how many target matrices each expert has the largest r_i."""
    count = dict.fromkeys(findings.experts, 0)
    for anatomy in findings.targets.values():
        sizes = {name: r for name, r in findings.relative(anatomy).items() if r}
        if sizes:
            count[max(sizes, key=sizes.__getitem__)] += 1
    return count


def tables(numbers: Numbers) -> list[Table]:
    """r_i by expert, D among the paper's bases, and r_i by layer."""
    found = numbers["dispersion"]
    experts = list(found["relative_updates"])
    layers = list(next(iter(found["by_layer"].values())))
    known = [*found["paper"].items(), ("this merge", found["D"])]
    return [
        Table(
            "Update sizes",
            ["expert", "r_i", "matrices where it is the largest", "D without it"],
            [
                [name, r, found["dominant"][name], found["without"][name]]
                for name, r in found["relative_updates"].items()
            ],
        ),
        Table("D among the paper's bases", ["base", "D"], sorted(known, key=lambda row: float(row[1]))),
        Table(
            "r_i by layer",
            ["layer", *experts],
            [[layer, *(found["by_layer"][expert][layer] for expert in experts)] for layer in layers],
        ),
    ]


SECTION = Section(
    "dispersion",
    "Update sizes r_i by expert and layer, who has the largest, D with and without each expert, and where "
    "it stands among the paper's bases.",
    numbers,
    tables,
)
