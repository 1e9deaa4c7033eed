"""CoramMerger: the method from end to end, for models in memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from coram_hf.amplitude import Amplitude, contraction, measure_amplitude, require_coefficient
from coram_hf.config import CoramConfig
from coram_hf.errors import MergeError
from coram_hf.geometry import SliceStats, merge_update, update_dtype
from coram_hf.report import MergePlan, MergeReport, library_versions
from coram_hf.result import MergeResult
from coram_hf.sinks import ModelSink
from coram_hf.sources import open_models
from coram_hf.survey import Survey, take_survey
from coram_hf.targets import Target, find_targets

logger = logging.getLogger(__name__)


class CoramMerger:
    """Merge experts that were fine-tuned from one base, by CORAM.

    The base and the experts are read, never changed. Memory beyond them: the result, its kept
    update, and a working buffer of some 20 MB.

    Args:
        base: the model that all experts were fine-tuned from.
        experts: a list of models, or a dict name -> model.
        config: what to do; the default is the paper's `full` line under its kappa rule.
        progress: show a progress bar over the target matrices.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        experts: Sequence[PreTrainedModel] | Mapping[str, PreTrainedModel],
        config: CoramConfig | None = None,
        *,
        progress: bool = True,
    ) -> None:
        self.config = config or CoramConfig()
        self.progress = progress
        self._model = base
        self._models = open_models(base, experts)
        self._targets = find_targets(base, self.config.target_modules)
        self.config.expert_weights(len(self._models.experts))

    def inspect(self) -> MergePlan:
        """Check every weight and say what the merge will do: the parts, D, kappa, lambda."""
        amplitude = self._amplitude
        targets = {target.name for target in self._targets}
        others = [name for name in self._models.base if name not in targets]
        return MergePlan(
            line=self.config.line,
            targets=tuple(target.name for target in self._targets),
            residual=(),
            kept=tuple(others),
            relative_updates=amplitude.relative_updates,
            balance_factors=amplitude.factors,
            dispersion=amplitude.dispersion,
            unbalanced_dispersion=amplitude.unbalanced_dispersion,
            kappa=amplitude.kappa,
            lam=amplitude.coefficient(self.config, c_rms=None),
            outside_share=self._survey.outside_share(),
            warnings=amplitude.warnings,
        )

    def merge(self, *, keep_update: bool = True) -> MergeResult:
        """Merge every target matrix and amplify: W* = W_0 + lambda (W_merge - W_0).

        `keep_update=False` forgets each update once it is written, so that the result cannot be
        reassembled by `with_lambda`; with `scale="c_rms"` all are held until lambda is known.
        """
        amplitude = self._amplitude
        require_coefficient(amplitude, self.config)
        for warning in amplitude.warnings:
            logger.warning(warning)

        lam = amplitude.coefficient(self.config, c_rms=None)
        sink = ModelSink(self._model)
        updates: dict[str, Tensor] = {}
        stats = SliceStats()
        for target in tqdm(self._targets, desc=f"merging {self.config.line}", disable=not self.progress):
            base, experts = self._models.tensors(target.name)
            update, target_stats = self._merge_target(target, base, experts)
            stats += target_stats
            if lam is not None:
                sink.write(target.name, base, update, lam)
            if keep_update or lam is None:
                updates[target.name] = update

        c_rms = self._contraction(stats)
        if lam is None:
            lam = amplitude.coefficient(self.config, c_rms)
            if lam is None:
                raise MergeError('the merged update is zero, so scale="c_rms" is undefined; pass lam=')
            for name, update in updates.items():
                sink.write(name, self._models.base[name], update, lam)
        report = self._report(lam, c_rms, stats)
        return MergeResult(sink.model, report, self._models.base, updates if keep_update else None)

    def _merge_target(self, target: Target, base: Tensor, experts: list[Tensor]) -> tuple[Tensor, SliceStats]:
        """The geometric update of one parameter, matrix by matrix, in the parameter's own layout."""
        update = torch.empty_like(base, dtype=update_dtype(base))
        factors = list(self._amplitude.factors.values())
        stats = SliceStats()
        for out, origin, *others in zip(
            target.matrices(update),
            target.matrices(base),
            *(target.matrices(expert) for expert in experts),
            strict=True,
        ):
            stats += merge_update(origin, others, self.config, factors=factors, out=out)[1]
        return update, stats

    @cached_property
    def _survey(self) -> Survey:
        targets = [target.name for target in self._targets]
        outside = [
            name
            for name, tensor in self._models.base.items()
            if tensor.is_floating_point() and name not in set(targets)
        ]
        return take_survey(self._models, targets, outside)

    @cached_property
    def _amplitude(self) -> Amplitude:
        return measure_amplitude(self._survey.targets, self.config)

    def _contraction(self, stats: SliceStats) -> float | None:
        norms = [
            self._amplitude.factors[name] * square**0.5
            for name, square in self._survey.targets.updates.items()
        ]
        return contraction(norms, stats.squared_norm**0.5)

    def _report(self, lam: float, c_rms: float | None, stats: SliceStats) -> MergeReport:
        amplitude = self._amplitude
        source = "given" if self.config.lam is not None else "rule" if self.config.kappa is None else "kappa"
        return MergeReport(
            line=self.config.line,
            config=self.config.to_dict(),
            n_experts=len(self._models.experts),
            slice_height=self.config.slice_height,
            dispersion=amplitude.dispersion,
            unbalanced_dispersion=amplitude.unbalanced_dispersion,
            relative_updates=amplitude.relative_updates,
            balance_factors=amplitude.factors,
            kappa=amplitude.kappa,
            lam=lam,
            lam_source=source,
            sqrt_n=amplitude.sqrt_n,
            c_rms=c_rms,
            counts={
                "targets": len(self._targets),
                "slices": stats.slices,
                "det_flips": stats.det_flips,
                "near_pi": stats.near_pi,
                "svd_fallbacks": stats.svd_fallbacks,
                "frameless": stats.frameless,
            },
            outside_share=self._survey.outside_share(),
            left_at_base=self._survey.total_outside_share(),
            warnings=amplitude.warnings,
            versions=library_versions(),
        )
