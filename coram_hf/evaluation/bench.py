"""Bench: merges of one base and its experts, scored on tasks; known scores are reused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, cached_property, partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.baselines import PRESETS
from coram_hf.config import CoramConfig, Shared, check_names, check_number
from coram_hf.errors import CoramError
from coram_hf.evaluation.asking import Reader
from coram_hf.evaluation.memory import Memory, digest
from coram_hf.evaluation.readers import Readers, load_processor
from coram_hf.evaluation.scores import Line, Point, Results
from coram_hf.evaluation.tasks import Scorer
from coram_hf.execution.opening import open_here
from coram_hf.execution.progress import Progress
from coram_hf.inputs.companions import companion_folder, find_tokenizer
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.opening import ModelSource, ModelSources
from coram_hf.inputs.options import MergeOptions
from coram_hf.inputs.targets import with_targets
from coram_hf.merger import Merger
from coram_hf.methods.coram import choose_coram
from coram_hf.methods.entry import Choice
from coram_hf.methods.registry import Preset, find_method, rival_names
from coram_hf.outputs.memory import expert_model, new_model
from coram_hf.report import MergeReport, library_versions
from coram_hf.report.eval_results import Result
from coram_hf.result import MergeResult

FACTS = (
    "dispersion",
    "kappa",
    "lam",
    "lam_source",
    "effective_kappa",
    "sqrt_n",
    "c_rms",
    "relative_updates",
    "balance_factors",
    "warnings",
    "sources",
)
"""The fields of a merge's report that a sweep keeps."""


class Bench:
    """Scores of everything that can be made from one base and its experts, which are opened once.

    Memory holds the sources, one model at a time, and for a line the update of its merge.
    """

    def __init__(
        self,
        base: ModelSource,
        experts: ModelSources,
        memory: Memory,
        shared: Shared,
        options: MergeOptions,
    ) -> None:
        """`shared`: the options that baselines and lines have in common."""
        self._memory = memory
        self._shared = shared
        self._progress = options.get("progress", True)
        self._inputs = open_here(base, experts, options, need_targets=False)
        tokenizer = _find_tokenizer(self._inputs)
        self._readers = Readers(tokenizer, partial(_find_processor, self._inputs, tokenizer))

    def check(self, tasks: Sequence[Scorer]) -> None:
        """Raise if the questions of a task cannot be asked; nothing has been merged yet."""
        self._readers.check(tasks)

    def line(
        self,
        config: CoramConfig,
        lambdas: Iterable[float],
        tasks: Sequence[Scorer],
        beyond: Sequence[Scorer] = (),
    ) -> Line:
        """Merge once, reassemble at every lambda and at the rule's, and score each on the tasks."""
        merger = self._merger(choose_coram(config))
        subject = self._subject(config.line, merger.method.settings)
        merged = _Merged(merger)
        facts = self._memory.remember(subject.depends_on("facts"), config.line, lambda: merged.facts)
        rule = facts["lam"]
        grid = {rule, *(lam for lam in lambdas if not math.isclose(lam, rule, rel_tol=1e-9))}
        points = []
        with Progress(f"{config.line}: lambda", len(grid), self._progress, unit="lambdas") as progress:
            for lam in sorted(grid):
                points.append(Point(lam, subject.score(tasks, partial(merged.at, lam), lam)))
                progress.add()
        return Line(config, facts, tuple(points), subject.score(beyond, partial(merged.at, rule), rule))

    def baseline(self, preset: Preset, tasks: Sequence[Scorer]) -> Results:
        """The results of a method that CORAM is compared with, at its preset."""
        shared = {key: value for key, value in asdict(self._shared).items() if value is not None}
        parameters = {**shared, **preset.parameters}
        merger = self._merger(find_method(preset.method).choose(parameters))
        subject = self._subject(preset.method, merger.method.settings)
        return subject.score(tasks, lambda: merger.merge(keep_update=False).model)

    def base(self, tasks: Sequence[Scorer]) -> Results:
        """The results of the base."""
        return self._subject("base", {"model": "base"}).score(tasks, lambda: new_model(self._inputs))

    def experts(self, tasks: Sequence[Scorer]) -> dict[str, Results]:
        """The results of every expert on every task."""
        return {
            name: self._subject(name, {"model": "expert", "name": name}).score(
                tasks, partial(expert_model, self._inputs, name)
            )
            for name in self._inputs.experts
        }

    def _merger(self, choice: Choice) -> Merger:
        inputs = with_targets(
            self._inputs, choice.target_modules, required=choice.need_targets, keep=choice.keep
        )
        return Merger(inputs, choice, progress=self._progress)

    def _subject(self, label: str, settings: Mapping[str, Any]) -> _Subject:
        return _Subject(self._inputs, label, settings, self._readers, self._memory)


