"""CoramMerger: the whole method, in memory or from files to files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from typing_extensions import Unpack

from coram_hf.amplitude import Amplitude, choose, require_kappa
from coram_hf.calibration import Calibrate, Lessons, PromptSources, check_neutral, settle
from coram_hf.config import CalibrationConfig, CoramConfig
from coram_hf.errors import CoramError
from coram_hf.execution.cost import Cost, searching
from coram_hf.execution.device import check_precision
from coram_hf.execution.files import FileRunner
from coram_hf.execution.forecast import Forecast, forecast, requirements
from coram_hf.execution.memory import MemoryRunner
from coram_hf.execution.merging import Outcome, merge_into
from coram_hf.execution.opening import open_timed
from coram_hf.execution.placing import with_result_placement
from coram_hf.execution.processes import Processes
from coram_hf.execution.resuming import workspace_of
from coram_hf.execution.survey import Survey
from coram_hf.execution.telling import Teller
from coram_hf.geometry.cores import one_core
from coram_hf.hub import publish_report, push_new, write_card
from coram_hf.hub.adapter import AdapterFolder
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.opening import ModelSource, ModelSources
from coram_hf.inputs.options import MergeOptions, PlacementOptions
from coram_hf.methods.coram import choose_coram
from coram_hf.methods.entry import Choice
from coram_hf.methods.protocol import OnlyAmplified
from coram_hf.outputs.memory import ModelSink, new_model
from coram_hf.outputs.model_files import save_model_files
from coram_hf.report import MergePlan, MergeReport
from coram_hf.report.build import build_plan, build_report, retained
from coram_hf.report.figures import preload
from coram_hf.result import MergeResult


class Merger:
    """A method applied to inputs, which are read and never changed."""

    def __init__(
        self,
        inputs: Inputs,
        choice: Choice,
        *,
        progress: bool = True,
        opening: float = 0.0,
        calibrate: Calibrate | None = None,
        chosen: MergeReport | None = None,
    ) -> None:
        """`opening`: the seconds it took; `chosen`: the report of the merge that found lambda and factors."""
        check_precision(inputs.devices, choice.compute_dtype)
        self.inputs = inputs
        with one_core():
            self.method = choice.make(inputs)
        self.choice, self._strength = choice, choice.strength(inputs)
        self.progress, self.opening = progress, opening
        self._calibrate, self._chosen = calibrate, chosen
        self.finds_lambda = calibrate is not None or choice.finds_neutral_scale
        self._warn = Teller()
        if calibrate is not None:
            if choice.config is None:
                raise CoramError(f"calibrate: {choice.label} has no lambda to calibrate; merge with coram")
            Lessons(inputs, calibrate.prompts, calibrate.config)
        elif choice.finds_neutral_scale:
            check_neutral(inputs)

    @staticmethod
    def open(
        base: ModelSource,
        experts: ModelSources,
        choice: Choice,
        options: MergeOptions,
        calibrate: Calibrate | None = None,
    ) -> Merger:
        """The merger of a chosen method, with all sources opened and checked."""
        inputs, opening = open_timed(base, experts, choice, options)
        progress = options.get("progress", True)
        return Merger(inputs, choice, progress=progress, opening=opening, calibrate=calibrate)

    @cached_property
    def _memory(self) -> MemoryRunner:
        return MemoryRunner(self.inputs, self.choice.label, self.progress)

    def inspect(self) -> MergePlan:
        """Check every weight and return the plan of the merge: what is merged how, D, kappa, and lambda."""
        survey = self._memory.norms().with_factors(self._strength.factors, self.inputs)
        return self._plan(choose(survey.measured, self._strength), survey)

    def _plan(self, amplitude: Amplitude, survey: Survey) -> MergePlan:
        names, choice = self.method.names(self.inputs), self.choice
        return build_plan(self.inputs, choice.label, names, amplitude, survey, choice.carrying)

    def merge(self, *, keep_update: bool = True, **placement: Unpack[PlacementOptions]) -> MergeResult:
        """W* = W_0 + lambda (W_merge - W_0) on the targets, and W_0 + rho on the residual pathway.

        `keep_update=False` drops each update once it is written, which saves memory but rules out
        `with_lambda`; if lambda depends on c_RMS, all updates are held until it is known. If a part of the
        result is on the disk, kept updates are files there. `device_map`, `max_memory` and `offload_folder`
        place this result otherwise than the base is placed.
        """
        result_inputs = with_result_placement(self.inputs, placement)
        result = self._merge(keep_update or self.finds_lambda, result_inputs)
        if not self.finds_lambda:
            return result
        with searching() as cost:
            if self._calibrate is not None:
                prompts, config = self._calibrate
                result = result.calibrate(prompts, progress=self.progress, **asdict(config))
            else:
                found = settle(result, self.inputs)
                result.report = result.report.with_neutral(found)
        result.report = result.report.with_search(cost.to_dict())
        return result if keep_update else result.without_update()

    def _merge(self, keep_update: bool, result_inputs: Inputs) -> MergeResult:
        inputs = self.inputs
        names = self.method.names(inputs)
        amplified = [name for name, how in names.items() if how.amplified]
        keep = keep_update or self._strength.measures_contraction
        with Cost(self.opening) as cost:
            self._warn(self.inspect().warnings)
            model = new_model(result_inputs, merged=names)
            sink = ModelSink(model, inputs.targets, (amplified or list(names)) if keep else ())
            outcome = merge_into(sink, self._memory, inputs, self.method, self._strength)
        report = self._report(outcome, sink.model.dtype, cost)
        updates = sink.updates if keep_update else None
        kept = retained(inputs, outcome.records, outcome.survey)
        return MergeResult(sink.model, report, inputs, updates, kept, again=self._merge_again)

    def _merge_again(self, config: CoramConfig) -> MergeResult:
        """Merge the same inputs in memory with another configuration."""
        return Merger(self.inputs, choose_coram(config), progress=self.progress).merge()

    def merge_to(
        self,
        folder: str | Path,
        *,
        overwrite: bool = False,
        max_shard_size: int | str = "50GB",
        keep_update: str | Path | None = None,
    ) -> MergeReport:
        """Merge from files to files, with only a few matrices in memory, and return the report.

        The folder appears once it is complete. The same call resumes an interrupted merge; if inputs or
        options have changed, it starts over. Under `torchrun` every process writes its own shards. A search
        for lambda, by prompts or by the neutral scale, comes first, in memory. `keep_update` names a folder
        for the targets' update, from which `assemble` makes the merge at another lambda.
        """
        run = self._run(folder, max_shard_size, keep_update)
        if self.finds_lambda:
            run.check(overwrite)
            return self._found.merge_to(
                folder, overwrite=overwrite, max_shard_size=max_shard_size, keep_update=keep_update
            )
        with workspace_of(run, overwrite) as finished:
            if not finished:
                with ThreadPoolExecutor(1) as beside, Cost(self.opening) as cost:
                    beside.submit(preload)
                    outcome = merge_into(run.sink(), run, self.inputs, self.method, self._strength)
                report = self._report(outcome, run.layout.skeleton.dtype, cost)
                if run.processes.first:
                    save_model_files(files := run.workspace.files, run.layout, self.inputs)
                    publish_report(report, files, self.inputs.places(), hashes=run.hashes)
                    run.publish(overwrite)
                run.processes.wait()
        return MergeReport.load(run.target)

    def merge_adapter_to(
        self,
        folder: str | Path,
        *,
        rank: int | None = None,
        energy: float | None = None,
        overwrite: bool = False,
    ) -> MergeReport:
        """Merge into an adapter of the base, as `MergeResult.save_adapter` writes it, and return the report.

        Every update is factored once it is merged: no merged model is held. An interruption starts over.
        """
        adapter = self.adapter_folder(folder, rank=rank, energy=energy, overwrite=overwrite)
        if self.finds_lambda:
            return self._found.merge_adapter_to(folder, rank=rank, energy=energy, overwrite=overwrite)
        inputs, method = self.inputs, OnlyAmplified(self.method)
        with Cost(self.opening) as cost:
            self._warn(self.inspect().warnings)
            outcome = merge_into(adapter.sink(), self._memory, inputs, method, self._strength)
        report = self._report(outcome, torch.float32, cost)
        found = retained(inputs, outcome.records, outcome.survey)
        return adapter.write(report, found, method.names(inputs))

    def adapter_folder(
        self, folder: str | Path, *, rank: int | None, energy: float | None, overwrite: bool
    ) -> AdapterFolder:
        """The folder of `merge_adapter_to`; raises any error about it or the options before merging."""
        from coram_hf.methods.oft import merged_adapter

        oft = merged_adapter(self.method)
        return AdapterFolder(folder, self.inputs, oft, rank=rank, energy=energy, overwrite=overwrite)

    def _report(self, outcome: Outcome, dtype: torch.dtype, cost: Cost) -> MergeReport:
        records, amplitude, survey = outcome
        settings, strength, plan = self.method.settings, self._strength, self._plan(amplitude, survey)
        report = build_report(self.inputs, plan, settings, strength, amplitude, survey, records, dtype)
        report = replace(report, cost=cost.to_dict())
        self._warn(report.warnings)
        return report if self._chosen is None else report.chosen_as(self._chosen)

    @cached_property
    def _found(self) -> Merger:
        """The merger with the lambda, and factors if any, that a merge of these inputs in memory finds."""
        if Processes.find().count > 1:
            raise CoramError(
                'calibrate and scale="neutral" need a single process; then repeat the merge from its report'
            )
        report = self.merge(keep_update=False).report
        choice = choose_coram(CoramConfig.from_report(report))
        return Merger(self.inputs, choice, progress=self.progress, opening=self.opening, chosen=report)

    def push_to_hub(self, repo_id: str, *, card_data: ModelCardData | None = None, **options: Any) -> str:
        """Merge into a temporary folder and push it; for the options see `hub.push_folder`."""

        def make(folder: Path) -> None:
            report = self.merge_to(folder)
            if card_data is not None:
                write_card(report, folder, card_data)

        return push_new(make, repo_id, options)

    def check(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Raise any error about the folder, the disk or lambda that `merge_to` would raise before merging."""
        self._run(folder).check(overwrite)
        if self._strength.source == "rule":
            survey = self._memory.norms().with_factors(self._strength.factors, self.inputs)
            require_kappa(choose(survey.measured, self._strength), self._strength)

    def requirements(self, max_shard_size: int | str = "50GB") -> tuple[int, int]:
        """The bytes of disk, and roughly of memory, that `merge_to` needs."""
        run = self._run("merged", max_shard_size)
        return requirements(run, self.inputs, self.method, searches=self.finds_lambda)

    def forecast(self, folder: str | Path) -> Forecast:
        """Estimate how long `merge_to` takes, by merging one parameter of every shape."""
        return forecast(self._run(folder), self.inputs, self.method, self.opening)

    def _run(self, to: str | Path, size: int | str = "50GB", updates: str | Path | None = None) -> FileRunner:
        label, settings, kept = self.choice.label, self.method.settings, []
        if self._strength.measures_contraction or updates is not None:
            kept = [name for name, how in self.method.names(self.inputs).items() if how.amplified]
        return FileRunner(self.inputs, to, size, settings, label, self.progress, kept, updates)


