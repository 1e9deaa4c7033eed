"""Bench: merges of one base and its experts, scored on tasks; known scores are reused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.baselines import PRESETS
from coram_hf.config import CoramConfig, Shared, check_names, check_number
from coram_hf.errors import CoramError
from coram_hf.evaluation.asking import Reader
from coram_hf.evaluation.memory import Memory, digest
from coram_hf.evaluation.merged import Geometry, Merged, OwnMerge, SharedMerge
from coram_hf.evaluation.readers import Readers, load_processor
from coram_hf.evaluation.scores import Line, Point, Results
from coram_hf.evaluation.suite import Suite
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
from coram_hf.report import library_versions
from coram_hf.report.eval_results import Result

OF_ROTATIONS = {"OrthoMerge (OFT)": Preset("orthomerge", {"space": "oft"})}
"""The baseline for experts that are all OFT adapters."""


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
        given: Mapping[str, Results] | None = None,
        suggest: bool = True,
    ) -> None:
        """`shared`: the options that baselines and lines have in common; `given`: scores by row and task.

        `suggest`: whether warnings name lines that would merge more; variants of one line need none.
        """
        self._suggest = suggest
        self._given = given or {}
        self._memory = memory
        self._shared = shared
        self._progress = options.get("progress", True)
        self._inputs = open_here(base, experts, options, need_targets=False)
        tokenizer = _find_tokenizer(self._inputs)
        self._readers = Readers(tokenizer, partial(_find_processor, self._inputs, tokenizer))
        self._geometry = Geometry(lambda config: self._merger(choose_coram(config)))

    @property
    def expert_names(self) -> list[str]:
        return list(self._inputs.experts)

    @property
    def seconds(self) -> float:
        """What all merges and scores so far took, those of earlier runs included."""
        return self._memory.seconds

    @property
    def merges_rotations(self) -> bool:
        """Whether all experts are OFT adapters, and no option forbids to merge their generators."""
        kinds = {expert.kind for expert in self._inputs.experts.values()}
        return kinds == {"OFT"} and self._shared_options.keys() <= {"weights"}

    @property
    def _shared_options(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self._shared).items() if value is not None}

    def has_residual(self, config: CoramConfig) -> bool:
        """Whether an expert changes a parameter outside the targets: only then a residual has a meaning."""
        inputs = self._merger(choose_coram(config)).inputs
        return any(
            not torch.equal(parameter.base, expert)
            for parameter in map(inputs.parameter, inputs.outside)
            for expert in parameter.experts
        )

    def check(self, tasks: Sequence[Scorer]) -> None:
        """Raise if the questions of a task cannot be asked; nothing has been merged yet."""
        self._readers.check(tasks)

    def line(
        self,
        config: CoramConfig,
        lambdas: Iterable[float],
        tasks: Sequence[Scorer],
        beyond: Sequence[Scorer] = (),
        suite: Suite | None = None,
        share: bool = False,
        kappas: Sequence[float] = (),
    ) -> Line:
        """Merge once, reassemble at every lambda and at the rule's, and score each on the tasks.

        `share`: the geometry of the line before is used again if only the residual differs. `kappas`: to
        score as well, if the rule's is 1 or more.
        """
        merger = self._merger(choose_coram(config))
        subject = self._subject(config.line, merger.method.settings)
        shared = share and Geometry.can_share(config)
        merged: Merged = SharedMerge(self._geometry, config) if shared else OwnMerge(merger)
        before = self.seconds
        facts = self._memory.remember(subject.depends_on("facts"), config.line, lambda: merged.facts)
        merging = self.seconds - before
        rule = facts["lam"]
        if (facts["kappa"] or 0) >= 1:
            lambdas = [*lambdas, *(rule / facts["kappa"] * kappa for kappa in kappas)]
        grid = {rule, *(lam for lam in lambdas if not math.isclose(lam, rule, rel_tol=1e-9))}
        points = []
        with Progress(f"{config.line}: lambda", len(grid), self._progress, unit="lambdas") as progress:
            for lam in sorted(grid):
                before = self.seconds
                results = subject.score(tasks, partial(merged.at, lam), lam)
                at = config.line if lam == rule else f"{config.line} @ {lam:g}"
                known = results | self._given_for(at, results)
                points.append(Point(lam, known, suite, self.seconds - before))
                progress.add()
        outside = subject.score(beyond, partial(merged.at, rule), rule)
        beyond_known = outside | self._given_for(config.line, outside)
        return Line(config, facts, tuple(points), beyond_known, merging)

    def _given_for(self, row: str, scored: Results) -> Results:
        """The given scores of a row, without those of tasks that were scored here."""
        return {task: result for task, result in self._given.get(row, {}).items() if task not in scored}

    def baseline(self, name: str, preset: Preset, tasks: Sequence[Scorer]) -> Results:
        """The results of a method that CORAM is compared with, at its preset."""
        parameters = {**self._shared_options, **preset.parameters}
        merger = self._merger(find_method(preset.method).choose(parameters))
        subject = self._subject(preset.method, merger.method.settings)
        found = subject.score(tasks, lambda: merger.merge(keep_update=False).model)
        return found | self._given_for(name, found)

    def base(self, tasks: Sequence[Scorer]) -> Results:
        """The results of the base."""
        found = self._subject("base", {"model": "base"}).score(tasks, lambda: new_model(self._inputs))
        return found | self._given_for("base", found)

    def experts(self, tasks: Sequence[Scorer]) -> dict[str, Results]:
        """The results of every expert on every task."""
        every = {}
        for name in self._inputs.experts:
            subject = self._subject(name, {"model": "expert", "name": name})
            found = subject.score(tasks, partial(expert_model, self._inputs, name))
            every[name] = found | self._given_for(name, found)
        return every

    def _merger(self, choice: Choice) -> Merger:
        inputs = with_targets(
            self._inputs, choice.target_modules, required=choice.need_targets, keep=choice.keep
        )
        said = choice if self._suggest else replace(choice, carrying=())
        return Merger(inputs, said, progress=self._progress)

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
        found: Results = {}
        for task in tasks:
            known = self._memory.remember(
                self.depends_on(lam, task.identity, *self._readers.identity(task)),
                f"{what}: {task.name}",
                partial(self._measure, task, model),
            )
            several = known if isinstance(known, list) else [known]
            found |= {result.task: result for result in (Result(**values) for values in several)}
        return found

    def _measure(self, task: Scorer, model: Callable[[], PreTrainedModel]) -> Any:
        """The first result of the task, or those of all its parts if it has several."""
        parts = getattr(task, "parts", ())
        results = task(model(), self._readers.of(task))[: len(parts) or 1]
        for result in results:
            if not math.isfinite(result.value):
                raise CoramError(
                    f"{self._label}: the score on task {result.task!r} is {result.value}; it must be finite"
                )
        return [asdict(result) for result in results] if parts else asdict(results[0])

    def _placed(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model on the device of the merge, if one was given and accelerate has not placed the model."""
        if self._device is None or hasattr(model, "hf_device_map"):
            return model
        return model.to(self._device)  # type: ignore[arg-type]


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
    known = {**{name: Preset(name) for name in rival_names()}, **PRESETS, **OF_ROTATIONS}
    check_names(names, list(known), "baseline")
    return {name: known[name] for name in names}


def check_lambdas(lambdas: Iterable[float]) -> list[float]:
    """The lambdas in order, each once; they must be finite."""
    given = list(lambdas)
    for lam in given:
        check_number("lambda", lam)
    return sorted({float(lam) for lam in given})
