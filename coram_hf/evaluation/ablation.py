"""Ablations: the variants of a line at the rule's lambda, in the layout of the paper's component tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from coram_hf.config import CoramConfig
from coram_hf.evaluation.across import SweptLine
from coram_hf.evaluation.analysis import CELLS, components
from coram_hf.evaluation.bench import Bench, check_lambdas, read_baselines, read_lines
from coram_hf.evaluation.conclusions import conclusions
from coram_hf.evaluation.cost import cost_of, write_cost
from coram_hf.evaluation.figure import draw_ablation
from coram_hf.evaluation.grids import changed, expand
from coram_hf.evaluation.intervals import difference
from coram_hf.evaluation.memory import Memory
from coram_hf.evaluation.scores import Line, Point, Results, percent, plain
from coram_hf.evaluation.seeds import repeat_sampled
from coram_hf.evaluation.suite import Suite, mean_over, values_of
from coram_hf.evaluation.suite_file import check_given, open_tasks_or_suite, read_scores, rows_of
from coram_hf.evaluation.sweep import JOURNAL, parse_lambdas
from coram_hf.evaluation.tasks import TaskSource
from coram_hf.hub.text import inline
from coram_hf.inputs.opening import ModelSource, ModelSources
from coram_hf.inputs.options import MergeOptions
from coram_hf.methods.registry import Preset, usual_names
from coram_hf.outputs.files import check_output_folder, output_folder, replacing, write_whole
from coram_hf.report.tables import markdown as table

JSON, TABLE, FIGURE = "ablation.json", "ablation.md", "ablation.png"
OTHER_KAPPA = 1.10
"""Beside the rule's 1.15."""
NONE = "n/a"


