"""Bench: merges of one base and its experts, scored on tasks; what was scored before is not scored again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache, cached_property, partial
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.base_merger import Merger
from coram_hf.baseline_merger import BaselineMerger
from coram_hf.baselines import METHODS, PRESETS, Preset
from coram_hf.config import CoramConfig, check_names, check_number
from coram_hf.engine import Engine
from coram_hf.errors import CoramError
from coram_hf.evaluation.scores import Line, Point, Results
from coram_hf.evaluation.tasks import Scorer
from coram_hf.execution.journal import Journal, digest
from coram_hf.folder_merge import merge_state
from coram_hf.inputs import ModelSource, ModelSources
from coram_hf.inputs.companions import find_tokenizer
from coram_hf.inputs.options import MergeOptions
from coram_hf.merger import CoramMerger
from coram_hf.report import MergeReport, library_versions
from coram_hf.report.eval_results import Result
from coram_hf.result import MergeResult

FACTS = (
    "dispersion",
    "kappa",
    "lam",
    "lam_source",
    "sqrt_n",
    "c_rms",
    "relative_updates",
    "balance_factors",
    "warnings",
    "sources",
)
"""What a sweep keeps of the report of its merge."""


class Bench:
    """Scores of everything that can be made from one base and its experts.

    In memory at a time: what the sources take, one model, and for a line the update of its merge.
    """

    def __init__(
        self,
        base: ModelSource,
        experts: ModelSources,
        journal: Journal,
        shared: dict[str, Any],
        options: MergeOptions,
    ) -> None:
        """`shared`: what baselines have in common with lines, see `shared_options`."""
        self._base, self._experts = base, experts
        self._journal = journal
        self._shared = shared
        self._options = options
        self._sources = Engine(base, experts, CoramConfig(lam=1.0), "sources", options, need_targets=False)
        self._tokenizer = _find_tokenizer(self._sources)

    def line(
        self,
        config: CoramConfig,
        lambdas: Iterable[float],
        tasks: Sequence[Scorer],
        beyond: Sequence[Scorer] = (),
    ) -> Line:
        """Merge once, reassemble at every lambda and at the rule's, and score each on the tasks."""
        merger = CoramMerger(self._base, self._experts, config, **self._options)
        subject = self._subject(merger)
        merged = _Merged(merger)
        facts = self._journal.remember(subject.depends_on("facts"), config.line, lambda: merged.facts)
        rule = facts["lam"]
        grid = {rule, *(lam for lam in lambdas if not math.isclose(lam, rule, rel_tol=1e-9))}
        quiet = not self._options.get("progress", True)
        points = [
            Point(lam, subject.score(tasks, partial(merged.at, lam), lam))
            for lam in tqdm(sorted(grid), desc=f"{config.line}: lambda", disable=quiet)
        ]
        return Line(config, facts, tuple(points), subject.score(beyond, partial(merged.at, rule), rule))

    def baseline(self, preset: Preset, tasks: Sequence[Scorer]) -> Results:
        """A method that CORAM is compared with, at its preset."""
        options: dict[str, Any] = {**self._shared, **preset.parameters, **self._options}
        merger = BaselineMerger(self._base, self._experts, preset.method, **options)
        return self._subject(merger).score(tasks, lambda: merger.merge().model)

    def base(self, tasks: Sequence[Scorer]) -> Results:
        """The base itself."""
        engine = self._sources
        return self._of(engine, {"model": "base"}).score(tasks, lambda: engine.new_sink().model)

    def experts(self, tasks: Sequence[Scorer]) -> dict[str, Results]:
        """Every expert on every task."""
        engine = self._sources
        return {
            name: self._of(engine, {"model": "expert", "name": name}).score(
                tasks, partial(_expert, engine, name)
            )
            for name in engine.models.experts
        }

    def _subject(self, merger: Merger) -> _Subject:
        return self._of(merger._engine, merger._settings())

    def _of(self, engine: Engine, settings: dict[str, Any]) -> _Subject:
        return _Subject(engine, settings, self._tokenizer, self._journal)


