"""Branches: what each subset of the factors makes of the updates, and how Q and V cancel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.report.diagnostics.findings import Findings

SUBSETS = {
    "s": "dS only",
    "q": "Q only",
    "v": "V only",
    "qs": "Q and dS",
    "sv": "dS and V",
    "lr": "Q and V",
    "full": "Q, dS and V",
}
"""The branches, in the order of the tables."""


def numbers(findings: Findings) -> dict[str, Any]:
    """|delta| over |delta_TA| and |W_0|, and cos(delta, delta_TA), with delta_TA = sum_i (W_i - W_0)."""
    whole = findings.whole
    origin, task = math.sqrt(whole.base), math.sqrt(max(0.0, whole.task))
    squares, dots = findings.by_branch(whole.squares), findings.by_branch(whole.dots)
    found: dict[str, dict[str, float | None]] = {}
    for branch, square in squares.items():
        norm = math.sqrt(max(0.0, square))
        found[branch] = {
            "norm_ratio": norm / task if task else None,
            "relative": norm / origin if origin else None,
            "cosine": dots[branch] / (norm * task) if norm and task else None,
        }
    return found


def cancellation(findings: Findings) -> dict[str, Any]:
    """|delta_QV| / sqrt(|delta_Q|^2 + |delta_V|^2): 1 for updates at right angles, 0 if they cancel."""
    squares = findings.by_branch(findings.whole.squares)
    apart = squares["q"] + squares["v"]
    return {"ratio": math.sqrt(max(0.0, squares["lr"]) / apart) if apart > 0 else None}


def tables(numbers: Numbers) -> list[Table]:
    """Size and direction by subset, and the cancellation of Q and V."""
    found = numbers["branches"]
    keys = ("norm_ratio", "relative", "cosine")
    rows = [[name, *(found[name][key] for key in keys), text] for name, text in SUBSETS.items()]
    ratio = numbers["cancellation"]["ratio"]
    return [
        Table(
            "Subsets of the factors",
            ["subset", "|delta| / |delta_TA|", "|delta| / |W_0|", "cosine", "merged"],
            rows,
        ),
        Table("Cancellation", ["ratio", "value"], [["|delta_QV| / sqrt(|delta_Q|^2 + |delta_V|^2)", ratio]]),
    ]


SECTION = Section(
    "branches",
    "Size and direction of the update that each subset of the factors makes.",
    numbers,
    tables,
    extras={"cancellation": cancellation},
    geometry=True,
)