@dataclass(frozen=True)
class Ablation:
    """The variants of the first line of `starts`; has_residual: whether a residual pathway has a meaning."""

    suite: Suite
    starts: tuple[str, ...]
    lines: tuple[Line, ...]
    references: dict[str, Results]
    has_residual: bool
    cost: dict[str, Any] = field(default_factory=dict, compare=False)

    def outside(self, found: Results) -> float | None:
        """The out-of-domain average, if there is one."""
        known = self.suite.outside and all(task in found for d in self.suite.outside for task in d.tasks)
        return float(mean_over(self.suite.outside, values_of(found))) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain values."""
        return {
            "lines": [{**line.to_dict(), "out_of_domain": plain(line.beyond)} for line in self.lines],
            "references": {name: plain(found) for name, found in self.references.items()},
            "components": {cell: best._asdict() for cell, best in self._components().items()},
            "has_residual": self.has_residual,
        }

    def summary(self) -> dict[str, Any]:
        """The facts that the command ends with; averages are in percent."""
        return conclusions(self.suite, self.lines, self.references, self.cost)

    def __str__(self) -> str:
        parts = ["## Lines at the rule's lambda", self._table()]
        parts += ["## Components: the best line of each at the rule's lambda", self._cells()]
        for title, text in (
            ("Matched pairs", self._pairs()),
            ("Slice height", self._heights()),
            (f"kappa {OTHER_KAPPA:.2f} beside the rule's", self._kappas()),
        ):
            if text:
                parts += [f"## {title}", text]
        return "\n\n".join(parts) + "\n"

    def _components(self) -> dict[str, Any]:
        plain_lines = [
            SweptLine(line.name, 1.0, line.rule.lam, line.rule.lam, {line.rule.lam: line.rule.average})
            for line in self.lines
            if line.config.slice_height == self.lines[0].config.slice_height
        ]
        return components(plain_lines)

    def _table(self) -> str:
        inner, outer = self.suite.inside, self.suite.outside
        header = ["line", "lambda", *(inline(domain.name) for domain in inner), "average", "s.e."]
        header += ["best lambda", "best"] + ["out-of-domain", "Pareto"] * bool(outer)
        front = pareto({line.name: (line.rule.average, self.outside(line.beyond)) for line in self.lines})
        rows = []
        for line in self.lines:
            values, error = values_of(line.rule.results), line.rule.standard_error
            row = [f"`{line.name}`", f"{line.rule.lam:.3f}", *(percent(d.score(values)) for d in inner)]
            row += [percent(line.rule.average), "-" if error is None else percent(error)]
            swept = line.name in self.starts and len(line.points) > 2
            row += [f"{line.best.lam:.2f}", percent(line.best.average)] if swept else ["-", "-"]
            if outer:
                beyond = self.outside(line.beyond)
                row += ["-" if beyond is None else percent(beyond), "yes" if line.name in front else ""]
            rows.append(row)
        for name, found in self.references.items():
            values = values_of(found)
            error = self.suite.standard_error(found)
            row = [
                inline(name),
                "-",
                *(percent(d.score(values)) for d in inner),
                percent(self.suite.score(found)),
            ]
            row += ["-" if error is None else percent(error), "-", "-"]
            beyond = self.outside(found)
            rows.append(row + (["-" if beyond is None else percent(beyond), ""] if outer else []))
        return table(header, rows)

    def _cells(self) -> str:
        found = self._components()
        rows = []
        for cell in CELLS:
            best = found.get(cell)
            meaningless = "RP" in cell and not self.has_residual
            text = NONE if meaningless else "-" if best is None else percent(best.score)
            rows.append([cell, text, "" if best is None or meaningless else f"`{best.line}`"])
        note = "" if self.has_residual else "\n\nn/a: no expert changes a weight outside the targets."
        return table(["", "average", "line"], rows) + note

    def _pairs(self) -> str:
        """Lines that differ from the first one in a single component, domain by domain, with an interval."""
        first = self.lines[0]
        values, rows = values_of(first.rule.results), []
        for line in self.lines[1:]:
            component = changed(first.config, line.config)
            if component is None:
                continue
            other = values_of(line.rule.results)
            deltas = [f"{100 * (d.score(other) - d.score(values)):+.2f}" for d in self.suite.inside]
            inner = {task: line.rule.results[task] for task in first.rule.results}
            found = difference(self.suite.average, inner, first.rule.results)
            bounds = f"{100 * found.low:+.2f} to {100 * found.high:+.2f}"
            rows.append([component, f"`{line.name}`", *deltas, f"{100 * found.estimate:+.2f}", bounds])
        header = ["component", f"against `{first.name}`", *(inline(d.name) for d in self.suite.inside)]
        return table([*header, "average", "95% interval"], rows) if rows else ""

    def heights(self) -> list[tuple[int, Line]]:
        """The first line at every slice height."""
        alike = [
            line
            for line in self.lines
            if line is self.lines[0] or changed(self.lines[0].config, line.config) == "slice_height"
        ]
        return sorted(((line.config.slice_height, line) for line in alike), key=lambda pair: pair[0])

    def _heights(self) -> str:
        found = self.heights()
        if len(found) < 2:
            return ""
        rows = [[str(height), percent(line.rule.average)] for height, line in found]
        return table(["h", f"`{self.lines[0].name}`"], rows)

    def _kappas(self) -> str:
        """Both averages of every line, and how many comparisons with the references turn."""
        pairs = [(line, self._other(line)) for line in self.lines]
        known = [(line, other) for line, other in pairs if other is not None]
        if not known:
            return ""
        rivals = [self.suite.score(found) for found in self.references.values()]
        turned = sum(
            (line.rule.average > rival) != (other.average > rival)
            for line, other in known
            for rival in rivals
        )
        rows = [
            [f"`{line.name}`", percent(line.rule.average), percent(other.average),
             f"{100 * (other.average - line.rule.average):+.2f}"]
            for line, other in known
        ]  # fmt: skip
        text = table(["line", f"kappa {known[0][0].facts['kappa']:g}", f"kappa {OTHER_KAPPA:g}", ""], rows)
        count = len(known) * len(rivals)
        return f"{text}\n\n{turned} of {count} comparisons with the references are decided otherwise."

    @staticmethod
    def _other(line: Line) -> Point | None:
        if not line.facts["kappa"] or line.facts["kappa"] < 1:
            return None
        lam = line.facts["lam"] / line.facts["kappa"] * OTHER_KAPPA
        return next((point for point in line.points if abs(point.lam - lam) < 1e-9 * abs(lam)), None)


def pareto(points: Mapping[str, tuple[float, float | None]]) -> set[str]:
    """The names of points that no other is better than in one average and at least as good in the other."""
    known = {name: (a, b) for name, (a, b) in points.items() if b is not None}
    return {
        name
        for name, (a, b) in known.items()
        if not any(c >= a and d >= b and (c > a or d > b) for c, d in known.values())
    }


def run_ablation(
    base: ModelSource,
    experts: ModelSources,
    lines: str | CoramConfig | Sequence[str | CoramConfig] = "full",
    *,
    grids: Sequence[str],
    lambdas: str | Iterable[float] = (),
    tasks: Sequence[TaskSource] = (),
    suite: str | Path | None = None,
    scores: str | Path | None = None,
    seeds: Sequence[int] = (),
    output: str | Path | None = None,
    baselines: Sequence[str] | Mapping[str, Preset] = usual_names(),
    limit: int | None = None,
    **options: Unpack[MergeOptions],
) -> Ablation:
    """Score the variants of the first line along grids at the rule's lambda, and sweep the given lines.

    Args:
        lines: the first is expanded; all of them are swept over `lambdas`.
        grids: `conflict`, `spread`, `residual`, `branch`, `height`, or `all`.
        output: a folder for ablation.json, ablation.md, ablation.png and the journal, from which an
            interrupted run resumes; a sweep in the same folder shares it. Others as in `run_sweep`.
    """
    starts = read_lines(lines)
    wanted = parse_lambdas(lambdas) if isinstance(lambdas, str) else check_lambdas(lambdas)
    presets = read_baselines(baselines)
    names = [config.line for config in starts]
    opened = open_tasks_or_suite(tasks, (), suite, limit)
    inside, beyond = repeat_sampled(opened.inside, seeds), repeat_sampled(opened.outside, seeds)
    given = {} if scores is None else read_scores(scores)
    if output is not None:
        check_output_folder(output)
    memory = Memory(None if output is None else Path(output) / JOURNAL)
    bench = Bench(base, experts, memory, starts[0].shared, options, given, suggest=False)
    bench.check([*inside, *beyond])
    has_residual = bench.has_residual(starts[0])
    grown = expand(starts[0], grids)
    every = [*grown, *(one for one in starts if one.line not in {config.line for config in grown})]
    every = [config for config in every if has_residual or config.residual is None]
    check_given(opened.external, given, ["base", *presets, *rows_of(every, ()), *rows_of(starts, wanted)])
    folder = None if output is None else output_folder(output, (JSON, TABLE, FIGURE))
    found = tuple(
        bench.line(
            config, wanted if config.line in names else (), inside, beyond, opened.suite,
            share=True, kappas=() if opened.external else (OTHER_KAPPA,),
        )
        for config in every
    )  # fmt: skip
    before = bench.seconds
    references = {"base": bench.base([*inside, *beyond])}
    references |= {name: bench.baseline(name, preset, [*inside, *beyond]) for name, preset in presets.items()}
    cost = cost_of(found, bench.seconds - before)
    ablation = Ablation(opened.suite, tuple(names), found, references, has_residual, cost)
    if folder is not None:
        with replacing(folder / FIGURE) as figure:
            draw_ablation(ablation, figure)
        write_whole(folder / TABLE, str(ablation))
        write_whole(folder / JSON, json.dumps(ablation.to_dict(), indent=1) + "\n")
        write_cost(cost, folder)
    return ablation
