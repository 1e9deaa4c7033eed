"""The shapes of the page's figures: positions and shades, which the template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from coram_hf.amplitude import UNEXPLORED_DISPERSION
from coram_hf.report.calibration import Calibration
from coram_hf.report.charts import RETENTION_RANGE, HeatMap, KappaChart, drawable, size_range
from coram_hf.report.text import show


class Cell(NamedTuple):
    """A matrix on a map: its column and row, its shade in percent, its tone and its tooltip."""

    x: int
    y: int
    shade: int
    tone: str
    text: str


class Shaded(NamedTuple):
    """A map whose cells have shades."""

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


Shade = Callable[[float], tuple[str, int]]
"""The tone of a value, and how much of it, in percent."""


def shaded(found: HeatMap, shade: Shade) -> Shaded:
    """A map with the tone and shade of every value."""
    cells = []
    for spot in found.spots:
        tone, percent = shade(spot.value)
        cells.append(Cell(spot.x, spot.y, percent, tone, spot.text))
    return Shaded(found.title, found.layers, found.modules, cells)


def log_shade(maps: Sequence[HeatMap]) -> tuple[Shade, Legend]:
    """Shades on a log scale, from the smallest to the largest value of the maps, and their legend."""
    low, high = size_range(maps)

    def shade(value: float) -> tuple[str, int]:
        return "heat", round(100 * math.log(value / low) / math.log(high / low)) if value > 0 else 0

    return shade, Legend(show(low), show(high))


def share_shade(found: HeatMap) -> tuple[Shade, Legend]:
    """Shades from 0 to the largest share, and their legend."""
    high = max((spot.value for spot in found.spots if spot.value), default=1.0)
    return (lambda value: ("heat", round(100 * value / high))), Legend("0", show(high))


RETENTION_LEGEND = Legend(f"{RETENTION_RANGE[0]:g}", f"{RETENTION_RANGE[1]:g} and more")


def retention_shade(value: float) -> tuple[str, int]:
    """Pale at 1, cold below it and warm above; at full strength at 0 and at 2."""
    return ("cold" if value < 1 else "warm"), round(100 * min(1.0, abs(value - 1)))


def bars(values: Mapping[str, float | None], longest: float | None = None) -> list[Bar]:
    """Bars scaled to the largest value, or to `longest`."""
    sizes = {name: abs(drawable(value) or 0.0) for name, value in values.items()}
    end = longest or max((size for size in sizes.values() if size), default=1.0)
    return [Bar(name, value, round(100 * min(1.0, sizes[name] / end), 2)) for name, value in values.items()]


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


def kappa_figure(chart: KappaChart) -> dict[str, Any]:
    """kappa against D on a log scale."""
    end = math.log(chart.end)
    plot = Plot((0.0, end), (0.0, chart.top))
    here = chart.here and {
        "x": plot.x(math.log(chart.here.D)),
        "y": plot.y(chart.here.kappa),
        "text": chart.here.text,
    }
    bases = [
        {
            "name": base.name,
            "x": plot.x(math.log(base.D)),
            "low": plot.y(base.low),
            "high": plot.y(base.high),
            "middle": plot.y(base.middle),
            "label": plot.y(0.36 if base.D > 10 else 0.6 + 0.1 * level),
            "anchor": "middle" if base.D > 10 else "start",
            "text": f"{base.name}: D {base.D:g}, kappa {base.low:g} to {base.high:g}",
        }
        for level, base in enumerate(chart.bases)
    ]
    (_, before), (threshold, after), _ = chart.rule
    cut = min(math.log(threshold), end)
    low, high = UNEXPLORED_DISPERSION
    rule = [(0.0, before), (cut, before), (cut, after), (end, after)]
    return {
        "plot": plot,
        "here": here,
        "bases": bases,
        "rule": " ".join(f"{plot.x(x)},{plot.y(y)}" for x, y in rule),
        "gap": (plot.x(math.log(low)), plot.x(math.log(high))),
        "x_ticks": [(plot.x(math.log(tick)), f"{tick:g}") for tick in (1, 2, 4, 8, 16)],
        "y_ticks": [(plot.y(tick), f"{tick:g}") for tick in (0, 0.5, 1.0)],
    }


def curve_figure(found: Calibration) -> dict[str, Any]:
    """The loss of a calibration against lambda, both on log scales, with lambda before and after."""
    points = [point for how in found.curves for point in found.points(how)]
    xs, ys = [math.log(lam) for lam, _, _ in points], [_log(loss) for _, loss, _ in points]
    plot = Plot((min(xs) - 0.1, max(xs) + 0.1), (min(ys) - 0.2, max(ys) + 0.2))
    ends = [round(math.exp(x), 2) for x in (min(xs), sum(xs) / len(xs), max(xs))]

    def place(lam: float, loss: float) -> str:
        return f"{plot.x(math.log(lam))},{plot.y(_log(loss))}"

    return {
        "plot": plot,
        "lines": [" ".join(place(lam, loss) for lam, loss, _ in found.points(how)) for how in found.curves],
        "marks": [
            {"x": plot.x(x), "y": plot.y(y), "name": mark, "text": f"lambda {show(lam)}, KL {show(loss)}"}
            for x, y, (lam, loss, mark) in zip(xs, ys, points, strict=True)
            if mark
        ],
        "x_ticks": [(plot.x(math.log(tick)), f"{tick:g}") for tick in ends],
        "y_ticks": [(plot.y(y), f"{math.exp(y):.2g}") for y in (min(ys), max(ys))],
    }


def _log(loss: float) -> float:
    """The logarithm of a loss, which rounding may make zero or negative."""
    return math.log(max(loss, 1e-9))


def histogram(
    found: Mapping[str, Sequence[float]], label: Callable[[float], str], *, log: bool = False
) -> dict[str, Any]:
    """Bars between edges; `log` draws the logarithm of the counts, so that a thin tail is visible."""
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
