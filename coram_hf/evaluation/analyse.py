"""`analyse`: tables and a figure across suites, beside the paper's bases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from coram_hf.config import CoramConfig
from coram_hf.evaluation.across import SweptSuite, read_suites
from coram_hf.evaluation.analysis import (
    CELLS,
    by_threshold,
    components,
    distribution,
    distribution_of,
    gaps,
    held_out,
    one_configuration,
    without_spread_only,
)
from coram_hf.evaluation.scores import percent
from coram_hf.hub.text import inline
from coram_hf.outputs.files import check_output_folder, output_folder, replacing, write_whole
from coram_hf.report.charts import PAPER_BASES, PAPER_KAPPA
from coram_hf.report.figures import new_figure, plain_label, save_figure
from coram_hf.report.tables import markdown as table

JSON, TABLE, FIGURE = "analysis.json", "analysis.md", "kappa.png"
THRESHOLDS = (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 20.0)
PREFERRED = ("full", "lr")
"""The lines whose score is printed for a held-out kappa; the first that a suite has."""
MOST = 10
"""Configurations in the table of those that all suites have."""
BOUND = 0.0072
"""The gap of the rule that the paper states as its bound, for its main tables."""
NONE = "n/a"


@dataclass(frozen=True)
class Analysis:
    """Suites side by side; `threshold` is the rule's, `thresholds` are those to try."""

    suites: tuple[SweptSuite, ...]
    threshold: float
    thresholds: tuple[float, ...]
    preferred: tuple[str, ...] = PREFERRED

    def paper_bases(self) -> list[str]:
        """The paper's bases, without those that are among the suites."""
        own = {suite.base for suite in self.suites}
        return [base for base in PAPER_BASES if base not in own]

    def kappas(self) -> list[list[Any]]:
        """Suite or base, N, D, number of lines, lowest and highest kappa_opt."""
        rows: list[list[Any]] = [
            [s.name, s.experts, s.dispersion, len(s.lines), *s.kappas] for s in self.suites
        ]
        rows += [
            [f"{base} (paper)", None, PAPER_BASES[base], None, *PAPER_KAPPA[base]]
            for base in self.paper_bases()
        ]
        return sorted(rows, key=lambda row: float(row[2]))

    def swept(self) -> list[SweptSuite]:
        return [suite for suite in self.suites if suite.lines]

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain values."""
        keys = ("suite", "experts", "dispersion", "lines", "lowest", "highest")
        return {
            "kappa_opt": [dict(zip(keys, row, strict=True)) for row in self.kappas()],
            "held_out": [asdict(one) for one in held_out(self.suites, self.threshold, self.preferred)],
            "thresholds": by_threshold(self.suites, self.thresholds),
            "gaps": {s.name: gaps(s.lines, BOUND)._asdict() for s in self.swept()},
            "best_lambdas": {
                s.name: {
                    "all": distribution(s.lines)._asdict(),
                    "without_spread_only": distribution(kept)._asdict()
                    if (kept := without_spread_only(s))
                    else None,
                    "printed": distribution_of(list(s.optima.values()))._asdict() if s.optima else None,
                }
                for s in self.swept()
            },
            "components": {
                s.name: {k: b._asdict() for k, b in components(s.lines).items()} for s in self.swept()
            },
            "one_configuration": [one._asdict() for one in one_configuration(self.suites)],
        }

    def summary(self) -> dict[str, Any]:
        """The facts that the command ends with; gaps are in percent."""
        found: dict[str, Any] = {"suites": len(self.suites), "lines": sum(len(s.lines) for s in self.suites)}
        swept = {suite.name: gaps(suite.lines, BOUND) for suite in self.swept()}
        if swept:
            name, worst = max(swept.items(), key=lambda item: item[1].largest)
            mean_gap = sum(one.mean * one.lines for one in swept.values()) / found["lines"]
            found["mean gap of the rule"] = percent(mean_gap)
            found["largest gap of the rule"] = f"{percent(worst.largest)} ({worst.line}, {name})"
            found[f"lines above {percent(BOUND)}"] = sum(one.above for one in swept.values())
        for one in held_out(self.suites, self.threshold, self.preferred):
            found[f"kappa without {one.suite}"] = f"{one.kappa:.3f}, gap {percent(one.gap)} ({one.line})"
        everywhere = one_configuration(self.suites)
        if everywhere:
            behind = mean(everywhere[0].behind.values())
            found["best line on all suites"] = f"{everywhere[0].line}, {percent(behind)} behind on average"
        return found

    def __str__(self) -> str:
        parts = ["## kappa_opt against D", self._kappas(), "## kappa from the other suites", self._held_out()]
        parts += ["## Gap by threshold D_0", self._thresholds(), "## Gap of the rule by line", self._gaps()]
        parts += ["## Best lambdas", self._lambdas()]
        parts += ["## Components at the rule's lambda", self._components()]
        parts += ["## One configuration on all suites", self._everywhere()]
        return "\n\n".join(parts) + "\n"

    def _kappas(self) -> str:
        rows = [
            [inline(name), *(NONE if n is None else str(n) for n in (experts,)), f"{dispersion:.2f}",
             NONE if lines is None else str(lines), f"{low:.2f} to {high:.2f}"]
            for name, experts, dispersion, lines, low, high in self.kappas()
        ]  # fmt: skip
        return table(["suite", "N", "D", "lines", "kappa_opt"], rows)

    def _held_out(self) -> str:
        rows = [
            [
                inline(one.suite), f"{one.kappa:.3f}", f"{one.predicted:.2f}", one.line, f"{one.lam:.2f}",
                percent(one.score), percent(one.best), percent(one.gap),
            ]
            for one in held_out(self.suites, self.threshold, self.preferred)
        ]  # fmt: skip
        if not rows:
            return f"This needs two suites with D below {self.threshold:g}."
        header = [
            "held out",
            "kappa of the others",
            "lambda",
            "line",
            "nearest evaluated",
            "score",
            "best",
            "gap",
        ]
        return table(header, rows)

    def _thresholds(self) -> str:
        rows = []
        for threshold, found in by_threshold(self.suites, self.thresholds).items():
            cells = [f"{NONE if g is None else percent(g)} (kappa {k:g})" for k, g in found.values()]
            rows.append([f"{threshold:g}", *cells])
        return table(["D_0", *(inline(suite.name) for suite in self.swept())], rows)

    def _gaps(self) -> str:
        rows = []
        for suite in self.swept():
            found = gaps(suite.lines, BOUND)
            sizes = [percent(found.mean), f"{percent(found.largest)} `{found.line}`"]
            rows.append([inline(suite.name), str(found.lines), *sizes, str(found.above)])
        return table(["suite", "lines", "mean", "largest", f"above {percent(BOUND)}"], rows)

    def _lambdas(self) -> str:
        rows = []
        for suite in self.swept():
            for what, best in (
                ("all", [line.best_lam for line in suite.lines]),
                ("without spread-only", [line.best_lam for line in without_spread_only(suite)]),
                ("printed in its table of optima", list(suite.optima.values())),
            ):
                if best:
                    found = distribution_of(best)
                    counts = ", ".join(f"{lam:g}: {count}" for lam, count in found.counts.items())
                    rows.append([inline(suite.name), what, str(len(best)), f"{found.median:.2f}", counts])
        return table(["suite", "lines", "number", "median", "lambda: lines"], rows)

    def _components(self) -> str:
        found = {suite.name: components(suite.lines) for suite in self.swept()}
        rows = [
            [
                cell,
                *(
                    f"{percent(b[cell].score)} `{b[cell].line}`" if cell in b else NONE
                    for b in found.values()
                ),
            ]
            for cell in CELLS
        ]
        return table(["", *map(inline, found)], rows)

    def _everywhere(self) -> str:
        found, suites = one_configuration(self.suites), [suite.name for suite in self.swept()]
        if not found:
            return "No line was swept on all suites."
        rows = [
            [f"`{one.line}`", *(percent(one.scores[s]) for s in suites), percent(mean(one.behind.values())),
             percent(max(one.behind.values()))]
            for one in found[:MOST]
        ]  # fmt: skip
        note = f"\n\nThe first {MOST} of {len(found)}." if len(found) > MOST else ""
        header = ["line", *map(inline, suites), "behind each suite's best, mean", "most"]
        return table(header, rows) + note


def analyse(
    paths: Sequence[str | Path],
    *,
    thresholds: Sequence[float] = THRESHOLDS,
    threshold: float = CoramConfig().dispersion_threshold,
    lines: Sequence[str] = PREFERRED,
    output: str | Path | None = None,
) -> Analysis:
    """Analyse sweeps of several suites together; `output` is a folder for tables, numbers and figure.

    Args:
        paths: sweep.json files or their folders, and files of several suites such as the paper's grid.
        threshold: suites with D below it share their kappa in the held-out test.
        lines: those whose score is printed for a held-out kappa, in order of preference.
    """
    found = Analysis(tuple(read_suites(paths)), threshold, tuple(thresholds), tuple(lines))
    if output is not None:
        check_output_folder(output)
        folder = output_folder(output, (JSON, TABLE, FIGURE))
        with replacing(folder / FIGURE) as figure:
            draw_kappas(found, figure)
        write_whole(folder / TABLE, str(found))
        write_whole(folder / JSON, json.dumps(found.to_dict(), indent=1) + "\n")
    return found


def draw_kappas(found: Analysis, path: Path) -> None:
    """kappa_opt against D: a point for every line, a bar for the range of a suite or base."""
    figure = new_figure(figsize=(7, 4.5), dpi=110)
    axes: Any = figure.subplots()
    for suite in found.suites:
        axes.plot(
            [suite.dispersion] * 2, suite.kappas, "-", linewidth=3, alpha=0.5, label=plain_label(suite.name)
        )
        axes.plot(
            [suite.dispersion] * len(suite.lines), [line.kappa for line in suite.lines], "k.", markersize=3
        )
    for base in found.paper_bases():
        axes.plot([PAPER_BASES[base]] * 2, PAPER_KAPPA[base], "_-", color="#999999")
        axes.annotate(
            f"{base} (paper)", (PAPER_BASES[base], PAPER_KAPPA[base][1]), fontsize=7, color="#555555"
        )
    for kappa in (1.15, 0.5):
        axes.axhline(kappa, linestyle="--", linewidth=1, color="#bbbbbb")
    axes.set_xscale("log")
    axes.set_xlabel("D")
    axes.set_ylabel(r"$\kappa_{opt} = \lambda^* / \hat{c}$ (dashed: the rule's)")
    axes.legend(fontsize=8)
    save_figure(figure, path)
