"""The lambda sweep: scores of one or several lines over lambda, the rule's choice and the optimum."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from coram_hf.config import CoramConfig
from coram_hf.errors import CoramError
from coram_hf.evaluation.bench import Bench, check_lambdas, read_baselines, read_lines
from coram_hf.evaluation.conclusions import conclusions
from coram_hf.evaluation.cost import cost_of, write_cost
from coram_hf.evaluation.figure import draw_sweep
from coram_hf.evaluation.memory import Memory
from coram_hf.evaluation.scores import Line, Results, percent, plain
from coram_hf.evaluation.seeds import repeat_sampled
from coram_hf.evaluation.suite import Suite
from coram_hf.evaluation.suite_file import check_given, open_tasks_or_suite, read_scores, rows_of
from coram_hf.evaluation.tasks import TaskSource
from coram_hf.hub.text import inline
from coram_hf.inputs.opening import ModelSource, ModelSources
from coram_hf.inputs.options import MergeOptions
from coram_hf.methods.registry import Preset, usual_names
from coram_hf.outputs.files import check_output_folder, output_folder, replacing, write_whole
from coram_hf.report.tables import markdown as table

JSON, TABLE, FIGURE, JOURNAL = "sweep.json", "sweep.md", "sweep.png", "points.jsonl"
LARGEST_SWEEP = 1000
"""Lambdas in one range; more are almost certainly a typo."""


@dataclass(frozen=True)
class Sweep:
    """The lines of a sweep, and the base and the baselines for reference; averages are over `tasks`.

    cost: the seconds of every merge and point, as `cost_of` has them.
    """

    tasks: tuple[str, ...]
    lines: tuple[Line, ...]
    references: dict[str, Results]
    suite: Suite
    cost: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def reference_averages(self) -> dict[str, float]:
        return {name: self.suite.score(results) for name, results in self.references.items()}

    def to_dict(self) -> dict[str, Any]:
        """Every number, as plain values."""
        return {
            "tasks": list(self.tasks),
            "lines": [line.to_dict() for line in self.lines],
            "references": {name: plain(results) for name, results in self.references.items()},
        }

    def summary(self) -> dict[str, Any]:
        """The facts that the command ends with; averages are in percent."""
        return conclusions(self.suite, self.lines, self.references, self.cost)

    def __str__(self) -> str:
        """The paper's rule-versus-optimum table, all points, and the references, in Markdown."""
        parts = [self._rule_versus_optimum(), self._points()]
        rows = [[inline(name), percent(score)] for name, score in self.reference_averages.items()]
        parts.append(table(["reference", "average"], rows))
        half = self.lines[0].rule.uncertainty
        if half is not None:
            parts.append(f"The 95% interval of an average is about +- {percent(half)} points.")
        edge = [line.name for line in self.lines if line.at_edge]
        if edge:
            parts.append(f"The optimum lies at an end of the range for {', '.join(edge)}: widen it.")
        return "\n\n".join(parts) + "\n"

    def _rule_versus_optimum(self) -> str:
        header = [
            "line",
            "D",
            "kappa",
            "rule lambda",
            "rule score",
            "s.e.",
            "best lambda",
            "best score",
            "gap",
        ]
        rows = [
            [
                line.name,
                f"{float(line.facts['dispersion']):.2f}",
                f"{line.facts['kappa']:g}",
                f"{line.rule.lam:.2f}",
                percent(line.rule.average),
                "-" if (error := line.rule.standard_error) is None else percent(error),
                f"{line.best.lam:.2f}",
                percent(line.best.average),
                percent(line.gap),
            ]
            for line in self.lines
        ]
        return table(header, rows)

    def _points(self) -> str:
        header = ["line", "lambda", *map(inline, self.tasks), "average", ""]
        rows = [
            [
                line.name,
                f"{point.lam:.4g}",
                *(percent(point.results[task].value) for task in self.tasks),
                percent(point.average),
                " ".join(["rule"] * (point is line.rule) + ["best"] * (point is line.best)),
            ]
            for line in self.lines
            for point in line.points
        ]
        return table(header, rows)

    def save(self, folder: Path) -> None:
        """Write numbers, table and figure, each of them completely or not at all."""
        with replacing(folder / FIGURE) as figure:
            draw_sweep(self, figure)
        write_whole(folder / TABLE, str(self))
        write_whole(folder / JSON, json.dumps(self.to_dict(), indent=1) + "\n")
        write_cost(self.cost, folder)


