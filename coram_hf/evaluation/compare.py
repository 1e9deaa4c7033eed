"""CORAM lines, baselines, the base and the experts on one suite, in the layout of the paper's tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from typing_extensions import Unpack

from coram_hf.baselines import MERGEBENCH_PRESETS, METHODS, PAPER_PRESETS
from coram_hf.config import CoramConfig
from coram_hf.evaluation.bench import OF_ROTATIONS, Bench, check_lambdas, read_baselines, read_lines
from coram_hf.evaluation.conclusions import conclusions
from coram_hf.evaluation.intervals import DRAWS, difference
from coram_hf.evaluation.memory import Memory
from coram_hf.evaluation.rows import Difference, Row, largest
from coram_hf.evaluation.scores import Line, Results, percent, plain
from coram_hf.evaluation.seeds import repeat_sampled
from coram_hf.evaluation.suite import Suite, mean_over, tasks_of, values_of
from coram_hf.evaluation.suite_file import check_given, open_tasks_or_suite, read_scores, rows_of
from coram_hf.evaluation.sweep import JOURNAL, parse_lambdas
from coram_hf.evaluation.tasks import TaskSource
from coram_hf.hub.text import inline
from coram_hf.inputs.opening import ModelSource, ModelSources
from coram_hf.inputs.options import MergeOptions
from coram_hf.methods.registry import Preset, usual_names
from coram_hf.outputs.files import check_output_folder, output_folder, write_whole
from coram_hf.report.tables import markdown as table

JSON, TABLE, OUTCOMES = "compare.json", "compare.md", "outcomes.json"
RIVALS = (
    *MERGEBENCH_PRESETS,
    *(name for name, preset in PAPER_PRESETS.items() if not METHODS[preset.method].mergebench),
    *(name for name in usual_names() if not METHODS[name].presets and not METHODS[name].mergebench),
)
"""The default baselines, with MergeBench's coefficients where it has some, as in the paper's tables."""


@dataclass(frozen=True)
class Comparison:
    """All scores, in-domain and, if requested, out-of-domain; columns and averages are over domains.

    A line's row is its model at the rule's lambda; its best lambda is the only number from a sweep.
    """

    suite: Suite
    base: Results
    experts: dict[str, Results]
    baselines: dict[str, Results]
    lines: tuple[Line, ...]

    @property
    def in_domain(self) -> tuple[str, ...]:
        return tuple(tasks_of(self.suite.inside))

    @property
    def out_of_domain(self) -> tuple[str, ...]:
        return tuple(tasks_of(self.suite.outside))

    def to_dict(self) -> dict[str, Any]:
        """Every number but the outcomes of questions, as plain values."""
        return {
            "in_domain": list(self.in_domain),
            "out_of_domain": list(self.out_of_domain),
            "base": plain(self.base),
            "experts": {name: plain(found) for name, found in self.experts.items()},
            "baselines": {name: plain(found) for name, found in self.baselines.items()},
            "lines": [{**line.to_dict(), "out_of_domain": plain(line.beyond)} for line in self.lines],
            "rows": {
                row.name: dict(zip(self._header()[1:], row.values, strict=True)) for row in self._rows()
            },
            "differences": [found._asdict() for found in self.differences],
        }

    def summary(self) -> dict[str, Any]:
        """The facts that the command ends with: averages in percent, and the first line's differences."""
        found = conclusions(self.suite, self.lines, {"base": self.base, **self.baselines}, {})
        if self.experts:
            specialists = self._specialists()
            average = specialists.values[self._error - 1]
            found[specialists.name] = None if average is None else percent(average)
        for one in self.differences:
            if one.row == self.lines[0].name:
                found[f"{one.row} against {one.against}"] = "{} ({})".format(*one.points())
        return found

    def outcomes(self) -> dict[str, dict[str, list[float]]]:
        """The outcome of every question, by row and task."""
        rows = {"base": self.base, **self.experts, **self.baselines}
        rows |= {f"{line.name} @ {p.lam:g}": p.results for line in self.lines for p in line.points}
        rows |= {line.name: line.rule.results | line.beyond for line in self.lines}
        return {
            name: {task: list(one.outcomes) for task, one in found.items() if one.outcomes}
            for name, found in rows.items()
        }

    @cached_property
    def differences(self) -> list[Difference]:
        """Every merge against the best rival, and every swept line's rule against its best lambda."""
        found = []
        if self.baselines:
            best = max(self.baselines, key=lambda name: self.suite.score(self.baselines[name]))
            merges = self.baselines | {line.name: line.rule.results for line in self.lines}
            found += [
                self._difference(name, best, merges[name], merges[best]) for name in merges if name != best
            ]
        for line in self.lines:
            if len(line.points) > 1:
                what = f"{line.name} at lambda {line.best.lam:.2f}"
                found.append(self._difference(line.name, what, line.rule.results, line.best.results))
        return found

    def _difference(self, name: str, other: str, ours: Results, theirs: Results) -> Difference:
        kept = {task: ours[task] for task in self.in_domain}
        return Difference(name, other, *difference(self.suite.average, kept, theirs))

    def __str__(self) -> str:
        """The paper's main table in Markdown, the best of every column in bold; differences; seeds."""
        rows = self._rows()
        ahead = 1 + bool(self.experts)
        columns = range(len(rows[0].values))
        bold = [None if i == self._error else largest(row.values[i] for row in rows[ahead:]) for i in columns]
        shown = [row.cells([None] * len(bold) if i < ahead else bold) for i, row in enumerate(rows)]
        parts = [table(self._header(), shown)]
        if self.differences:
            header = ["row", "against", "difference of the averages", "95% interval"]
            parts.append(table(header, [one.cells() for one in self.differences]))
            parts.append(f"Paired bootstrap over questions, stratified by task, {DRAWS} draws.")
        seeds = self._seeds()
        return "\n\n".join([*parts, *([seeds] if seeds else [])]) + "\n"

    @property
    def _error(self) -> int:
        """The column of the standard error."""
        return len(self.suite.inside) + 1

    def _header(self) -> list[str]:
        header = ["method", *(inline(domain.name) for domain in self.suite.inside)]
        header += ["average (rule)", "s.e.", "average (best lambda)"]
        if self.suite.outside:
            header += [*(inline(domain.name) for domain in self.suite.outside), "out-of-domain average"]
        return header

    def _rows(self) -> list[Row]:
        rows = [self._row("base", self.base)]
        if self.experts:
            rows.append(self._specialists())
        rows += [self._row(name, found) for name, found in self.baselines.items()]
        return rows + [self._row(line.name, line.rule.results | line.beyond, line) for line in self.lines]

    def _specialists(self) -> Row:
        """Each domain's own expert; the best of any if the experts of some domains are not known."""
        inner = self.suite.inside
        if all(domain.expert in self.experts for domain in inner):
            own = {domain.name: self.experts[str(domain.expert)] for domain in inner}
            return self._row("task-specific FT", {}, by_domain=own)
        best = {}
        for domain in inner:
            known = [found for found in self.experts.values() if domain.tasks.keys() <= found.keys()]
            best[domain.name] = max(known, key=lambda found: domain.score(values_of(found)), default={})
        return self._row("best expert of each task", {}, by_domain=best)

    def _row(
        self, name: str, found: Results, line: Line | None = None, by_domain: dict[str, Results] | None = None
    ) -> Row:
        inner = self.suite.inside
        of = by_domain or {domain.name: found for domain in inner}
        inside: list[float | None] = [
            domain.score(values_of(of[domain.name]))
            if domain.tasks.keys() <= of[domain.name].keys()
            else None
            for domain in inner
        ]
        known = [(d.weight, v) for d, v in zip(inner, inside, strict=True) if v is not None]
        average = (
            sum(w * v for w, v in known) / sum(w for w, _ in known) if len(known) == len(inner) else None
        )
        inside += [average, self.suite.standard_error(found) if found else None]
        outer = self.suite.outside
        beyond: list[float | None] = [None] * (len(outer) + 1) if outer else []
        if outer and all(task in found for task in self.out_of_domain):
            values = values_of(found)
            beyond = [*(domain.score(values) for domain in outer), mean_over(outer, values)]
        best = line.best if line is not None and len(line.points) > 1 else None
        note = {} if best is None else {len(inside): f" (at {best.lam:.2f})"}
        return Row(inline(name), [*inside, None if best is None else best.average, *beyond], note)

    def _seeds(self) -> str:
        """The average under every seed, their mean and standard deviation; empty without repeated tasks."""
        rows = {"base": self.base} | self.baselines | {line.name: line.rule.results for line in self.lines}
        seeds = list(
            dict.fromkeys(seed for found in rows.values() for one in found.values() for seed in one.by_seed)
        )
        if len(seeds) < 2:
            return ""
        cells = []
        for name, found in rows.items():
            scores = [
                float(
                    self.suite.average(
                        {task: one.by_seed.get(seed, one.value) for task, one in found.items()}
                    )
                )
                for seed in seeds
            ]
            cells.append([inline(name), *map(percent, (*scores, fmean(scores), stdev(scores)))])
        return table(["average", *(f"seed {seed}" for seed in seeds), "mean", "s.d."], cells)


