"""Figures of a merge: the sizes of the experts' updates, and D among the paper's bases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coram_hf.report.text import readable

if TYPE_CHECKING:
    from coram_hf.report.merge_report import MergeReport

FIGURE = Path("figures") / "updates.png"
PAPER_BASES = {
    "Qwen2.5-VL-7B": 1.3,
    "Gemma-2-2B": 1.67,
    "Llama-3.2-3B": 2.6,
    "Llama-3.1-8B": 3.5,
    "Gemma-2-9B": 16.0,
}
"""D of the bases on which the paper has calibrated its rule."""

PAPER_KAPPA = {
    "Qwen2.5-VL-7B": (1.01, 1.16),
    "Gemma-2-2B": (1.07, 1.07),
    "Llama-3.2-3B": (1.12, 1.21),
    "Llama-3.1-8B": (1.03, 1.12),
    "Gemma-2-9B": (0.45, 0.58),
}
"""The range of lambda* / sqrt(N), over the paper's configurations, that was best in its sweeps."""

LABEL = 40
"""Characters of a name beside a bar."""


def preload() -> None:
    """Import matplotlib, which takes longer than drawing, beside other work."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def draw_updates(report: MergeReport, folder: Path) -> Path:
    """Write the figure of r_i and of D into a folder, and return its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(report.relative_updates)
    figure = Figure(figsize=(8, 2.6 + 0.32 * count), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    bars, scale = figure.subplots(2, 1, height_ratios=(0.32 * count + 0.5, 1.6))
    draw_sizes(bars, report.relative_updates)
    _draw_dispersion(scale, report)
    path = folder / FIGURE
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    return path


def draw_sizes(axes: Any, relative_updates: Mapping[str, float]) -> None:
    """Bars of r_i by expert."""
    names = [plain_label(name) for name in relative_updates]
    axes.barh(range(len(names)), list(relative_updates.values()), color="#4477aa")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("relative update r = |W_i - W_0| / |W_0|")


def _draw_dispersion(axes: Any, report: MergeReport) -> None:
    largest = max(D for D in (report.dispersion, *PAPER_BASES.values()) if math.isfinite(D))
    ticks = [digit * 10**power for power in range(math.ceil(math.log10(largest))) for digit in (1, 2, 5)]
    ticks = ticks if largest < 1000 else ticks[::3]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.axvspan(3.5, 16, color="#eeeeee", label="no base of the paper")
    axes.plot(list(PAPER_BASES.values()), [0] * len(PAPER_BASES), "o", color="#bbbbbb")
    for i, (name, value) in enumerate(PAPER_BASES.items()):
        axes.annotate(
            name, (value, 0), (0, 8 + 11 * (i % 3)), textcoords="offset points", ha="center", fontsize=7
        )
    if math.isfinite(report.dispersion):
        axes.plot([report.dispersion], [0], "D", color="#cc3311", markersize=9, label="this merge")
    threshold = report.config.get("dispersion_threshold")
    if threshold:
        axes.axvline(threshold, linestyle="--", color="#555555", label="threshold of the rule")
    axes.set_ylim(-1, 3)
    axes.set_yticks([])
    axes.set_xlabel("dispersion D = max r / min r")
    axes.legend(loc="upper left", fontsize=7)


def plain_label(name: str) -> str:
    """A name as plain text for matplotlib, which reads dollars as mathematics."""
    return readable(name, LABEL).replace("$", r"\$")
