"""The figure of a sweep: score against lambda, the rule's lambda, the optimum, and the baselines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coram_hf.report.figures import new_figure, plain_label, save_figure

if TYPE_CHECKING:
    from coram_hf.evaluation.ablation import Ablation
    from coram_hf.evaluation.sweep import Sweep

COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#66ccee", "#cc3311")
REFERENCE = "#999999"
SPACING = 0.035
"""Smallest distance between two names, as a share of the height."""


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Write the figure as PNG."""
    figure = new_figure(figsize=(8, 5), dpi=110)
    axes: Any = figure.subplots()
    for i, line in enumerate(sweep.lines):
        colour = COLOURS[i % len(COLOURS)]
        lambdas = [point.lam for point in line.points]
        label = f"{line.name}: gap {100 * line.gap:.2f}"
        axes.plot(
            lambdas, [100 * p.average for p in line.points], "o-", color=colour, markersize=3, label=label
        )
        axes.axvline(line.rule.lam, linestyle="--", linewidth=1, color=colour)
        axes.plot([line.best.lam], [100 * line.best.average], "*", color=colour, markersize=13)
    _draw_references(axes, sweep.reference_averages)
    axes.set_xlabel(r"$\lambda$ (dashed: the rule's; star: the swept optimum)")
    axes.set_ylabel(f"average over {len(sweep.tasks)} tasks" if len(sweep.tasks) > 1 else "score")
    axes.legend(fontsize=8)
    save_figure(figure, path)


def draw_ablation(found: Ablation, path: Path) -> None:
    """Write a PNG: the score against slice height, and in-domain against out-of-domain averages."""
    figure = new_figure(figsize=(10, 4.5), dpi=110)
    left, right = figure.subplots(1, 2)
    heights = found.heights()
    left.plot(
        [h for h, _ in heights], [100 * line.rule.average for _, line in heights], "o-", color=COLOURS[0]
    )
    left.set_xscale("log", base=2)
    left.set_xlabel("slice height h")
    left.set_ylabel(f"in-domain average of {found.lines[0].name}")
    rows = [(line.name, line.rule.average, found.outside(line.beyond), COLOURS[0]) for line in found.lines]
    rows += [
        (name, found.suite.score(one), found.outside(one), REFERENCE)
        for name, one in found.references.items()
    ]
    for name, inside, outside, colour in rows:
        if outside is not None:
            right.plot([100 * outside], [100 * inside], "o", color=colour)
            right.annotate(plain_label(name), (100 * outside, 100 * inside), fontsize=6)
    right.set_xlabel("out-of-domain average")
    right.set_ylabel("in-domain average")
    save_figure(figure, path)


def _draw_references(axes: Any, averages: Mapping[str, float]) -> None:
    """Dotted lines, each with its name in the right margin, clear of the name below it."""
    for score in averages.values():
        axes.axhline(100 * score, linestyle=":", linewidth=1, color=REFERENCE)
    low, high = axes.get_ylim()
    place = low
    for name, score in sorted(averages.items(), key=lambda pair: pair[1]):
        place = max(100 * score, place + (high - low) * SPACING)
        axes.annotate(
            plain_label(name), (1, 100 * score), (1.03, place), xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"), va="center", fontsize=7, color="#555555",
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": REFERENCE},
        )  # fmt: skip