def compare_methods(
    base: ModelSource,
    experts: ModelSources,
    lines: str | CoramConfig | Sequence[str | CoramConfig] = "full",
    *,
    tasks: Sequence[TaskSource] = (),
    out_of_domain: Sequence[TaskSource] = (),
    suite: str | Path | None = None,
    scores: str | Path | None = None,
    seeds: Sequence[int] = (),
    lambdas: str | Iterable[float] = (),
    baselines: Sequence[str] | Mapping[str, Preset] = RIVALS,
    score_experts: bool = True,
    limit: int | None = None,
    output: str | Path | None = None,
    **options: Unpack[MergeOptions],
) -> Comparison:
    """Score lines at the rule's lambda, baselines, the base and the experts on one suite.

    Args:
        lambdas: candidates for the best, as in `run_sweep`; by default only the rule's is scored.
        baselines: as in `run_sweep`; by default all, and `OrthoMerge (OFT)` if all experts are OFT adapters.
        tasks, out_of_domain: as in `run_sweep`; the best lambda is that of the in-domain `tasks`.
        suite: a YAML file with domains, in place of tasks (see examples/paper).
        scores: a JSON file with scores of other harnesses, by row and task, for the suite's external tasks.
        seeds: tasks with sampled answers are repeated under each.
        score_experts: also score every expert on the in-domain tasks.
        output: a folder for compare.json, compare.md, outcomes.json and the journal, from which an
            interrupted run resumes.
    """
    configs = read_lines(lines)
    wanted = parse_lambdas(lambdas) if isinstance(lambdas, str) else check_lambdas(lambdas)
    presets = read_baselines(baselines)
    opened = open_tasks_or_suite(tasks, out_of_domain, suite, limit)
    inside, beyond = repeat_sampled(opened.inside, seeds), repeat_sampled(opened.outside, seeds)
    every, given = [*inside, *beyond], {} if scores is None else read_scores(scores)
    check_given(opened.external, given, ["base", *presets, *rows_of(configs, wanted)])
    if output is not None:
        check_output_folder(output)
    memory = Memory(None if output is None else Path(output) / JOURNAL)
    bench = Bench(base, experts, memory, configs[0].shared, options, given)
    bench.check(every)
    if list(presets) == list(RIVALS) and bench.merges_rotations:
        presets |= OF_ROTATIONS
    domains = opened.suite
    if suite is None:
        names = [task.name for task in opened.inside], [task.name for task in opened.outside]
        domains = Suite.of_tasks(*names, bench.expert_names)
    folder = None if output is None else output_folder(output, (JSON, TABLE, OUTCOMES))
    comparison = Comparison(
        domains,
        bench.base(every),
        bench.experts(inside) if score_experts else {},
        {name: bench.baseline(name, preset, every) for name, preset in presets.items()},
        tuple(bench.line(config, wanted, inside, beyond, domains) for config in configs),
    )
    if folder is not None:
        write_whole(folder / TABLE, str(comparison))
        write_whole(folder / OUTCOMES, json.dumps(comparison.outcomes()) + "\n")
        write_whole(folder / JSON, json.dumps(comparison.to_dict(), indent=1) + "\n")
    return comparison
