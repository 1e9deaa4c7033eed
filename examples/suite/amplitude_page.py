"""Draw the amplitude study, and write the tables of AMPLITUDE.md from results/amplitude.

python examples/suite/amplitude_page.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import numpy as np
from amplitude import FOLDER, SIZES, UNBALANCED, WAYS
from matplotlib import pyplot as plt
from study import average
from suites import HERE, SUITES
from tables import put, recommended_direction
from tables import read as read_study

from coram_hf.calibration.scale import LIMIT
from coram_hf.report.tables import markdown as table

PAGE, FIGURE = HERE / "AMPLITUDE.md", FOLDER / "amplitude.png"
KAPPA = 1.15
CONSTANTS = tuple(np.round(np.geomspace(0.6, 3.0, 24), 2).tolist())
KAPPAS = (0.8, 0.9, 1.0, 1.15, 1.3, 1.5)
LIMITS = (0.06, 0.08, 0.1, 0.11, 0.12, 0.13, 0.14, 0.16, 0.2, 0.25, 0.3)
"""The constants that may be chosen on other suites: sizes, and kappas and limits of the neutral scale."""
TITLES = {"sum": "sum of the updates (CORAM's, for small updates)", "wudi": "WUDI", "tsv": "TSV-M"}


class Curve(NamedTuple):
    """One direction on one suite: measurements against the size a of the update."""

    a: np.ndarray
    score: np.ndarray
    kl: np.ndarray
    shift: np.ndarray
    typical: float

    def at(self, a: float) -> float:
        """The score at any size, linear in log a between those measured."""
        return float(np.interp(np.log(a), np.log(self.a), self.score))

    def neutral(self, limit: float = math.inf) -> float:
        """The size at which neutral text moves as much as by a typical expert, and by `limit` at most.

        Beyond what was measured, a divergence grows with the square of the size.
        """
        target, order = min(self.typical, limit), np.maximum.accumulate(self.shift)
        beyond = math.sqrt(max(1.0, target / order[-1]) * min(1.0, target / order[0]))
        return beyond * float(np.exp(np.interp(np.log(target), np.log(order), np.log(self.a))))

    def lowest_kl(self) -> float:
        """The size of the lowest divergence, from a parabola through the lowest point and its neighbours."""
        i = int(np.clip(self.kl.argmin(), 1, len(self.a) - 2))
        x, y = np.log(self.a[i - 1 : i + 2]), self.kl[i - 1 : i + 2]
        bend, slope, _ = np.polyfit(x, y, 2)
        return float(np.exp(np.clip(-slope / (2 * bend), x[0], x[2]))) if bend > 0 else float(self.a[i])


Curves = Mapping[str, Curve]
"""The curves of one direction, by suite."""


def read() -> dict[str, dict[str, Curve]]:
    """All curves that are complete, by direction and suite."""
    found: dict[str, dict[str, Curve]] = {}
    for suite in SUITES:
        path = FOLDER / f"{suite}.jsonl"
        rows = [json.loads(line) for line in path.open()] if path.is_file() else []
        for way in (*WAYS, UNBALANCED):
            own = sorted((row for row in rows if row["way"] == way), key=lambda row: row["a"])
            if len(own) == len(SIZES):
                found.setdefault(way, {})[suite] = curve(own)
    return found


def curve(rows: Sequence[Mapping[str, Any]]) -> Curve:
    columns = ([row[key] for row in rows] for key in ("a", "kl", "shift"))
    a, kl, shift = (np.array(column) for column in columns)
    score = np.array([100 * average(row) for row in rows])
    return Curve(a, score, kl, shift, rows[0]["typical shift"])


Rule = Callable[[Curve], float]
"""A size for a curve, without a look at its scores."""


def chosen(others: Iterable[Curve], rules: Sequence[Rule]) -> Rule:
    """The rule that is best on average over other suites."""
    known = list(others)
    return max(rules, key=lambda rule: float(np.mean([one.at(rule(one)) for one in known])))


def sizes(curves: Curves, suite: str) -> dict[str, float]:
    """The size that each rule takes for a suite; what is chosen is chosen on the other suites."""
    own, others = curves[suite], [one for name, one in curves.items() if name != suite]
    return {
        "a = 1.15": KAPPA,
        "constant of the others": chosen(others, [_constant(a) for a in CONSTANTS])(own),
        "neutral scale, no limit, 1.15": KAPPA * own.neutral(),
        "neutral scale, no limit, kappa of the others": chosen(others, [_neutral(k) for k in KAPPAS])(own),
        "neutral scale, 1.15, limit of the others": chosen(others, [_neutral(KAPPA, m) for m in LIMITS])(own),
        f"neutral scale, 1.15, limit {LIMIT}: `recommended`": KAPPA * own.neutral(LIMIT),
        "lowest KL on 16 prompts": own.lowest_kl(),
        "best of all": float(own.a[own.score.argmax()]),
    }


def _constant(a: float) -> Rule:
    return lambda one: a


def _neutral(kappa: float, limit: float = math.inf) -> Rule:
    return lambda one: kappa * one.neutral(limit)


def scores(curves: Curves) -> str:
    """What every rule scores, by suite and on average, with the size it takes."""
    found = {suite: sizes(curves, suite) for suite in curves}
    rules = list(next(iter(found.values())))
    lines = []
    for rule in rules:
        reached = [one.at(found[suite][rule]) for suite, one in curves.items()]
        cells = [f"{at:.1f} ({found[suite][rule]:.2f})" for suite, at in zip(curves, reached, strict=True)]
        lines.append([rule, *cells, f"{np.mean(reached):.1f}"])
    return table(["rule", *(SUITES[suite].title for suite in curves), "average"], lines)


def directions(ways: Mapping[str, Curves]) -> str:
    """The average score of some directions on the suites where all of them are measured, by rule."""
    shared = [suite for suite in SUITES if all(suite in curves for curves in ways.values())]
    lines = []
    for way, curves in ways.items():
        common = {suite: curves[suite] for suite in shared}
        taken = {suite: sizes(common, suite) for suite in shared}
        rules = list(taken[shared[0]])
        means = [np.mean([one.at(taken[suite][rule]) for suite, one in common.items()]) for rule in rules]
        lines.append([TITLES.get(way, way), *(f"{mean:.1f}" for mean in means)])
    return table([f"average of {len(shared)} suites", *rules], lines) + "\n"


def measured(curves: Curves) -> str:
    """Score and divergence at every size."""
    lines = []
    for suite, one in curves.items():
        cells = [f"{score:.1f} / {kl:.3f}" for score, kl in zip(one.score, one.kl, strict=True)]
        lines.append([SUITES[suite].title, *cells])
    return table(["score / KL at a =", *(f"{a:g}" for a in SIZES)], lines)


def auto(found: Mapping[str, Curves]) -> Curves:
    """The direction that `recommended` takes for each suite."""
    ways = {suite: recommended_direction(suite) for suite in SUITES}
    return {suite: found[way][suite] for suite, way in ways.items() if suite in found.get(way, {})}


def tables(found: Mapping[str, Curves]) -> str:
    """All tables of the page."""
    parts = ["### Directions\n", directions({"sum": found["sum"], "`auto`": auto(found)})]
    parts += ["Where all three are measured:\n", directions({way: found[way] for way in WAYS})]
    for title, curves in {"the recommended direction, `auto`": auto(found), **found}.items():
        if len(curves) > 2:
            parts += [f"### Rules for the size: {TITLES.get(title, title)}\n", scores(curves), ""]
    for way, curves in found.items():
        parts += [f"### Measured: {TITLES.get(way, way)}\n", measured(curves), ""]
    return "\n".join(parts)


def cost() -> str:
    """What calibration takes: processor seconds on one core, merging included."""
    lines = []
    for suite, rows in read_study("validation").items():
        row = rows.get("calibrated")
        if row:
            cells = [row["granularity"], str(row["processor seconds"]), f"{100 * average(row):.1f}"]
            groups = rows.get("calibrated, groups")
            lines.append([SUITES[suite].title, *cells, f"{100 * average(groups):.1f}" if groups else ""])
    header = ["suite", "fitted per expert and", "processor seconds", "validation score", "with groups"]
    return table(header, lines) + "\n"


def draw(found: Mapping[str, Curves]) -> None:
    """Scores above, divergences below, a column for each direction."""
    ways = [way for way in found if len(found[way]) > 2]
    figure, panels = plt.subplots(2, len(ways), figsize=(3.1 * len(ways), 5.2), sharex=True, sharey="row")
    colors = dict(zip(SUITES, plt.get_cmap("tab10").colors, strict=True))
    for column, way in zip(np.reshape(panels, (2, -1)).T, ways, strict=True):
        for suite, one in found[way].items():
            style = {"color": colors[suite], "marker": "o", "markersize": 3}
            for panel, values in zip(column, (one.score, one.kl), strict=True):
                panel.plot(one.a, values, label=SUITES[suite].title, **style)
        column[0].set_title(way)
        column[1].set_xlabel("a, size of the update over an expert's")
        column[1].set_yscale("log")
        for panel in column:
            panel.set_xscale("log")
            panel.set_xticks(SIZES, [f"{a:g}" for a in SIZES], fontsize=7)
            panel.minorticks_off()
            panel.axvline(KAPPA, color="grey", linewidth=0.8)
            panel.spines[["top", "right"]].set_visible(False)
    np.reshape(panels, (2, -1))[0, 0].set_ylabel("percent right, validation", fontsize=9)
    np.reshape(panels, (2, -1))[1, 0].set_ylabel("KL(expert || merge), prompts", fontsize=9)
    handles = {line.get_label(): line for panel in figure.axes for line in panel.get_lines()}
    handles = {label: line for label, line in handles.items() if not label.startswith("_")}
    figure.legend(handles.values(), handles, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(FIGURE, dpi=130)


def main() -> None:
    found = read()
    draw(found)
    put(PAGE, "tables", tables(found))
    put(PAGE, "cost", cost())
    print(tables(found), cost(), sep="\n")


if __name__ == "__main__":
    main()
