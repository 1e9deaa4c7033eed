"""A line's merge, made on first use and reassembled in place; lines may share a geometry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from coram_hf.config import CoramConfig
from coram_hf.execution.memory import MemoryRunner
from coram_hf.execution.merging import merge_into
from coram_hf.inputs.inputs import Inputs
from coram_hf.merger import Merger
from coram_hf.methods.coram import choose_coram
from coram_hf.methods.entry import Choice
from coram_hf.methods.protocol import OnlyOutside
from coram_hf.outputs.memory import ModelSink
from coram_hf.outputs.place import write_update
from coram_hf.outputs.placed import Outputs
from coram_hf.report import MergeReport
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


class Merged(Protocol):
    """The merge of a line at any lambda, and the facts of its report."""

    @property
    def facts(self) -> dict[str, Any]: ...

    def at(self, lam: float) -> PreTrainedModel: ...


class OwnMerge:
    """A merge that is made on first use, and then reassembled in place."""

    def __init__(self, merger: Merger) -> None:
        self._merger = merger

    @cached_property
    def _first(self) -> tuple[MergeResult, MergeReport]:
        result = self._merger.merge()
        return result, result.report

    @property
    def facts(self) -> dict[str, Any]:
        return _facts(self._first[1])

    def at(self, lam: float) -> PreTrainedModel:
        result = self._first[0]
        if result.report.lam != lam:
            result.rescale_(lam)
        return result.model


class Geometry:
    """The geometry that was merged last: lines that differ in their residual only are merged once.

    Such lines must follow one another; the residual pathway overwrites all parameters outside the targets.
    """

    def __init__(self, merger: Callable[[CoramConfig], Merger]) -> None:
        self._merger = merger
        self._config: CoramConfig | None = None
        self._residual: str | None = None
        self._result: MergeResult | None = None
        self.merges = 0

    @staticmethod
    def can_share(config: CoramConfig) -> bool:
        """Whether lambda is the same with and without a residual."""
        return config.scale != "neutral"

    def result(self, config: CoramConfig) -> MergeResult:
        """The merge of the line without its residual."""
        plain = replace(config, residual=None)
        if self._result is None or plain != self._config:
            self._result = None
            self._result, self._config, self._residual = self._merger(plain).merge(), plain, None
            self.merges += 1
        return self._result

    def at(self, config: CoramConfig, lam: float) -> PreTrainedModel:
        """The model of the line at lambda."""
        result = self.result(config)
        if config.residual != self._residual:
            write_outside(result.model, self._merger(config).inputs, choose_coram(config))
            self._residual = config.residual
        if result.report.lam != lam:
            result.rescale_(lam)
        return result.model


class SharedMerge:
    """A line whose geometry may be that of the line before it."""

    def __init__(self, geometry: Geometry, config: CoramConfig) -> None:
        self._geometry, self._config = geometry, config

    @property
    def facts(self) -> dict[str, Any]:
        return _facts(self._geometry.result(self._config).report)

    def at(self, lam: float) -> PreTrainedModel:
        return self._geometry.at(self._config, lam)


def write_outside(model: PreTrainedModel, inputs: Inputs, choice: Choice) -> None:
    """Write all that is outside the targets into a merged model: the residual pathway, or else the base."""
    method = OnlyOutside(choice.make(inputs))
    if method.names(inputs):
        runner = MemoryRunner(inputs, choice.label, progress=False)
        merge_into(ModelSink(model, inputs.targets), runner, inputs, method, choice.strength(inputs))
        return
    outputs = Outputs(model)
    for name in inputs.outside:
        base = inputs.parameter(name).base
        write_update(outputs[name], base, torch.zeros_like(base), 1.0)


def _facts(report: MergeReport) -> dict[str, Any]:
    values = report.to_dict()
    return {key: values[key] for key in FACTS}
