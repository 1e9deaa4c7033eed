"""Conflict: the share of slice columns on which an expert works against the mean update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.geometry.anatomy import Anatomy
    from coram_hf.report.diagnostics.findings import Findings


def numbers(findings: Findings) -> dict[str, Any]:
    """Flagged columns, <tau_i[:, j], taubar[:, j]> < 0, over all experts, by expert, and by layer."""
    whole = findings.whole
    shares = (whole.flagged.double() / whole.columns).tolist()
    return {
        "rate": rate(whole),
        "by_expert": dict(zip(findings.experts, shares, strict=True)),
        "by_layer": {layer: rate(anatomy) for layer, anatomy in findings.by_layer().items()},
    }


def rate(anatomy: Anatomy) -> float:
    """The share of flagged columns, over all experts."""
    return float(anatomy.flagged.sum()) / (anatomy.columns * len(anatomy.flagged))


def tables(numbers: Numbers) -> list[Table]:
    """Shares of columns by expert and by layer."""
    found = numbers["conflict"]
    shares = [*found["by_expert"].items(), ("all", found["rate"])]
    return [
        Table("Conflicting columns by expert", ["expert", "share of columns"], shares),
        Table("By layer", ["layer", "share of columns"], list(found["by_layer"].items())),
    ]


SECTION = Section(
    "conflict",
    "Shares of columns on which experts work against the mean update.",
    numbers,
    tables,
    entries=True,
)