class CoramMerger(Merger):
    """Merge experts that were fine-tuned from one base with CORAM.

    The base and the experts are read, never changed. Memory beyond them: the result, the kept update
    (4 bytes per target parameter, none with `keep_update=False`), and some tens of megabytes; the
    residual pathways `ties` and `tsvm` also need a few times their largest tensor.

    Args:
        base: the model that all experts were fine-tuned from, or its folder or Hub id.
        experts: a list, or a dict name -> expert; an expert is a model, a PeftModel (each of its adapters
            is an expert), or the folder or Hub id of either.
        config: the method's options; the default is the paper's `full` line with its kappa rule.
        calibrate: a few unlabelled prompts per expert, as for `MergeResult.calibrate`, to find lambda and
            factors from; `calibration` says how.
        options: vocabulary, tokenizer, dtype, device_map, progress and so on; see `MergeOptions`.
    """

    def __init__(
        self,
        base: ModelSource,
        experts: ModelSources,
        config: CoramConfig | None = None,
        *,
        calibrate: PromptSources | None = None,
        calibration: CalibrationConfig | None = None,
        **options: Unpack[MergeOptions],
    ) -> None:
        if config is not None and not isinstance(config, CoramConfig):
            raise CoramError(
                f"config must be a CoramConfig, found {config!r}; CoramConfig.from_line(...) reads a line"
            )
        self.config = config or CoramConfig()
        choice = choose_coram(self.config)
        inputs, opening = open_timed(base, experts, choice, options)
        given = None if calibrate is None else Calibrate(calibrate, calibration or CalibrationConfig())
        shown = options.get("progress", True)
        super().__init__(inputs, choice, progress=shown, opening=opening, calibrate=given)
