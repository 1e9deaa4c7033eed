"""Retention: how much of the experts' update merged models keep, by group of modules and by matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from coram_hf.report.diagnostics.section import Numbers, Section
from coram_hf.report.retention import GROUPS, Retained
from coram_hf.report.tables import Table

if TYPE_CHECKING:
    from coram_hf.report.diagnostics.findings import Findings


def numbers(findings: Findings) -> dict[str, Any]:
    """r_group = |W_merge - W_0| / RMS_i |W_i - W_0| by merged model, from its weights."""
    updates = {name: record.updates for name, record in findings.survey.tensors.items()}
    return {model: Retained(moved, updates).by_group() for model, moved in findings.moved.items()}


def kept(findings: Findings, name: str) -> dict[str, float | None]:
    """|W_merge - W_0| / RMS_i |W_i - W_0| of one parameter, by merged model; None if no expert moved it."""
    squares = findings.survey.tensors[name].updates
    rms = math.fsum(squares) / len(squares)
    return {model: math.sqrt(moved[name] / rms) if rms else None for model, moved in findings.moved.items()}


def tables(numbers: Numbers) -> list[Table]:
    """Retention by group and merged model; no table without a merged model."""
    found = numbers["retention"]
    groups = [group for group in GROUPS if any(group in of for of in found.values())]
    rows = [[group, *(of.get(group) for of in found.values())] for group in groups]
    return [Table("Retention by group of modules", ["group", *found], rows)] if found else []


SECTION = Section(
    "retention",
    "How much of the experts' update merged models keep, by group of modules.",
    numbers,
    tables,
    merged=True,
)
