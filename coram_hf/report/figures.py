"""PNG figures: shared helpers, and the figure of every merge (r_i, and D among the paper's bases)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coram_hf.amplitude import UNEXPLORED_DISPERSION
from coram_hf.report.charts import PAPER_BASES, dispersion_ticks, drawable, on_axis, this_merge
from coram_hf.report.text import readable

if TYPE_CHECKING:
    from coram_hf.report.calibration import Calibration
    from coram_hf.report.merge_report import MergeReport

FIGURE = Path("figures") / "updates.png"
CALIBRATION_FIGURE = Path("figures") / "calibration.png"
MARKS = {"before": "D", "chosen": "*"}
"""The markers of a calibration's lambda before and after."""
LABEL = 40
"""Longest name beside a bar, in characters."""


def preload() -> None:
    """Import matplotlib, which takes longer than drawing; call it while other work runs."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def new_figure(**settings: Any) -> Any:
    """An empty figure that opens no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", **settings)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG without matplotlib's version, so that equal figures are equal files."""
    figure.savefig(path, format="png", metadata={"Software": None})


def draw_updates(report: MergeReport, folder: Path) -> Path:
    """Write the figure of r_i and of D into a folder, and return its path."""
    count = len(report.relative_updates)
    figure = new_figure(figsize=(8, 2.6 + 0.32 * count), dpi=110)
    bars, scale = figure.subplots(2, 1, height_ratios=(0.32 * count + 0.5, 1.6))
    draw_sizes(bars, report.relative_updates)
    _draw_dispersion(scale, report)
    path = folder / FIGURE
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
    return path


def draw_calibration(found: Calibration, folder: Path) -> Path:
    """Write the figure of the loss against lambda into a folder, and return its path."""
    figure = new_figure(figsize=(6, 3.2), dpi=110)
    axes = figure.subplots()
    for how in found.curves:
        lambdas, losses, marks = zip(*found.points(how), strict=True)
        (line,) = axes.plot(lambdas, losses, "o-", markersize=3, label=f"{how} fitted")
        for lam, loss, mark in zip(lambdas, losses, marks, strict=True):
            if mark:
                axes.plot([lam], [loss], MARKS[mark], color=line.get_color(), markersize=11, label=mark)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("lambda")
    axes.set_ylabel("KL per token")
    axes.legend(fontsize=8)
    path = folder / CALIBRATION_FIGURE
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
    return path


def draw_sizes(axes: Any, relative_updates: Mapping[str, float]) -> None:
    """Bars of r_i by expert."""
    names = [plain_label(name) for name in relative_updates]
    axes.barh(range(len(names)), [drawable(r) or 0.0 for r in relative_updates.values()], color="#4477aa")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("relative update r = |W_i - W_0| / |W_0|")


def _draw_dispersion(axes: Any, report: MergeReport) -> None:
    D, threshold = report.dispersion, report.config.get("dispersion_threshold")
    ticks = dispersion_ticks(on_axis(D) if math.isfinite(D) else 1.0)
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.axvspan(*UNEXPLORED_DISPERSION, color="#eeeeee", label="no base of the paper")
    axes.plot(list(PAPER_BASES.values()), [0] * len(PAPER_BASES), "o", color="#bbbbbb")
    for i, (name, value) in enumerate(PAPER_BASES.items()):
        axes.annotate(
            name, (value, 0), (0, 8 + 11 * (i % 3)), textcoords="offset points", ha="center", fontsize=7
        )
    if math.isfinite(D):
        axes.plot([on_axis(D)], [0], "D", color="#cc3311", markersize=9, label=this_merge(D))
    if threshold:
        axes.axvline(on_axis(threshold), linestyle="--", color="#555555", label="threshold of the rule")
    axes.set_ylim(-1, 3)
    axes.set_yticks([])
    axes.set_xlabel("dispersion D = max r / min r")
    axes.legend(loc="upper left", fontsize=7)


def plain_label(name: str) -> str:
    """A name as plain text for matplotlib, which reads dollar signs as math."""
    return readable(name, LABEL).replace("$", r"\$")
