"""The figures of a report as PNG files, for a model card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coram_hf.amplitude import UNEXPLORED_DISPERSION
from coram_hf.report import charts
from coram_hf.report.charts import HeatMap, Numbers, drawable, power_of_ten
from coram_hf.report.figures import draw_sizes, new_figure, plain_label, save_figure

BLUE, RED, GREY = "#4477aa", "#cc3311", "#888888"


def draw_figures(numbers: Numbers, folder: Path) -> list[Path]:
    """Draw every figure of the page into a folder, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png" for name in FIGURES]
    for path, draw in zip(paths, FIGURES.values(), strict=True):
        figure = new_figure(dpi=120)
        draw(numbers, figure)
        save_figure(figure, path)
    return paths


def _updates(numbers: Numbers, figure: Any) -> None:
    """Update sizes of every expert, layer by module, on one log scale."""
    from matplotlib.colors import LogNorm

    maps = charts.update_maps(numbers)
    _maps(figure, maps, "relative update", norm=LogNorm(*charts.size_range(maps)), cmap="Blues")


def _retention(numbers: Numbers, figure: Any) -> None:
    """Retention of merged models, or lambda / c_RMS of the configured one."""
    low, high = charts.RETENTION_RANGE
    _maps(figure, charts.retention_maps(numbers), "retention", vmin=low, vmax=high, cmap="RdYlBu_r")


def _conflict(numbers: Numbers, figure: Any) -> None:
    """Share of conflicting columns, layer by module."""
    maps = [charts.conflict_map(numbers, "conflict map")]
    _maps(figure, maps, "share of conflicting columns", vmin=0.0, cmap="Blues")


def _sizes(numbers: Numbers, figure: Any) -> None:
    """Bars of r_i."""
    found = numbers["dispersion"]["relative_updates"]
    figure.set_size_inches(7, 1.2 + 0.35 * len(found))
    draw_sizes(figure.subplots(), found)


def _kappa(numbers: Numbers, figure: Any) -> None:
    """kappa against D: the paper's bases, the rule, this merge."""
    chart = charts.kappa_chart(numbers["dispersion"])
    figure.set_size_inches(7, 4)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axvspan(*UNEXPLORED_DISPERSION, color="#eeeeee", label="no base of the paper")
    for base in chart.bases:
        reach = [[base.middle - base.low], [base.high - base.middle]]
        axes.errorbar(base.D, base.middle, yerr=reach, fmt="o", color=GREY, capsize=2)
        axes.annotate(
            base.name,
            (base.D, base.low),
            (0, -6),
            textcoords="offset points",
            fontsize=7,
            rotation=-30,
            va="top",
        )
    axes.step(*zip(*chart.rule, strict=True), "--", where="post", color=GREY, label="the rule")
    if chart.here is not None:
        here = chart.here
        axes.plot([here.D], [here.kappa], "D", color=RED, markersize=9, label=here.label)
    axes.set(xlabel="dispersion D", ylabel=r"$\kappa$", ylim=(0, chart.top))
    axes.legend(fontsize=8)


def _angles(numbers: Numbers, figure: Any) -> None:
    """Histogram of rotation angles."""
    figure.set_size_inches(6, 3)
    axes = figure.subplots()
    found = numbers["audit"]["rotation_log"]["angles"]
    axes.stairs(found["counts"], found["edges"], fill=True, color=BLUE)
    axes.set(xlabel="largest angle of a rotation", ylabel="rotations")


def _conditions(numbers: Numbers, figure: Any) -> None:
    """Histograms of condition numbers, by kind of slicing."""
    figure.set_size_inches(6, 3)
    axes = figure.subplots()
    for way, at in numbers["audit"]["condition"].items():
        edges = [drawable(power_of_ten(power)) for power in at["histogram"]["edges"]]
        axes.stairs(at["histogram"]["counts"], edges, label=way, linewidth=1.5)
    axes.set(xlabel="condition number of $S_0$", ylabel="slices", xscale="log", yscale="symlog")
    axes.legend(fontsize=8)


FIGURES: dict[str, Callable[[Numbers, Any], None]] = {
    "updates": _updates,
    "sizes": _sizes,
    "kappa": _kappa,
    "retention": _retention,
    "conflict": _conflict,
    "angles": _angles,
    "conditions": _conditions,
}


def _maps(figure: Any, maps: Sequence[HeatMap], title: str, **style: Any) -> None:
    """Heat maps of the same matrices, one below the other, with one colour bar."""
    layers, modules = maps[0].layers, maps[0].modules
    figure.set_size_inches(min(12.0, 3.5 + 0.22 * len(layers)), 0.6 + len(maps) * (0.7 + 0.2 * len(modules)))
    every = figure.subplots(len(maps), 1, squeeze=False)[:, 0]
    for axes, found in zip(every, maps, strict=True):
        image = axes.imshow(found.grid(), aspect="auto", interpolation="nearest", **style)
        axes.set_title(plain_label(found.title), fontsize=9, loc="left")
        axes.set_yticks(range(len(modules)), [plain_label(module) for module in modules], fontsize=7)
        shown = range(0, len(layers), max(1, len(layers) // 12))
        axes.set_xticks(shown, [plain_label(layers[i]) for i in shown], fontsize=7)
    figure.colorbar(image, ax=list(every), label=title)
