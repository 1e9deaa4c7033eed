"""The shapes of the page's figures: positions and shades, which the template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from coram_hf.amplitude import KAPPA_HIGH_DISPERSION, KAPPA_LOW_DISPERSION, UNEXPLORED_DISPERSION
from coram_hf.report.figures import PAPER_BASES, PAPER_KAPPA
from coram_hf.report.text import show

Matrices = Mapping[str, Mapping[str, Any]]


class Cell(NamedTuple):
    """A matrix on a map: its column and row, its shade in percent, its tone, and what it tells when asked."""

    x: int
    y: int
    shade: int
    tone: str
    text: str


class HeatMap(NamedTuple):
    """Layers from left to right, modules from top to bottom."""

    title: str
    layers: list[str]
    modules: list[str]
    cells: list[Cell]


class Bar(NamedTuple):
    """A name, its value, and the length of its bar in percent."""

    name: str
    value: float | None
    length: float


class Legend(NamedTuple):
    """What the palest and the darkest shade stand for."""

    low: str
    high: str


def heat_map(
    title: str, matrices: Matrices, value: Callable[[Mapping[str, Any]], float | None], shade: Shade
) -> HeatMap:
    """One value a matrix, where it stands in the model; a matrix without a value has no cell."""
    layers = list(dict.fromkeys(at["layer"] for at in matrices.values()))
    modules = list(dict.fromkeys(at["module"] for at in matrices.values()))
    cells = []
    for name, at in matrices.items():
        found = value(at)
        if found is not None:
            tone, percent = shade(found)
            place = layers.index(at["layer"]), modules.index(at["module"])
            cells.append(Cell(*place, percent, tone, f"{name}: {show(found)}"))
    return HeatMap(title, layers, modules, cells)


Shade = Callable[[float], tuple[str, int]]
"""The tone of a value, and how much of it, in percent."""


def log_shade(values: Iterable[float | None]) -> tuple[Shade, Legend]:
    """From the smallest to the largest value by their logarithm, at least a factor of two apart."""
    positive = [value for value in values if value]
    low = min(positive, default=1.0)
    high = max(*positive, 2 * low) if positive else 2.0

    def shade(value: float) -> tuple[str, int]:
        return "heat", round(100 * math.log(value / low) / math.log(high / low)) if value > 0 else 0

    return shade, Legend(show(low), show(high))


def share_shade(values: Iterable[float | None]) -> tuple[Shade, Legend]:
    """From none to the largest share."""
    high = max((value for value in values if value), default=1.0)
    return (lambda value: ("heat", round(100 * value / high))), Legend("0", show(high))


def retention_shade(value: float) -> tuple[str, int]:
    """Pale at 1, cold below it and warm above, in full at 0 and at 2."""
    return ("cold" if value < 1 else "warm"), round(100 * min(1.0, abs(value - 1)))


def bars(values: Mapping[str, float | None], longest: float | None = None) -> list[Bar]:
    """Bars to the largest value, or to a given one."""
    end = longest or max((abs(value) for value in values.values() if value), default=1.0)
    return [
        Bar(name, value, round(100 * min(1.0, abs(value or 0.0) / end), 2)) for name, value in values.items()
    ]


class Plot:
    """The frame of a figure with axes, in the units of its view box."""

    width, height = 400, 260
    left, right, top, bottom = 38, 390, 14, 222

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float]) -> None:
        self._xs, self._ys = xs, ys

    def x(self, value: float) -> float:
        low, high = self._xs
        return round(self.left + (value - low) / (high - low) * (self.right - self.left), 2)

    def y(self, value: float) -> float:
        low, high = self._ys
        return round(self.bottom - (value - low) / (high - low) * (self.bottom - self.top), 2)


def kappa_figure(dispersion: Mapping[str, Any]) -> dict[str, Any]:
    """kappa against D on a log scale: the paper's swept ranges, the rule, and this merge."""
    D = dispersion["D"] if isinstance(dispersion["D"], float) else None
    kappa = dispersion["kappa"]
    plot = Plot((0.0, math.log(max(24.0, 1.3 * (D or 1.0)))), (0.0, max(1.4, 1.1 * (kappa or 0.0))))
    here = None
    if D is not None and kappa is not None:
        here = {"x": plot.x(math.log(D)), "y": plot.y(kappa), "text": f"D {show(D)}, kappa {show(kappa)}"}
    bases = []
    for level, (name, value) in enumerate(PAPER_BASES.items()):
        low, high = PAPER_KAPPA[name]
        bases.append(
            {
                "name": name,
                "x": plot.x(math.log(value)),
                "low": plot.y(low),
                "high": plot.y(high),
                "middle": plot.y((low + high) / 2),
                "label": plot.y(0.36 if value > 10 else 0.6 + 0.1 * level),
                "anchor": "middle" if value > 10 else "start",
                "text": f"{name}: D {value:g}, kappa {low:g} to {high:g}",
            }
        )
    cut = min(math.log(dispersion["threshold"]), plot._xs[1])
    rule = [(0.0, KAPPA_LOW_DISPERSION), (cut, KAPPA_LOW_DISPERSION)]
    rule += [(cut, KAPPA_HIGH_DISPERSION), (plot._xs[1], KAPPA_HIGH_DISPERSION)]
    low, high = UNEXPLORED_DISPERSION
    return {
        "plot": plot,
        "here": here,
        "bases": bases,
        "rule": " ".join(f"{plot.x(x)},{plot.y(y)}" for x, y in rule),
        "gap": (plot.x(math.log(low)), plot.x(math.log(high))),
        "x_ticks": [(plot.x(math.log(tick)), f"{tick:g}") for tick in (1, 2, 4, 8, 16)],
        "y_ticks": [(plot.y(tick), f"{tick:g}") for tick in (0, 0.5, 1.0)],
    }


def histogram(
    found: Mapping[str, Sequence[float]], label: Callable[[float], str], *, log: bool = False
) -> dict[str, Any]:
    """Bars between edges; `log` draws the logarithm of the counts, so that a thin tail is seen."""
    edges, counts = found["edges"], found["counts"]
    heights = [math.log10(1 + count) if log else count for count in counts]
    low, high = (edges[0], edges[-1]) if edges[-1] > edges[0] else (edges[0], edges[0] + 1)
    plot = Plot((low, high), (0.0, max(1, *heights) * 1.05))
    drawn = [
        {
            "x": plot.x(start),
            "width": max(0.5, plot.x(stop) - plot.x(start) - 1),
            "y": plot.y(height),
            "height": plot.bottom - plot.y(height),
            "text": f"{label(start)} to {label(stop)}: {count:,}",
        }
        for start, stop, height, count in zip(edges, edges[1:], heights, counts, strict=False)
        if count
    ]
    ticks = [low + (high - low) * i / 4 for i in range(5)]
    return {
        "plot": plot,
        "bars": drawn,
        "x_ticks": [(plot.x(tick), label(tick)) for tick in ticks],
        "y_ticks": [(plot.y(0), "0"), (plot.y(max(heights)), _compact(max(counts)))],
    }


def _compact(count: float) -> str:
    """1234567 as 1.23M."""
    for size, mark in ((1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{mark}"
    return f"{count:g}"
