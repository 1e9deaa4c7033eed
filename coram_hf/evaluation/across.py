"""Suites read back for analysis: sweep.json files, and grids such as examples/paper/grid.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coram_hf.config import CoramConfig
from coram_hf.errors import CoramError


@dataclass(frozen=True)
class SweptLine:
    """One line of one suite: known scores by lambda, the rule's and the best; scale: lambda / kappa."""

    line: str
    scale: float
    rule_lam: float
    best_lam: float
    points: dict[float, float]

    @property
    def rule(self) -> float:
        return self.points[self.rule_lam]

    @property
    def best(self) -> float:
        return self.points[self.best_lam]

    @property
    def kappa(self) -> float:
        """kappa_opt = lambda* / scale."""
        return self.best_lam / self.scale

    def nearest(self, lam: float) -> float:
        """The nearest lambda with a known score."""
        return min(self.points, key=lambda known: (abs(known - lam), known))

    @property
    def cell(self) -> str | None:
        """The cell of the component table: CORAM or CORAM-C, with +SS and +RP; None if there is none."""
        config = CoramConfig.from_line(self.line)
        if config.decorrelate is not None:
            return None
        name = "CORAM" if config.conflict is None else "CORAM-C"
        return name + "+SS" * (config.spread is not None) + "+RP" * (config.residual is not None)


@dataclass(frozen=True)
class SweptSuite:
    """The lines of one suite. base: one of the paper's, if so; stated: its range of kappa_opt.

    optima: best lambdas by line as another table than that of the lines prints them.
    """

    name: str
    experts: int
    dispersion: float
    lines: tuple[SweptLine, ...]
    base: str | None = None
    stated: tuple[float, float] | None = None
    optima: Mapping[str, float] = field(default_factory=dict)

    @property
    def kappas(self) -> tuple[float, float]:
        """The range of kappa_opt: as stated, else from the lowest to the highest of the lines."""
        if self.stated is not None:
            return self.stated
        found = [line.kappa for line in self.lines]
        return min(found), max(found)

    @property
    def kappa(self) -> float:
        """The representative kappa_opt: the midpoint of the range, as in the paper."""
        return sum(self.kappas) / 2

    def line(self, name: str) -> SweptLine | None:
        return next((line for line in self.lines if line.line == name), None)


def read_suites(paths: Sequence[str | Path]) -> list[SweptSuite]:
    """The suites of all files; a sweep is named after its folder."""
    found = [suite for path in paths for suite in _read(Path(path))]
    if not found:
        raise CoramError("analyse: no files given; pass sweep.json files, or folders that hold one")
    names = [suite.name for suite in found]
    for name in names:
        if names.count(name) > 1:
            raise CoramError(f"analyse: two suites are called {name!r}; rename the folder of one")
    return found


def _read(path: Path) -> list[SweptSuite]:
    file = path / "sweep.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if "suites" in content:
            unit = 100.0 if content.get("unit") == "percent" else 1.0
            return [_of_grid(name, values, unit) for name, values in content["suites"].items()]
        return [_of_sweep(file.resolve().parent.name, content["lines"])]
    except (json.JSONDecodeError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CoramError(
            f"{file}: neither a sweep.json of `coram-hf sweep` nor a grid of suites "
            f"({type(error).__name__}: {error})"
        ) from None


def _of_sweep(name: str, lines: list[dict[str, Any]]) -> SweptSuite:
    read = []
    for values in lines:
        points = {float(point["lam"]): float(point["average"]) for point in values["points"]}
        rule, best = float(values["rule"]["lam"]), float(values["best"]["lam"])
        scale = best / float(values["kappa_best"]) if values["kappa_best"] else float(values["sqrt_n"])
        read.append(SweptLine(values["line"], scale, rule, best, points))
    first = lines[0]
    return SweptSuite(name, round(float(first["sqrt_n"]) ** 2), float(first["dispersion"]), tuple(read))


def _of_grid(name: str, values: dict[str, Any], unit: float) -> SweptSuite:
    """A suite of which the scores at the rule's and the best lambda are known, and few others."""
    experts = int(values["experts"])
    read = []
    for line in values["lines"]:
        rule, best = line["rule"], line["best"]
        known = [rule, best, *(one for one in values["further"] if one["line"] == line["line"])]
        points = {float(point["lam"]): float(point["average"]) / unit for point in known}
        read.append(SweptLine(line["line"], math.sqrt(experts), rule["lam"], best["lam"], points))
    low, high = values["kappa_range"]
    optima = values.get("optima", {})
    return SweptSuite(name, experts, values["dispersion"], tuple(read), values["base"], (low, high), optima)
