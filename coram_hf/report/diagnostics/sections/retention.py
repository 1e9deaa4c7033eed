"""Retention: how much of the experts' update merged models keep, by kind of parameter and by matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.kinds import Retained
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.report.diagnostics.findings import Findings


def numbers(findings: Findings) -> dict[str, Any]:
    """r_kind = |W_merge - W_0| / RMS_i |W_i - W_0| by merged model, from its weights."""
    updates = {name: record.updates for name, record in findings.survey.tensors.items()}
    return {
        model: Retained(moved, updates, findings.inputs.kinds).by_kind()
        for model, moved in findings.moved.items()
    }


def kept(findings: Findings, name: str) -> dict[str, float | None]:
    """|W_merge - W_0| / RMS_i |W_i - W_0| of one parameter, by merged model; None if no expert moved it."""
    squares = findings.survey.tensors[name].updates
    rms = math.fsum(squares) / len(squares)
    return {model: math.sqrt(moved[name] / rms) if rms else None for model, moved in findings.moved.items()}


def tables(numbers: Numbers) -> list[Table]:
    """Retention by kind and merged model; no table without a merged model."""
    found = numbers["retention"]
    kinds = dict.fromkeys(kind for of in found.values() for kind in of)
    rows = [[kind, *(of.get(kind) for of in found.values())] for kind in kinds]
    return [Table("Retention by kind of parameter", ["kind", *found], rows)] if found else []


SECTION = Section(
    "retention",
    "How much of the experts' update merged models keep, by kind of parameter.",
    numbers,
    tables,
    merged=True,
)