def run_sweep(
    base: ModelSource,
    experts: ModelSources,
    lines: str | CoramConfig | Sequence[str | CoramConfig] = "full",
    *,
    lambdas: str | Iterable[float],
    tasks: Sequence[TaskSource] = (),
    suite: str | Path | None = None,
    scores: str | Path | None = None,
    seeds: Sequence[int] = (),
    output: str | Path | None = None,
    baselines: Sequence[str] | Mapping[str, Preset] = usual_names(),
    limit: int | None = None,
    **options: Unpack[MergeOptions],
) -> Sweep:
    """Merge every line once, reassemble it at every lambda and at the rule's, and score each.

    Args:
        base, experts, options: as for `CoramMerger`.
        lines: configurations or their lines.
        lambdas: numbers, or a string such as "1.0:3.0:0.1" or "1,1.5,2".
        tasks: paths of .jsonl tasks, datasets (see `dataset_task`) or their addresses, names or YAML files of
            lm-eval tasks.
        suite, scores, seeds: as in `compare_methods`; scores away from the rule's have rows `line @ lambda`.
        output: a folder for sweep.json, sweep.md, sweep.png, the seconds of every point in cost.md and
            cost.json, and the journal, from which an interrupted sweep resumes. Points whose inputs, tasks or
            options have changed are scored again, as are those of models in memory.
        baselines: reference lines, by the name of a method or of a preset, or named presets of your own.
        limit: the largest number of questions per task.
    """
    configs = read_lines(lines)
    wanted = parse_lambdas(lambdas) if isinstance(lambdas, str) else check_lambdas(lambdas)
    presets = read_baselines(baselines)
    opened = open_tasks_or_suite(tasks, (), suite, limit)
    scorers, given = repeat_sampled(opened.inside, seeds), {} if scores is None else read_scores(scores)
    check_given(opened.external, given, ["base", *presets, *rows_of(configs, wanted)])
    if output is not None:
        check_output_folder(output)
    memory = Memory(None if output is None else Path(output) / JOURNAL)
    bench = Bench(base, experts, memory, configs[0].shared, options, given)
    bench.check(scorers)
    folder = None if output is None else output_folder(output, (JSON, TABLE, FIGURE))
    swept = tuple(bench.line(config, wanted, scorers, suite=opened.suite) for config in configs)
    before = bench.seconds
    references = {"base": bench.base(scorers)}
    references |= {name: bench.baseline(name, preset, scorers) for name, preset in presets.items()}
    cost = cost_of(swept, bench.seconds - before)
    sweep = Sweep(tuple(swept[0].rule.results), swept, references, opened.suite, cost)
    if folder is not None:
        sweep.save(folder)
    return sweep


def parse_lambdas(text: str) -> list[float]:
    """The numbers of `start:stop:step`, including stop, or of a list separated by commas."""
    parts = text.split(":")
    try:
        numbers = [Decimal(part.strip()) for part in (parts if len(parts) > 1 else text.split(","))]
    except InvalidOperation:
        numbers = []
    if not numbers or len(parts) not in (1, 3) or not all(number.is_finite() for number in numbers):
        raise CoramError(f"lambda: {text!r} is neither start:stop:step nor numbers separated by commas")
    if len(parts) == 3:
        start, stop, step = numbers
        if step <= 0 or stop < start:
            raise CoramError(f"lambda: {text!r} holds no numbers; expected start <= stop and step > 0")
        count = int((stop - start) / step + Decimal("1e-9")) + 1
        if count > LARGEST_SWEEP:
            raise CoramError(
                f"lambda: {text!r} holds {count} numbers, more than {LARGEST_SWEEP}; use a larger step"
            )
        numbers = [start + i * step for i in range(count)]
    return check_lambdas(map(float, numbers))
