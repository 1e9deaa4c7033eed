"""CORAM lines, baselines, the base and the experts on one suite, in the layout of the paper's tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from coram_hf.baselines import MERGEBENCH_PRESETS, METHODS, PAPER_PRESETS
from coram_hf.config import CoramConfig
from coram_hf.evaluation.bench import Bench, check_lambdas, read_baselines, read_lines
from coram_hf.evaluation.memory import Memory
from coram_hf.evaluation.scores import Line, Results, average, percent, plain
from coram_hf.evaluation.sweep import JOURNAL, parse_lambdas
from coram_hf.evaluation.tasks import TaskSource, check_scores, open_tasks
from coram_hf.hub.text import inline
from coram_hf.inputs.opening import ModelSource, ModelSources
from coram_hf.inputs.options import MergeOptions
from coram_hf.methods.registry import Preset, usual_names
from coram_hf.outputs.files import check_output_folder, output_folder, write_whole
from coram_hf.report.tables import markdown as table

JSON, TABLE = "compare.json", "compare.md"
RIVALS = (
    *MERGEBENCH_PRESETS,
    *(name for name, preset in PAPER_PRESETS.items() if not METHODS[preset.method].mergebench),
    *(name for name in usual_names() if not METHODS[name].presets and not METHODS[name].mergebench),
)
"""The default baselines, with MergeBench's coefficients where it has some, as in the paper's tables."""
NONE = "-"


@dataclass(frozen=True)
class Comparison:
    """All scores, in-domain and, if requested, out-of-domain.

    A line's row is its model at the rule's lambda; its best lambda is the only number from a sweep.
    """

    in_domain: tuple[str, ...]
    out_of_domain: tuple[str, ...]
    base: Results
    experts: dict[str, Results]
    baselines: dict[str, Results]
    lines: tuple[Line, ...]

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain values."""
        return {
            "in_domain": list(self.in_domain),
            "out_of_domain": list(self.out_of_domain),
            "base": plain(self.base),
            "experts": {name: plain(found) for name, found in self.experts.items()},
            "baselines": {name: plain(found) for name, found in self.baselines.items()},
            "lines": [{**line.to_dict(), "out_of_domain": plain(line.beyond)} for line in self.lines],
        }

    def __str__(self) -> str:
        """The paper's main table in Markdown; the best of every column among the merges is bold."""
        merges = [self._row(name, found) for name, found in self.baselines.items()]
        merges += [self._row(line.name, line.rule.results | line.beyond, line) for line in self.lines]
        ahead = [self._row("base", self.base)]
        if self.experts:
            ahead.append(self._row("best expert of each task", self._specialists()))
        bold = [_largest(row.values[i] for row in merges) for i in range(len(merges[0].values))]
        header = ["method", *map(inline, self.in_domain), "average (rule)", "average (best lambda)"]
        if self.out_of_domain:
            header += [*map(inline, self.out_of_domain), "out-of-domain average"]
        rows = [row.cells([None] * len(bold)) for row in ahead] + [row.cells(bold) for row in merges]
        return table(header, rows) + "\n"

    def _specialists(self) -> Results:
        """The highest score of any expert on each in-domain task."""
        return {
            task: max((found[task] for found in self.experts.values()), key=lambda result: result.value)
            for task in self.in_domain
        }

    def _row(self, name: str, found: Results, line: Line | None = None) -> _Row:
        inside: list[float | None] = [found[task].value for task in self.in_domain]
        inside.append(average({task: found[task] for task in self.in_domain}))
        beyond: list[float | None] = [None] * (len(self.out_of_domain) + 1)
        if all(task in found for task in self.out_of_domain):
            outside = {task: found[task] for task in self.out_of_domain}
            beyond = [*(result.value for result in outside.values()), average(outside)] if outside else []
        best = line.best if line is not None and len(line.points) > 1 else None
        note = {} if best is None else {len(inside): f" (at {best.lam:.2f})"}
        return _Row(inline(name), [*inside, None if best is None else best.average, *beyond], note)


@dataclass(frozen=True)
class _Row:
    """A row of numbers, None where one is missing, with notes by column."""

    name: str
    values: list[float | None]
    notes: dict[int, str] = field(default_factory=dict)

    def cells(self, bold: Sequence[float | None]) -> list[str]:
        """The cells of the row, bold where a value equals that in `bold`."""
        cells = [self.name]
        for i, (value, best) in enumerate(zip(self.values, bold, strict=True)):
            text = NONE if value is None else percent(value)
            strong = value is not None and best is not None and text == percent(best)
            cells.append((f"**{text}**" if strong else text) + self.notes.get(i, ""))
        return cells


def compare_methods(
    base: ModelSource,
    experts: ModelSources,
    lines: str | CoramConfig | Sequence[str | CoramConfig] = "full",
    *,
    tasks: Sequence[TaskSource],
    out_of_domain: Sequence[TaskSource] = (),
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
        tasks, out_of_domain: as in `run_sweep`; the best lambda is that of the in-domain `tasks`.
        score_experts: also score every expert on the in-domain tasks.
        output: a folder for compare.json, compare.md and the journal, from which an interrupted run resumes.
    """
    configs = read_lines(lines)
    wanted = parse_lambdas(lambdas) if isinstance(lambdas, str) else check_lambdas(lambdas)
    presets = read_baselines(baselines)
    inside = open_tasks(tasks, limit)
    every = open_tasks([*inside, *out_of_domain], limit)
    beyond = every[len(inside) :]
    check_scores(every)
    if output is not None:
        check_output_folder(output)
    memory = Memory(None if output is None else Path(output) / JOURNAL)
    bench = Bench(base, experts, memory, configs[0].shared, options)
    bench.check(every)
    folder = None if output is None else output_folder(output, (JSON, TABLE))
    comparison = Comparison(
        tuple(task.name for task in inside),
        tuple(task.name for task in beyond),
        bench.base(every),
        bench.experts(inside) if score_experts else {},
        {name: bench.baseline(preset, every) for name, preset in presets.items()},
        tuple(bench.line(config, wanted, inside, beyond) for config in configs),
    )
    if folder is not None:
        write_whole(folder / TABLE, str(comparison))
        write_whole(folder / JSON, json.dumps(comparison.to_dict(), indent=1) + "\n")
    return comparison


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