class _Subject:
    """A model to be scored, by what it is made of."""

    def __init__(
        self,
        engine: Engine,
        settings: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        journal: Journal,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._label = str(settings.get("name") or settings.get("model") or engine.label)
        self._journal = journal
        state = merge_state(engine, settings)
        self._state = None if state is None else digest(state, library_versions(), _identity(tokenizer))

    def depends_on(self, *more: object) -> tuple[object, ...] | None:
        """The dependencies of a value about this model; None if it is made of models in memory."""
        return None if self._state is None else (self._state, *more)

    def score(
        self, tasks: Sequence[Scorer], make: Callable[[], PreTrainedModel], lam: float | None = None
    ) -> Results:
        """The results on every task; the model is made if there is one that is not known."""
        what = self._label if lam is None else f"{self._label}, lambda {lam:g}"
        model = cache(lambda: self._placed(make()))
        found = {}
        for task in tasks:
            known = self._journal.remember(
                self.depends_on(lam, task.identity),
                f"{what}: {task.name}",
                partial(self._measure, task, model),
            )
            found[task.name] = Result(**known)
        return found

    def _measure(self, task: Scorer, model: Callable[[], PreTrainedModel]) -> dict[str, Any]:
        result = task(model(), self._tokenizer)[0]
        if not math.isfinite(result.value):
            raise CoramError(f"{self._label}: the score on task {task.name!r} is {result.value}")
        return asdict(result)

    def _placed(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model where the geometry runs, if that was said."""
        device = self._engine.device
        return model if device is None else model.to(device)  # type: ignore[arg-type]


class _Merged:
    """A merge that is made when it is first needed, and reassembled in place."""

    def __init__(self, merger: CoramMerger) -> None:
        self._merger = merger

    @cached_property
    def _first(self) -> tuple[MergeResult, MergeReport]:
        result = self._merger.merge()
        return result, result.report

    @property
    def facts(self) -> dict[str, Any]:
        report = self._first[1].to_dict()
        return {key: report[key] for key in FACTS}

    def at(self, lam: float) -> PreTrainedModel:
        result = self._first[0]
        if result.report.lam != lam:
            result.rescale_(lam)
        return result.model


def _expert(engine: Engine, name: str) -> PreTrainedModel:
    """One expert in the vocabulary of the merge."""
    sink = engine.new_sink()
    for tensor in engine.models.base:
        sink.tensor(tensor).copy_(engine.models.expert_tensor(name, tensor))
    return sink.model


def _find_tokenizer(engine: Engine) -> PreTrainedTokenizerBase:
    """That of the merged model, or the one beside the base."""
    found = engine.models.tokenizer or find_tokenizer(engine.models.base, engine.trust_remote_code)
    if found is None:
        raise CoramError("there is no tokenizer beside the base; save one there, or pass tokenizer=")
    return found


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    return digest(sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str())


def read_lines(lines: str | CoramConfig | Sequence[str | CoramConfig]) -> list[CoramConfig]:
    """Configurations from lines; they must differ in their lines, and leave lambda to the sweep."""
    given = [lines] if isinstance(lines, str | CoramConfig) else list(lines)
    configs = [CoramConfig.from_line(line) if isinstance(line, str) else line for line in given]
    if not configs:
        raise CoramError("lines: name at least one")
    names = [config.line for config in configs]
    for config in configs:
        if names.count(config.line) > 1:
            raise CoramError(f"lines: {config.line!r} is given twice")
        if config.lam is not None:
            raise CoramError(f"lines: {config.line!r} has lam={config.lam:g}, which is the sweep's to choose")
        if shared_options(config) != shared_options(configs[0]):
            raise CoramError("lines: all must have the same weights, balance and target_modules")
    return configs


def shared_options(config: CoramConfig) -> dict[str, Any]:
    """The options of a line that baselines have, too."""
    return {key: getattr(config, key) for key in ("weights", "balance", "target_modules")}


def read_baselines(names: Sequence[str]) -> dict[str, Preset]:
    """Baselines by the name of a method, at its defaults, or of a preset."""
    known = {name: Preset(name) for name in METHODS} | PRESETS
    check_names(names, list(known), "baseline")
    return {name: known[name] for name in names}


def check_lambdas(lambdas: Iterable[float]) -> list[float]:
    """Finite numbers, in order, each once."""
    given = list(lambdas)
    for lam in given:
        check_number("lambda", lam)
    return sorted({float(lam) for lam in given})