class _Subject:
    """A model to score, identified by what it is made of."""

    def __init__(
        self,
        inputs: Inputs,
        label: str,
        settings: Mapping[str, Any],
        readers: Readers,
        memory: Memory,
    ) -> None:
        self._device = inputs.device
        self._readers = readers
        self._label = label
        self._memory = memory
        identity = inputs.identity()
        made_of = {"settings": dict(settings), **(identity or {})}
        known = identity is not None
        self._state = digest(made_of, library_versions(), _identity(readers.tokenizer)) if known else None

    def depends_on(self, *more: object) -> tuple[object, ...] | None:
        """The dependencies of a value about this model; None if it is made from models in memory."""
        return None if self._state is None else (self._state, *more)

    def score(
        self, tasks: Sequence[Scorer], make: Callable[[], PreTrainedModel], lam: float | None = None
    ) -> Results:
        """The results on every task; the model is made only if one of them is not known yet."""
        what = self._label if lam is None else f"{self._label}, lambda {lam:g}"
        model = cache(lambda: self._placed(make()))
        found = {}
        for task in tasks:
            known = self._memory.remember(
                self.depends_on(lam, task.identity, *self._readers.identity(task)),
                f"{what}: {task.name}",
                partial(self._measure, task, model),
            )
            found[task.name] = Result(**known)
        return found

    def _measure(self, task: Scorer, model: Callable[[], PreTrainedModel]) -> dict[str, Any]:
        result = task(model(), self._readers.of(task))[0]
        if not math.isfinite(result.value):
            raise CoramError(
                f"{self._label}: the score on task {task.name!r} is {result.value}; it must be finite"
            )
        return asdict(result)

    def _placed(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model on the device of the merge, if one was given and accelerate has not placed the model."""
        if self._device is None or hasattr(model, "hf_device_map"):
            return model
        return model.to(self._device)  # type: ignore[arg-type]


class _Merged:
    """A merge that is made on first use, and then reassembled in place."""

    def __init__(self, merger: Merger) -> None:
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


def _find_tokenizer(inputs: Inputs) -> PreTrainedTokenizerBase:
    """The tokenizer of the merged model, or else of the base."""
    found = inputs.tokenizer or find_tokenizer(inputs.base, inputs.trust_remote_code)
    if found is None:
        raise CoramError("the base has no tokenizer; save one beside it, or pass tokenizer=")
    return found


def _find_processor(inputs: Inputs, tokenizer: PreTrainedTokenizerBase) -> Reader:
    """The processor beside the base, with the tokenizer of the merged model."""
    folder = companion_folder(inputs.base.model)
    if folder is None:
        raise CoramError("the base has no processor, which tasks with images need; pass it as a folder")
    processor: Any = load_processor(folder, inputs.trust_remote_code)
    if inputs.tokenizer is not None:
        processor.tokenizer = tokenizer
    if inputs.surroundings.new_template:
        processor.chat_template = inputs.surroundings.template
    reader: Reader = processor
    return reader


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    return digest(sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str())


def read_lines(lines: str | CoramConfig | Sequence[str | CoramConfig]) -> list[CoramConfig]:
    """Configurations from lines; their lines must differ, and must leave lambda to the sweep."""
    given = [lines] if isinstance(lines, str | CoramConfig) else list(lines)
    configs = [CoramConfig.from_line(line) if isinstance(line, str) else line for line in given]
    if not configs:
        raise CoramError("lines: none given; pass at least one")
    names = [config.line for config in configs]
    for config in configs:
        if names.count(config.line) > 1:
            raise CoramError(f"lines: {config.line!r} is given twice")
        if config.lam is not None:
            raise CoramError(f"lines: {config.line!r} has lam={config.lam:g}; remove lam: the sweep sets it")
        if config.shared != configs[0].shared:
            raise CoramError("lines: all must have the same weights, balance, target_modules and keep")
    return configs


def read_baselines(names: Sequence[str] | Mapping[str, Preset]) -> dict[str, Preset]:
    """Presets by name: that of a method, at its defaults, or of a preset; a mapping has its own."""
    if isinstance(names, Mapping):
        return dict(names)
    known = {**{name: Preset(name) for name in rival_names()}, **PRESETS}
    check_names(names, list(known), "baseline")
    return {name: known[name] for name in names}


def check_lambdas(lambdas: Iterable[float]) -> list[float]:
    """The lambdas in order, each once; they must be finite."""
    given = list(lambdas)
    for lam in given:
        check_number("lambda", lam)
    return sorted({float(lam) for lam in given})
