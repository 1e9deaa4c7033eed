"""Tasks of lm-evaluation-harness, its own and local YAML files, as scorers."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.errors import CoramError, reason
from coram_hf.evaluation.memory import digest
from coram_hf.report.eval_results import Result

BOOTSTRAPS = 1000
"""Bootstrap samples for the standard error of metrics that have no formula for it."""

SEED = 1234
"""lm-eval's own seed of sampled answers."""

BATCH = 8
"""Questions in one forward pass."""


@dataclass(frozen=True)
class HarnessScorer:
    """One task or group of lm-eval, with its data in memory."""

    name: str
    loaded: Any
    limit: int | None = None
    seed: int = SEED

    @cached_property
    def identity(self) -> str:
        tasks = self.loaded.get_all_tasks() if _is_group(self.loaded) else [self.loaded]
        contents = [(_settings(task), [str(doc) for doc in task.eval_docs]) for task in tasks]
        return digest(_scorer_name(), self.limit, contents)

    @property
    def lower_is_better(self) -> bool:
        """Whether the first metric of a task is a loss of some kind."""
        tasks = self.loaded.get_all_tasks() if _is_group(self.loaded) else [self.loaded]
        return any(not next(iter(task.higher_is_better().values()), True) for task in tasks)

    def __call__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[Result]:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        try:
            with _quiet():
                language_model = HFLM(
                    pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=BATCH
                )
                found: Any = simple_evaluate(
                    language_model,
                    tasks=[self.loaded],
                    task_manager=_manager(None, defaults=False),
                    limit=self.limit,
                    bootstrap_iters=BOOTSTRAPS,
                    torch_random_seed=self.seed,
                    log_samples=True,
                )
        except Exception as error:  # a task may run any code
            raise CoramError(f"lm-eval task {self.name!r} failed: {reason(error)}") from error
        numbers = found["results"].get(self.name) or found["groups"][self.name]
        counts = [found["n-samples"][task]["effective"] for task in _leaves(found, self.name)]
        results = _results(self.name, numbers, sum(counts))
        samples = [sample for task in _leaves(found, self.name) for sample in found["samples"][task]]
        return [replace(results[0], outcomes=_outcomes(results[0], samples)), *results[1:]]

    @property
    def sampled(self) -> bool:
        """Whether answers are drawn at a temperature, so that they depend on the seed."""
        tasks = self.loaded.get_all_tasks() if _is_group(self.loaded) else [self.loaded]
        settings = [getattr(task.config, "generation_kwargs", None) or {} for task in tasks]
        return any(one.get("do_sample") and one.get("temperature", 1.0) > 0 for one in settings)


def open_harness_tasks(task: str, limit: int | None) -> list[HarnessScorer]:
    """The tasks behind a name of lm-eval, a YAML file, or a folder of them."""
    _require_harness()
    path = Path(task)
    files = sorted(path.glob("*.yaml")) if path.is_dir() else [path] if path.suffix == ".yaml" else []
    if path.is_dir() and not files:
        raise CoramError(f"{path}: no .yaml files of lm-eval tasks in this folder")
    if not files:
        _check_name(task)
        return _load(task, limit)
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise CoramError(f"{missing[0]}: no such file")
    return [scorer for file in files for scorer in _load(str(file.resolve()), limit)]


def _check_name(task: str) -> None:
    names = _manager().all_tasks
    if task not in names:
        near = difflib.get_close_matches(task, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; `lm-eval ls tasks` lists them"
        raise CoramError(f"unknown task {task!r}: no .jsonl or .yaml file, and no task of lm-eval{hint}")


def _load(spec: str, limit: int | None) -> list[HarnessScorer]:
    """A group that has a score of its own is one task; other groups, and tags, are the tasks in them."""
    try:
        with _quiet():
            found = _manager_of(spec).load([spec])
    except Exception as error:  # other people's files and data sets
        raise CoramError(f"lm-eval task {spec!r} cannot be loaded: {reason(error)}") from error
    chosen: dict[str, Any] = {}
    inside: set[str] = set()
    for group in found["groups"].values():
        if group.aggregate_metric_list and group.name not in inside:
            chosen[group.name] = group
            inside |= {g.name for g in group.get_all_groups()} | {t.task_name for t in group.get_all_tasks()}
    chosen |= {name: task for name, task in found["tasks"].items() if name not in inside}
    return [HarnessScorer(name, loaded, limit) for name, loaded in chosen.items()]


def _results(task: str, numbers: Mapping[str, Any], questions: int) -> list[Result]:
    """lm-eval's `metric,filter` keys as results, in its order."""
    found = []
    for key, value in numbers.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = numbers.get(f"{metric}_stderr,{kind}")
        name = metric if kind == "none" else f"{metric} ({kind})"
        known = float(error) if isinstance(error, int | float) else None
        found.append(Result(task, name, float(value), known, questions, _scorer_name()))
    if not found:
        raise CoramError(f"lm-eval task {task!r} reported no number as a result")
    return found


def _outcomes(result: Result, samples: Iterable[Mapping[str, Any]]) -> tuple[float, ...]:
    """The score of every question; none if the metric is not their mean."""
    metric, _, rest = result.metric.partition(" (")
    kind = rest.removesuffix(")") or "none"
    values = [one.get(metric) for one in samples if one.get("filter", "none") == kind]
    if not values or not all(isinstance(value, int | float) for value in values):
        return ()
    numbers = tuple(float(value) for value in values if value is not None)
    return numbers if math.isclose(math.fsum(numbers) / len(numbers), result.value, abs_tol=1e-9) else ()


def _leaves(found: Mapping[str, Any], name: str) -> Iterable[str]:
    children = found.get("group_subtasks", {}).get(name) or []
    return [leaf for child in children for leaf in _leaves(found, child)] or [name]


def _settings(task: Any) -> tuple[str, list[str]]:
    """The config of a task without addresses in memory, and the source of its functions."""
    functions = [value for value in vars(task.config).values() if inspect.isfunction(value)]
    text = re.sub(r" at 0x[0-9a-f]+", "", str(task.dump_config()))
    return text, [inspect.getsource(function) for function in functions]


def _is_group(loaded: Any) -> bool:
    return hasattr(loaded, "get_all_tasks")


def _manager_of(spec: str) -> Any:
    """The manager that loads a task; it lists lm-eval's own tasks, which takes seconds, only if needed."""
    if not spec.endswith(".yaml"):
        return _manager()
    path = Path(spec)
    return _manager(path.parent, defaults="group:" in path.read_text(encoding="utf-8"))


@cache
def _manager(folder: Path | None = None, defaults: bool = True) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder, include_defaults=defaults)


def _scorer_name() -> str:
    return f"lm-evaluation-harness {version('lm_eval')}"


def _require_harness() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise CoramError("this task needs lm-evaluation-harness: pip install 'coram-hf[eval]'") from None


@contextmanager
def _quiet() -> Any:
    """Silence lm-eval's log, except for errors."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
