"""What the figures show: series, grids, labels and ranges, for SVG and PNG alike.

A damaged weight makes numbers that no axis can hold, such as D = 1e300. They are drawn at the end of an axis,
and their labels give the true value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from coram_hf.amplitude import KAPPA_HIGH_DISPERSION, KAPPA_LOW_DISPERSION
from coram_hf.report.text import show

PAPER_BASES = {
    "Qwen2.5-VL-7B": 1.3,
    "Gemma-2-2B": 1.67,
    "Llama-3.2-3B": 2.6,
    "Llama-3.1-8B": 3.5,
    "Gemma-2-9B": 16.0,
}
"""D of the bases on which the paper calibrated its rule."""

PAPER_KAPPA = {
    "Qwen2.5-VL-7B": (1.01, 1.16),
    "Gemma-2-2B": (1.07, 1.07),
    "Llama-3.2-3B": (1.12, 1.21),
    "Llama-3.1-8B": (1.03, 1.12),
    "Gemma-2-9B": (0.45, 0.58),
}
"""The range of lambda* / sqrt(N), over the paper's configurations, that was best in its sweeps."""

RETENTION_RANGE = (0.0, 2.0)
"""Retention from palest to darkest; 1, in the middle, keeps the size of a typical update."""

SMALLEST, LARGEST = 1e-150, 1e150
"""Positive sizes that are drawn as they are: the ratio of two is a finite number."""
FARTHEST = 1e6
"""The largest D that is drawn where it is; the paper's bases lie below 20."""

Numbers = Mapping[str, Any]


def drawable(value: float | str | None) -> float | None:
    """The value as 0 or with a size from SMALLEST to LARGEST; reads JSON's "inf", and is None for NaN."""
    number = math.nan if value is None else float(value)
    if math.isnan(number):
        return None
    return number and math.copysign(min(max(abs(number), SMALLEST), LARGEST), number)


def on_axis(D: float) -> float:
    """A dispersion, or a threshold of it, limited to what an axis can show."""
    return min(max(D, 1 / FARTHEST), FARTHEST)


class Spot(NamedTuple):
    """A matrix on a map: its column, row and value, and its tooltip."""

    x: int
    y: int
    value: float
    text: str


class HeatMap(NamedTuple):
    """Layers from left to right, modules from top to bottom; a matrix without a value has no spot."""

    title: str
    layers: list[str]
    modules: list[str]
    spots: list[Spot]

    def grid(self) -> list[list[float]]:
        """Values by module and layer; NaN where there is none."""
        grid = [[math.nan] * len(self.layers) for _ in self.modules]
        for spot in self.spots:
            grid[spot.y][spot.x] = spot.value
        return grid


def update_maps(numbers: Numbers) -> list[HeatMap]:
    """Relative updates of every expert."""
    experts, matrices = numbers["models"]["experts"], numbers["matrices"]
    return [_heat_map(name, matrices, _of("relative_updates", name)) for name in experts]


def retention_maps(numbers: Numbers) -> list[HeatMap]:
    """Retention of every merged model, or lambda / c_RMS of the configured merge where there is none."""
    matrices, models, lam = numbers["matrices"], numbers["models"], numbers["contraction"]["lam"]
    if models["merged"]:
        return [_heat_map(name, matrices, _of("retention", name)) for name in models["merged"]]

    def expected(at: Numbers) -> float | None:
        return float(lam) / float(at["c_rms"]) if lam is not None and at["c_rms"] else None

    return [_heat_map(f"{models['line']}, as configured", matrices, expected)]


def conflict_map(numbers: Numbers, title: str) -> HeatMap:
    """Shares of conflicting columns."""
    return _heat_map(title, numbers["matrices"], lambda at: at["conflict"])


def size_range(maps: Sequence[HeatMap]) -> tuple[float, float]:
    """The smallest and the largest positive value, at least a factor of two apart."""
    positive = [spot.value for one in maps for spot in one.spots if spot.value]
    low = min(positive, default=1.0)
    return low, max(*positive, 2 * low) if positive else 2.0


def _heat_map(title: str, matrices: Numbers, value: Callable[[Numbers], float | str | None]) -> HeatMap:
    layers = list(dict.fromkeys(at["layer"] for at in matrices.values()))
    modules = list(dict.fromkeys(at["module"] for at in matrices.values()))
    spots = []
    for name, at in matrices.items():
        drawn = drawable(found := value(at))
        if drawn is not None:
            x, y = layers.index(at["layer"]), modules.index(at["module"])
            spots.append(Spot(x, y, drawn, f"{name}: {show(found)}"))
    return HeatMap(title, layers, modules, spots)


def _of(key: str, name: str) -> Callable[[Numbers], float | str | None]:
    return lambda at: at[key][name]


class Swept(NamedTuple):
    """A base of the paper: its D, and the range of kappa that was best there."""

    name: str
    D: float
    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


class Here(NamedTuple):
    """This merge among the paper's bases: where it is drawn, its label and its tooltip."""

    D: float
    kappa: float
    label: str
    text: str


class KappaChart(NamedTuple):
    """kappa against D; rule: the points where it starts, where it changes and where the axis ends."""

    bases: list[Swept]
    rule: list[tuple[float, float]]
    top: float
    here: Here | None

    @property
    def end(self) -> float:
        return self.rule[-1][0]


def kappa_chart(dispersion: Numbers) -> KappaChart:
    """The paper's swept ranges, the rule, and this merge where it has a finite D and a kappa."""
    D, kappa = dispersion["D"], drawable(dispersion["kappa"])
    shown = on_axis(D) if isinstance(D, float) and math.isfinite(D) else None
    here = None
    if shown is not None and kappa is not None:
        here = Here(shown, kappa, this_merge(D), f"D {show(D)}, kappa {show(dispersion['kappa'])}")
    rule = [
        (1.0, KAPPA_LOW_DISPERSION),
        (on_axis(dispersion["threshold"]), KAPPA_HIGH_DISPERSION),
        (max(24.0, 1.3 * (shown or 1.0)), KAPPA_HIGH_DISPERSION),
    ]
    bases = [Swept(name, value, *PAPER_KAPPA[name]) for name, value in PAPER_BASES.items()]
    return KappaChart(bases, rule, max(1.4, 1.1 * (kappa or 0.0)), here)


def this_merge(D: float) -> str:
    """The label of this merge, with its D where that lies beyond the axis."""
    return "this merge" if D <= FARTHEST else f"this merge, D = {D:.3g}"


def dispersion_ticks(D: float) -> list[int]:
    """1, 2, 5, 10, ... up to the decade of D and of the paper's bases; only powers of ten for a large D."""
    largest = max(D, *PAPER_BASES.values())
    digits = (1, 2, 5) if largest < 1000 else (1,)
    return [digit * 10**power for power in range(math.ceil(math.log10(largest))) for digit in digits]


def power_of_ten(exponent: float) -> float:
    """10^exponent, limited so that it does not overflow."""
    return 10.0 ** min(exponent, 300.0)
