"""Views: what the studio shows, as HTML in which every name and answer is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from coram_hf.amplitude import UNEXPLORED_DISPERSION
from coram_hf.report import MergePlan, charts
from coram_hf.report.page import page_environment, shapes
from coram_hf.report.text import readable
from coram_hf.report.verdict import verdict
from coram_hf.studio.chat import Turn
from coram_hf.studio.job import Job
from coram_hf.studio.words import REMEDIES, plain_warnings

FOLDER = Path(__file__).parent
PARTS = {"target": "merged by the method", "residual": "merged otherwise", "kept": "kept as in the base"}


@cache
def _macros() -> Any:
    environment = page_environment(FOLDER)
    environment.filters["lines"] = _lines
    return environment.get_template("studio.html").module


def _lines(text: str) -> Markup:
    return Markup("<br>").join(readable(line, 2000) for line in text.split("\n"))


def plan_view(plan: MergePlan, threshold: float) -> str:
    """The plan: the verdict, D on the kappa figure, the sizes of the updates, and the warnings."""
    numbers = {
        "relative_updates": plan.relative_updates,
        "D": plan.dispersion,
        "lam": plan.lam,
        "kappa": plan.kappa,
        "threshold": threshold,
    }
    counts = plan.parameter_counts
    warnings = plain_warnings(plan)
    words = verdict(numbers, REMEDIES)
    return str(
        _macros().plan(
            plan,
            words,
            words.startswith("Ready") and not UNEXPLORED_DISPERSION[0] < plan.dispersion < threshold,
            warnings,
            shapes.bars(plan.relative_updates),
            shapes.kappa_figure(charts.kappa_chart(numbers)),
            [f"{counts[part]:,} parameters {what}" for part, what in PARTS.items() if counts[part]],
        )
    )


def progress_view(job: Job) -> str:
    """The progress bar of a job, with what it is doing."""
    return str(_macros().progress(job, round(100 * job.done / job.total)))


def note(text: str, kind: str = "good") -> str:
    """A sentence about what was done, or about an error."""
    return str(_macros().note(text, kind))


def empty(title: str, text: str) -> str:
    """What stands where there is nothing to show yet."""
    return str(_macros().empty(title, text))


def answers_view(turns: Sequence[Turn]) -> str:
    """All questions with their answers side by side, the last one first."""
    return str(_macros().answers(turns))


def page_view(page: str) -> str:
    """The report page in a frame of its own, which can reach neither the studio nor the network."""
    whole = html.escape(page, quote=True)
    frame = f'<iframe title="Report" sandbox="allow-scripts" srcdoc="{whole}"></iframe>'
    return f'<div class="coram">{frame}</div>'
