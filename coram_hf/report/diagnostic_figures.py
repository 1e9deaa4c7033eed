"""The figures of a report as PNG files, for a model card."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coram_hf.amplitude import KAPPA_HIGH_DISPERSION, KAPPA_LOW_DISPERSION, UNEXPLORED_DISPERSION
from coram_hf.report.figures import PAPER_BASES, PAPER_KAPPA, draw_sizes, plain_label

Numbers = Mapping[str, Any]
BLUE, RED, GREY = "#4477aa", "#cc3311", "#888888"


def draw_figures(numbers: Numbers, folder: Path) -> list[Path]:
    """Draw every figure of the page into a folder, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw(numbers, folder / f"{name}.png", draw) for name, draw in FIGURES.items()]


def _draw(numbers: Numbers, path: Path, draw: Callable[[Numbers, Any], None]) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    draw(numbers, figure)
    figure.savefig(path, metadata={"Software": None})
    return path


def _updates(numbers: Numbers, figure: Any) -> None:
    """Update sizes of every expert, layer by module, on one log scale."""
    from matplotlib.colors import LogNorm

    experts, matrices = numbers["models"]["experts"], numbers["matrices"]
    sizes = [r for at in matrices.values() for r in at["relative_updates"].values() if r]
    norm = LogNorm(min(sizes, default=1.0), max(*sizes, 2 * min(sizes)) if sizes else 2.0)
    maps = {name: _grid(matrices, _of("relative_updates", name)) for name in experts}
    _maps(figure, maps, matrices, "relative update", norm=norm, cmap="Blues")


def _retention(numbers: Numbers, figure: Any) -> None:
    """Retention of merged models, or lambda / c_RMS of the configured one."""
    matrices, lam = numbers["matrices"], numbers["contraction"]["lam"]
    maps = {name: _grid(matrices, _of("retention", name)) for name in numbers["models"]["merged"]}

    def expected(at: Numbers) -> float | None:
        return lam / at["c_rms"] if lam is not None and at["c_rms"] else None

    maps = maps or {f"{numbers['models']['line']}, as configured": _grid(matrices, expected)}
    _maps(figure, maps, matrices, "retention", vmin=0.0, vmax=2.0, cmap="RdYlBu_r")


def _conflict(numbers: Numbers, figure: Any) -> None:
    """Share of conflicting columns, layer by module."""
    matrices = numbers["matrices"]
    maps = {"conflict map": _grid(matrices, lambda at: at["conflict"])}
    _maps(figure, maps, matrices, "share of conflicting columns", vmin=0.0, cmap="Blues")


def _sizes(numbers: Numbers, figure: Any) -> None:
    """Bars of r_i."""
    found = numbers["dispersion"]["relative_updates"]
    figure.set_size_inches(7, 1.2 + 0.35 * len(found))
    draw_sizes(figure.subplots(), found)


def _kappa(numbers: Numbers, figure: Any) -> None:
    """kappa against D: the paper's bases, the rule, this merge."""
    found = numbers["dispersion"]
    figure.set_size_inches(7, 4)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axvspan(*UNEXPLORED_DISPERSION, color="#eeeeee", label="no base of the paper")
    for name, D in PAPER_BASES.items():
        low, high = PAPER_KAPPA[name]
        middle = (low + high) / 2
        axes.errorbar(D, middle, yerr=[[middle - low], [high - middle]], fmt="o", color=GREY, capsize=2)
        axes.annotate(name, (D, low), (0, -6), textcoords="offset points", fontsize=7, rotation=-30, va="top")
    end = max(24.0, 1.3 * found["D"]) if isinstance(found["D"], float) else 24.0
    axes.step(
        [1.0, found["threshold"], end],
        [KAPPA_LOW_DISPERSION, KAPPA_HIGH_DISPERSION, KAPPA_HIGH_DISPERSION],
        "--",
        where="post",
        color=GREY,
        label="the rule",
    )
    if isinstance(found["D"], float) and found["kappa"] is not None:
        axes.plot([found["D"]], [found["kappa"]], "D", color=RED, markersize=9, label="this merge")
    axes.set(xlabel="dispersion D", ylabel=r"$\kappa$", ylim=(0, max(1.4, 1.1 * (found["kappa"] or 0))))
    axes.legend(fontsize=8)


def _angles(numbers: Numbers, figure: Any) -> None:
    """Histogram of rotation angles."""
    figure.set_size_inches(6, 3)
    axes = figure.subplots()
    found = numbers["audit"]["rotation_log"]["angles"]
    axes.stairs(found["counts"], found["edges"], fill=True, color=BLUE)
    axes.set(xlabel="largest angle of a rotation", ylabel="rotations")


def _conditions(numbers: Numbers, figure: Any) -> None:
    """Histograms of condition numbers, by way of slicing."""
    figure.set_size_inches(6, 3)
    axes = figure.subplots()
    for way, at in numbers["audit"]["condition"].items():
        edges = [10**power for power in at["histogram"]["edges"]]
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


def _of(key: str, name: str) -> Callable[[Numbers], float | None]:
    return lambda at: at[key][name]


def _grid(matrices: Numbers, value: Callable[[Numbers], float | None]) -> list[list[float]]:
    """Values by module and layer; NaN where there is none."""
    layers, modules = _axes(matrices)
    grid = [[math.nan] * len(layers) for _ in modules]
    for at in matrices.values():
        found = value(at)
        grid[modules.index(at["module"])][layers.index(at["layer"])] = math.nan if found is None else found
    return grid


def _axes(matrices: Numbers) -> tuple[list[str], list[str]]:
    places = [(at["layer"], at["module"]) for at in matrices.values()]
    return list(dict.fromkeys(layer for layer, _ in places)), list(dict.fromkeys(m for _, m in places))


def _maps(
    figure: Any, maps: Mapping[str, list[list[float]]], matrices: Numbers, title: str, **style: Any
) -> None:
    """Heat maps below each other, with one colour bar."""
    layers, modules = _axes(matrices)
    figure.set_size_inches(min(12.0, 3.5 + 0.22 * len(layers)), 0.6 + len(maps) * (0.7 + 0.2 * len(modules)))
    every = figure.subplots(len(maps), 1, squeeze=False)[:, 0]
    for axes, (name, grid) in zip(every, maps.items(), strict=True):
        image = axes.imshow(grid, aspect="auto", interpolation="nearest", **style)
        axes.set_title(plain_label(name), fontsize=9, loc="left")
        axes.set_yticks(range(len(modules)), [plain_label(module) for module in modules], fontsize=7)
        shown = range(0, len(layers), max(1, len(layers) // 12))
        axes.set_xticks(shown, [plain_label(layers[i]) for i in shown], fontsize=7)
    figure.colorbar(image, ax=list(every), label=title)
