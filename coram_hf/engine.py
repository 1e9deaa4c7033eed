"""What every merge of loaded models shares: the parts of the model, the survey, the plan and the report."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from coram_hf.amplitude import Amplitude, UpdateNorms, contraction, measure_amplitude
from coram_hf.config import CoramConfig
from coram_hf.errors import CoramError
from coram_hf.execution.processes import Processes, compute_device
from coram_hf.execution.survey import Survey, measure
from coram_hf.execution.threads import in_threads, thread_count
from coram_hf.geometry import update_dtype
from coram_hf.inputs import ModelSource, ModelSources, open_models
from coram_hf.inputs.options import MergeOptions, check_options, output_dtype
from coram_hf.inputs.parent_card import provenance
from coram_hf.inputs.targets import find_targets
from coram_hf.methods.record import Record, total
from coram_hf.outputs import ModelSink, without_data
from coram_hf.outputs.assembly import rounding_loss
from coram_hf.outputs.file_tensor import Output
from coram_hf.outputs.memory import with_format
from coram_hf.report import MergePlan, MergeReport, library_versions
from coram_hf.report.retention import Retained
from coram_hf.result import Origin

logger = logging.getLogger("coram_hf")

Result = TypeVar("Result")

MergeOne = Callable[[str, Tensor, list[Tensor], Tensor], None]
"""Merge one matrix or tensor: (name, base, experts, where the update goes)."""


class Engine:
    """The models of one merge, cut into target matrices, other floating tensors, and the rest.

    The base and the experts are read, never changed. Their weights must not change between the
    first use of the engine and the end of the merge: what the survey measures is remembered.
    """

    def __init__(
        self,
        base: ModelSource,
        experts: ModelSources,
        config: CoramConfig,
        label: str,
        options: MergeOptions,
        *,
        need_targets: bool = True,
    ) -> None:
        started = time.perf_counter()
        check_options(options)
        self.config = config
        self.label = label
        self.progress = options.get("progress", True)
        self.dtype = output_dtype(options.get("dtype"))
        told = ("vocabulary", "trust_remote_code", "allow_pickle")
        self._told_options = {key: value for key in told if (value := options.get(key)) not in (None, False)}
        self.processes = Processes.find()
        self.device = compute_device(options.get("device"), self.processes.local_rank)
        check_precision(self.device, config)
        self.threads = thread_count(self.device)
        self.trust_remote_code = options.get("trust_remote_code", False)
        self.models = open_models(
            base,
            experts,
            vocabulary=options.get("vocabulary", "base"),
            tokenizer=options.get("tokenizer"),
            expert_tokenizers=options.get("expert_tokenizers"),
            trust_remote_code=self.trust_remote_code,
            allow_pickle=options.get("allow_pickle", False),
        )
        self.base = self.models.base.model
        self.weights = config.expert_weights(len(self.models.experts))
        found = find_targets(self.base, config.target_modules, required=need_targets)
        self.targets = {target.name: target for target in found}
        others = {
            name: self.models.base.original(name) for name in self.models.base if name not in self.targets
        }
        self.outside = [name for name, tensor in others.items() if tensor.is_floating_point()]
        self.frozen = [name for name, tensor in others.items() if not tensor.is_floating_point()]
        self.opening = time.perf_counter() - started

    @cached_property
    def survey(self) -> Survey:
        names = (*self.targets, *self.outside)
        records = dict(in_threads(partial(measure, self.models), names, self.threads))
        return Survey.of(records, self.targets, self.outside, list(self.models.experts))

    @cached_property
    def amplitude(self) -> Amplitude:
        return measure_amplitude(self.measured, self.config)

    @property
    def measured(self) -> UpdateNorms:
        """The norms that D and c_RMS come from: the targets', or all where a baseline has no targets."""
        return self.survey.targets if self.targets else self.survey.outside

    @property
    def factors(self) -> tuple[float, ...]:
        """Balance factors f_i, in expert order."""
        if self.config.balance is None:
            return (1.0,) * len(self.models.experts)
        return tuple(self.amplitude.factors.values())

    def each(self, names: Sequence[str], work: Callable[[str], Result], what: str) -> dict[str, Result]:
        """work(name) by name, several at a time, behind a progress bar."""
        progress = tqdm(total=len(names), desc=f"{self.label}: {what}", disable=not self.progress)
        found = {}
        with progress:
            for name, result in in_threads(work, names, self.threads):
                found[name] = result
                progress.update()
        return {name: found[name] for name in names}

    def assume(self, norms: UpdateNorms) -> None:
        """Take these norms for those of the survey until `conclude`."""
        self.amplitude = measure_amplitude(norms, self.config)

    def conclude(self, survey: Survey) -> None:
        """Take a survey that was made elsewhere."""
        self.__dict__.pop("amplitude", None)
        self.survey = survey

    def new_sink(self) -> ModelSink:
        """A model to write into, with the rows of new tokens in place."""
        with torch.inference_mode(False):
            sink = ModelSink(self.models.base.copy_model(), self.dtype, self._new_size)
            if self._new_size is not None:
                for name in self.models.vocabulary.token_axis:
                    sink.tensor(name).copy_(self.models.base_tensor(name))
        return sink

    def skeleton(self) -> PreTrainedModel:
        """The merged model without its data."""
        return with_format(without_data(self.base), self.dtype, self._new_size)

    @property
    def _new_size(self) -> int | None:
        vocabulary = self.models.vocabulary
        return vocabulary.size if vocabulary.grows else None

    def origin(self) -> Origin:
        """What a result keeps of its inputs: base weights, and where tokenizer and processor are."""
        return Origin(self.models, self.trust_remote_code)

    def matrices(
        self, name: str, out: Output | None
    ) -> Iterator[tuple[str, Output | None, Tensor, list[Tensor]]]:
        """(name, part of out, base, experts) for every matrix of a target; other tensors come whole.

        An `out` in a file is that of a single matrix.
        """
        base, experts = self.models.tensors(name)
        target = self.targets.get(name)
        if target is None:
            yield name, out, base, experts
            return
        stacked = zip(*(target.matrices(t) for t in (base, *experts)), strict=True)
        parts = target.matrices(out) if isinstance(out, Tensor) else None
        for i, (origin, *others) in enumerate(stacked):
            part = out if parts is None else parts[i]
            yield name if base.ndim == 2 else f"{name}[{i}]", part, origin, others

    def new_update(self, name: str, merge_one: MergeOne) -> Tensor:
        """The update of one parameter, in its own layout."""
        base = self.models.base_tensor(name)
        update = torch.empty_like(base, dtype=update_dtype(base))
        for part, out, origin, others in self.matrices(name, update):
            assert isinstance(out, Tensor)
            merge_one(part, origin, others, out)
        return update

    def contraction(self, merged_square: float) -> float | None:
        """c_RMS of a merge whose target update has the given squared norm."""
        squares = self.measured.updates
        norms = [factor * square**0.5 for factor, square in zip(self.factors, squares.values(), strict=True)]
        return contraction(norms, merged_square**0.5)

    def _sources(self) -> dict[str, dict[str, Any]]:
        """Where base and experts come from; what was trained in memory still has the name of its base."""
        sources = {name: provenance(weights) for name, weights in self.models.named()}
        for name, weights in self.models.experts.items():
            if not weights.files and weights.location == self.models.base.location:
                sources[name] = {"source": None, "hub": False, "commit": None, "files": None}
        return sources

    def retained(self, records: Mapping[str, Record]) -> Retained:
        """How much every parameter moved, and how much the experts moved it."""
        first = self.models.base.tied
        moved = {first.get(name, name): record.moved for name, record in records.items()}
        return Retained(moved, {name: found.updates for name, found in self.survey.tensors.items()})

    def plan(
        self,
        *,
        residual: Sequence[str],
        kappa: float | None = None,
        lam: float | None = None,
        left_behind: Sequence[str] = (),
    ) -> MergePlan:
        """What is known before merging; kappa and lambda are CORAM's alone, as is what it leaves behind."""
        amplitude = self.amplitude
        return MergePlan(
            line=self.label,
            targets=tuple(self.targets),
            residual=tuple(residual),
            kept=tuple(name for name in (*self.outside, *self.frozen) if name not in set(residual)),
            relative_updates=amplitude.relative_updates,
            balance_factors=amplitude.factors,
            dispersion=amplitude.dispersion,
            unbalanced_dispersion=amplitude.unbalanced_dispersion,
            kappa=kappa,
            lam=lam,
            outside_share=self.survey.outside_share(),
            tied=self.models.base.tied,
            sizes={name: self.models.base.original(name).numel() for name in self.models.base},
            vocabulary={name: dict(counts) for name, counts in self.models.vocabulary.counts.items()},
            warnings=(*self.models.warnings, *amplitude.warnings, *left_behind),
        )

    def announce(self, plan: MergePlan) -> None:
        """Log the warnings of a plan that is about to be carried out."""
        for warning in plan.warnings:
            logger.warning(warning)

    def report(
        self,
        plan: MergePlan,
        *,
        method: str,
        config: Mapping[str, Any],
        records: Mapping[str, Record],
        dtype: torch.dtype,
        lam: float | None = None,
        lam_source: str | None = None,
        slice_height: int | None = None,
    ) -> MergeReport:
        """The record of a finished merge; lambda and the slice height are CORAM's alone."""
        record = total(records.values())
        return MergeReport(
            method=method,
            line=plan.line,
            config=dict(config),
            n_experts=len(self.models.experts),
            slice_height=slice_height,
            dispersion=plan.dispersion,
            unbalanced_dispersion=plan.unbalanced_dispersion,
            relative_updates=plan.relative_updates,
            balance_factors=plan.balance_factors,
            kappa=plan.kappa,
            lam=lam,
            lam_source=lam_source,
            sqrt_n=self.amplitude.sqrt_n,
            c_rms=self.contraction(record.slices.squared_norm),
            counts={"targets": len(plan.targets), "residual": len(plan.residual), **record.slices.counts()},
            outside_share=plan.outside_share,
            left_at_base=0.0 if plan.residual else self.survey.total_outside_share(),
            rounding_loss=0.0,
            vocabulary=plan.vocabulary,
            expert_kinds={name: expert.kind for name, expert in self.models.experts.items()},
            orthogonality_errors={
                name: expert.orthogonality_error
                for name, expert in self.models.experts.items()
                if expert.orthogonality_error is not None
            },
            warnings=plan.warnings,
            versions=library_versions(),
            sources=self._sources(),
            options=self._told_options,
            retention=self.retained(records).by_group(),
            worst_condition=record.slices.worst_condition or None,
            model_class=type(self.base).__name__,
            dtype=None if self.dtype is None else str(self.dtype).removeprefix("torch."),
        ).with_rounding(rounding_loss(record), dtype)


def check_precision(device: torch.device | None, config: CoramConfig) -> None:
    """Apple's devices have no float64."""
    if device is not None and device.type == "mps" and config.compute_dtype == "float64":
        raise CoramError('device "mps" has no float64; pass compute_dtype="float32", or device="cpu"')
