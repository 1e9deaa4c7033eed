"""Ownership: whose update is the largest on each row, and how similar the experts' updates are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from torch import Tensor

    from coram_hf.report.diagnostics.findings import Findings


def numbers(findings: Findings) -> dict[str, Any]:
    """Shares of target rows by owner, and pairwise cosine and sign agreement of the updates.

    Sign agreement: of the entries that both experts move, the share that they move in the same direction.
    """
    whole = findings.whole
    shares = (whole.owned.double() / whole.rows).tolist()
    norms = whole.inner.diagonal().sqrt()
    return {
        "rows": dict(zip(findings.experts, shares, strict=True)),
        "unowned": max(0.0, 1 - math.fsum(shares)),
        "cosine": _pairs(findings.experts, whole.inner / (norms[:, None] * norms)),
        "sign_agreement": _pairs(findings.experts, whole.agreeing / whole.moved),
    }


def _pairs(experts: list[str], values: Tensor) -> dict[str, dict[str, float | None]]:
    """A value for every pair of experts; None where an update is zero."""
    return {
        one: {
            other: value if math.isfinite(value) else None for other, value in zip(experts, row, strict=True)
        }
        for one, row in zip(experts, values.tolist(), strict=True)
    }


def tables(numbers: Numbers) -> list[Table]:
    """Shares of rows, and the two numbers for every pair of experts."""
    found = numbers["ownership"]
    experts = list(found["rows"])
    pairs = [
        Table(title, ["expert", *experts], [[one, *found[key][one].values()] for one in experts])
        for key, title in (("cosine", "Cosine of the updates"), ("sign_agreement", "Sign agreement"))
    ]
    shares = [*found["rows"].items(), ("nobody", found["unowned"])]
    return [Table("Rows by owner", ["expert", "share of rows"], shares), *pairs]


SECTION = Section(
    "ownership",
    "Shares of rows by expert, and pairwise cosine and sign agreement.",
    numbers,
    tables,
    entries=True,
)
