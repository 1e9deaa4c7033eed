"""Branch diagnosis: what each subset of the factors makes of the updates, and how Q and V cancel."""

from __future__ import annotations

import math
from typing import Any

from coram_hf.geometry.branches import BRANCHES
from coram_hf.report.diagnostics.findings import Findings


def branch_numbers(findings: Findings) -> dict[str, dict[str, float | None]]:
    """By subset |delta| / |delta_TA| and cos(delta, delta_TA), with delta_TA = sum_i (W_i - W_0)."""
    whole = findings.whole
    task = math.sqrt(max(0.0, whole.task))
    found: dict[str, dict[str, float | None]] = {}
    for branch, square, dot in zip(BRANCHES, whole.squares.tolist(), whole.dots.tolist(), strict=True):
        norm = math.sqrt(max(0.0, square))
        found[branch] = {
            "norm_ratio": norm / task if task else None,
            "cosine": dot / (norm * task) if norm and task else None,
        }
    return found


def cancellation(findings: Findings) -> dict[str, Any]:
    """|delta_QV| / sqrt(|delta_Q|^2 + |delta_V|^2): 1 for updates at right angles, 0 if they cancel."""
    squares = dict(zip(BRANCHES, findings.whole.squares.tolist(), strict=True))
    apart = squares["q"] + squares["v"]
    return {"ratio": math.sqrt(max(0.0, squares["lr"]) / apart) if apart > 0 else None}
