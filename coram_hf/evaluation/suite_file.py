"""Suite files in YAML: domains, their tasks and weights, formulas, and the scores of other harnesses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from coram_hf.config import CoramConfig, check_names
from coram_hf.errors import CoramError
from coram_hf.evaluation.external import CommandScorer, read_result
from coram_hf.evaluation.formula import Formula, identifier
from coram_hf.evaluation.scores import Results
from coram_hf.evaluation.suite import Domain, Suite, tasks_of
from coram_hf.evaluation.tasks import Scorer, TaskSource, check_scores, open_tasks

KEYS = ("in_domain", "out_of_domain", "external", "commands")
DOMAIN_KEYS = ("tasks", "score", "weight", "expert")


@dataclass(frozen=True)
class OpenedSuite:
    """A suite with its tasks opened. external: tasks whose scores must be given, as they are not run here."""

    suite: Suite
    inside: list[Scorer]
    outside: list[Scorer]
    external: tuple[str, ...] = ()


def open_suite(path: str | Path, limit: int | None = None) -> OpenedSuite:
    """The suite of a YAML file; paths of tasks are relative to it."""
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise CoramError(f"{path}: is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict) or not isinstance(content.get("in_domain"), dict):
        raise CoramError(f"{path}: a suite must have in_domain, a mapping from domains to tasks")
    check_names(content, KEYS, f"key of {path}")
    external = tuple(content.get("external") or ())
    commands = [_command(values, path) for values in content.get("commands") or ()]
    elsewhere = {*external, *(task for command in commands for task in command.parts)}
    opened: dict[str, Scorer] = {}
    sections: list[tuple[Domain, ...]] = []
    for section in KEYS[:2]:
        domains = content.get(section) or {}
        sections.append(
            tuple(
                _domain(str(name), values, path, limit, elsewhere, opened) for name, values in domains.items()
            )
        )
    suite = Suite(*sections)
    inside, outside = set(tasks_of(suite.inside)), set(tasks_of(suite.outside))
    scorers: list[Scorer] = [*opened.values(), *commands]
    inner = [scorer for scorer in scorers if inside & set(parts_of(scorer))]
    outer = [scorer for scorer in scorers if outside & set(parts_of(scorer)) and scorer not in inner]
    return OpenedSuite(suite, inner, outer, tuple(task for task in external if task in inside | outside))


def open_tasks_or_suite(
    tasks: Sequence[TaskSource],
    out_of_domain: Sequence[TaskSource],
    suite: str | Path | None,
    limit: int | None,
) -> OpenedSuite:
    """The suite of a file, or else of tasks, each its own domain."""
    if suite is not None:
        if tasks or out_of_domain:
            raise CoramError("tasks and suite are mutually exclusive; name the tasks in the suite file")
        return open_suite(suite, limit)
    inside = open_tasks(tasks, limit)
    every = open_tasks([*inside, *out_of_domain], limit)
    check_scores(every)
    outside = every[len(inside) :]
    names = [[task.name for task in some] for some in (inside, outside)]
    return OpenedSuite(Suite.of_tasks(*names), inside, outside)


def rows_of(configs: Sequence[CoramConfig], lambdas: Sequence[float]) -> list[str]:
    """The rows of lines in a file of scores: at the rule's lambda, and at each of `lambdas`."""
    return [
        row for config in configs for row in (config.line, *(f"{config.line} @ {lam:g}" for lam in lambdas))
    ]


def check_given(external: Sequence[str], given: Mapping[str, Results], rows: Sequence[str]) -> None:
    """Raise, before anything is merged, if a row lacks the score of an external task."""
    for row in rows:
        missing = [task for task in external if task not in given.get(row, {})]
        if missing:
            raise CoramError(
                f"row {row!r}: no score of {', '.join(missing)}, which the suite takes from another harness; "
                "add it to the file of --scores"
            )


def parts_of(scorer: Scorer) -> tuple[str, ...]:
    """The tasks that a scorer scores: several for a command."""
    return tuple(getattr(scorer, "parts", None) or (scorer.name,))


def read_scores(path: str | Path) -> dict[str, Results]:
    """Scores of other harnesses, `{row: {task: number or {"value", "standard_error", "outcomes"}}}`.

    A row is `base`, an expert, a baseline, or a line at the rule's lambda, else `line @ lambda`.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CoramError(f"{path}: is not JSON ({error})") from None
    if not isinstance(content, dict) or not all(isinstance(found, dict) for found in content.values()):
        raise CoramError(f"{path}: must map rows to tasks, and tasks to scores")
    return {
        row: {
            task: read_result(task, value, f"{path}, row {row!r}", str(Path(path).name))
            for task, value in found.items()
        }
        for row, found in content.items()
    }


def _command(values: Any, path: Path) -> CommandScorer:
    if not isinstance(values, dict) or not isinstance(values.get("run"), str) or not values.get("tasks"):
        raise CoramError(f"{path}: each of commands must have run, a command line, and tasks, a list")
    check_names(values, ("run", "tasks"), f"key of a command in {path}")
    return CommandScorer(values["run"], tuple(map(str, values["tasks"])), path.resolve().parent)


def _domain(
    name: str, values: Any, path: Path, limit: int | None, elsewhere: set[str], opened: dict[str, Scorer]
) -> Domain:
    where = f"{path}, domain {name!r}"
    if not isinstance(values, dict):
        values = {"tasks": values}
    check_names(values, DOMAIN_KEYS, f"key of {where}")
    weights = _weights(values.get("tasks"), where)
    formula = Formula(str(values["score"]), where) if "score" in values else None
    tasks: dict[str, float] = {}
    for source, weight in weights.items():
        if source in elsewhere:
            tasks[source] = weight
            continue
        for scorer in open_tasks([_located(source, path)], limit):
            if formula is None:
                check_scores([scorer])
            opened.setdefault(scorer.name, scorer)
            tasks[scorer.name] = weight
    if formula is not None:
        known = {identifier(task): task for task in (*tasks, *elsewhere)}
        unknown = [one for one in formula.names if one not in known and not (one == "x" and len(tasks) == 1)]
        if unknown:
            raise CoramError(f"{where}: the formula has {unknown[0]!r}, which is no task of the domain")
        tasks |= {known[one]: 1.0 for one in formula.names if one in known}
    if not tasks:
        raise CoramError(f"{where}: has no tasks")
    weight, expert = values.get("weight", 1.0), values.get("expert")
    if type(weight) not in (int, float) or weight <= 0:
        raise CoramError(f"{where}: weight must be a positive number, found {weight!r}")
    return Domain(name, tasks, formula, float(weight), None if expert is None else str(expert))


def _weights(given: Any, where: str) -> dict[str, float]:
    """Tasks with their weights: one task, a list, or a mapping from tasks to weights."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        if not all(type(weight) in (int, float) and weight > 0 for weight in given.values()):
            raise CoramError(f"{where}: weights of tasks must be positive numbers")
        return {str(task): float(weight) for task, weight in given.items()}
    return {
        str(task): 1.0
        for task in (given if isinstance(given, Sequence) and not isinstance(given, str) else [given])
    }


def _located(source: str, path: Path) -> str:
    """A path relative to the suite file, if there is such a file or folder; else the source as it is."""
    address, mark, query = source.partition("?")
    near = path.parent / address
    return f"{near}{mark}{query}" if near.exists() else source
