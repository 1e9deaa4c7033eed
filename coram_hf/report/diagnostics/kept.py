"""Retention: how much of the experts' update merged models keep, by group of modules and by matrix."""

from __future__ import annotations

import math

from coram_hf.report.diagnostics.findings import Findings
from coram_hf.report.retention import Retained


def retention_numbers(findings: Findings) -> dict[str, dict[str, float]]:
    """r_group = |W_merge - W_0| / RMS_i |W_i - W_0| by merged model, from its weights."""
    updates = {name: record.updates for name, record in findings.engine.survey.tensors.items()}
    return {model: Retained(moved, updates).by_group() for model, moved in findings.moved.items()}


def retained(findings: Findings, name: str) -> dict[str, float | None]:
    """The same for one parameter."""
    squares = findings.engine.survey.tensors[name].updates
    rms = math.fsum(squares) / len(squares)
    return {model: math.sqrt(moved[name] / rms) if rms else None for model, moved in findings.moved.items()}
