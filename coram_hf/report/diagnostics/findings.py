"""The one walk over base, experts and merged models that all diagnostics share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from coram_hf.amplitude import Amplitude, Strength, choose, contraction
from coram_hf.config import CoramConfig
from coram_hf.errors import CoramError
from coram_hf.execution.device import to_device
from coram_hf.execution.memory import MemoryRunner
from coram_hf.execution.survey import Survey
from coram_hf.geometry import squared_norms
from coram_hf.geometry.anatomy import Anatomy
from coram_hf.geometry.branches import BRANCHES
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.low_rank import low_rank_updates
from coram_hf.inputs.parent_card import provenance
from coram_hf.methods.record import Record, check_finite, measure
from coram_hf.report.cost import cost_lines
from coram_hf.report.diagnostics.dissection import dissect_matrix
from coram_hf.report.merge_report import REPORT_NAME, MergeReport
from coram_hf.report.places import Place, places

MEASURED = ("neutral", "calibrated")
"""Sources of a lambda that is found by asking models."""


@dataclass(frozen=True)
class Findings:
    """What the walk has found: the anatomy of every target, and |W_merge - W_0|^2 of merged models.

    reports: those beside merged models.

    Sections only read it, and need not know where its numbers come from.
    """

    inputs: Inputs
    config: CoramConfig
    survey: Survey
    amplitude: Amplitude
    targets: Mapping[str, Anatomy]
    moved: Mapping[str, Mapping[str, float]]
    reports: Mapping[str, MergeReport] = field(default_factory=dict)

    @property
    def experts(self) -> list[str]:
        """The names of the experts."""
        return list(self.inputs.experts)

    @property
    def calibrations(self) -> dict[str, dict[str, Any]]:
        """The calibrations of merged models."""
        return {name: report.calibration for name, report in self.reports.items() if report.calibration}

    @property
    def costs(self) -> dict[str, dict[str, str]]:
        """What merged models cost, in words."""
        costs = {name: cost_lines(report.cost, report.lam_source) for name, report in self.reports.items()}
        return {name: lines for name, lines in costs.items() if lines}

    @property
    def is_merged(self) -> bool:
        """Whether one of the merged models is the merge in question: it has its line and its lambda."""
        line, lam = self.config.line, self.lam
        lams = [report.lam for report in self.reports.values() if report.line == line]
        return lam is not None and any(
            math.isclose(lam, one, rel_tol=1e-4) for one in lams if one is not None
        )

    @property
    def strength(self) -> Strength:
        """What the configuration says about lambda."""
        return _strength(self.config, self.inputs)

    def models(self) -> dict[str, Any]:
        """The merge in question: its line, the models, their size, and warnings about them."""
        inputs = self.inputs
        return {
            "line": self.config.line,
            "branch": self.config.branch,
            "class": type(inputs.model).__name__,
            "base": provenance(inputs.base)["source"],
            "experts": self.experts,
            "merged": list(self.moved),
            "targets": len(self.targets),
            "parameters": sum(inputs.base.original(name).numel() for name in self.targets),
            "warnings": [*inputs.warnings, *self.amplitude.warnings],
        }

    @cached_property
    def whole(self) -> Anatomy:
        """The anatomy of all targets together."""
        return together(self.targets.values())

    @cached_property
    def places(self) -> dict[str, Place]:
        """Layer and module of every target."""
        return places(self.targets)

    def by_layer(self) -> dict[str, Anatomy]:
        """The anatomy of the targets of each layer together."""
        layers: dict[str, list[Anatomy]] = {}
        for name, anatomy in self.targets.items():
            layers.setdefault(self.places[name].layer, []).append(anatomy)
        return {layer: together(parts) for layer, parts in layers.items()}

    def relative(self, anatomy: Anatomy) -> dict[str, float | None]:
        """r_i = |W_i - W_0| / |W_0| by expert, before any balancing."""
        squares = anatomy.inner.diagonal().tolist()
        return {
            expert: math.sqrt(square / anatomy.base) / factor if anatomy.base else None
            for expert, square, factor in zip(self.experts, squares, self.amplitude.factors, strict=True)
        }

    def by_branch(self, values: Tensor) -> dict[str, float]:
        """Values of an anatomy, such as its squares, by the name of their branch."""
        return dict(zip(BRANCHES, values.tolist(), strict=True))

    def merged_square(self, anatomy: Anatomy) -> float:
        """|W_merge - W_0|^2 of the configured branch, before amplification."""
        return max(0.0, float(anatomy.squares[BRANCHES.index(self.config.branch)]))

    def c_rms(self, anatomy: Anatomy) -> float | None:
        """RMS_i |W_i - W_0| / |W_merge - W_0|; None where either vanishes."""
        norms = [math.sqrt(square) for square in anatomy.inner.diagonal().tolist()]
        return contraction(norms, math.sqrt(self.merged_square(anatomy)))

    def energy(self, anatomy: Anatomy) -> float:
        """sum_i |tau_i|^2 of the updates that are merged: balanced and, if so configured, decorrelated."""
        if anatomy.decorrelation.ndim:
            return float(anatomy.decorrelation[: len(self.experts)].sum())
        return float(anatomy.inner.diagonal().sum())

    @property
    def lam(self) -> float | None:
        """Lambda of the configured merge."""
        c_rms = self.c_rms(self.whole) if self.strength.measures_contraction else None
        return choose(self.survey.measured, self.strength, c_rms).lam


def together(parts: Iterable[Anatomy]) -> Anatomy:
    """The sum of some anatomies."""
    whole = Anatomy()
    for part in parts:
        whole += part
    return whole


def walk(
    inputs: Inputs,
    config: CoramConfig | None,
    merged: Inputs | None = None,
    *,
    geometry: bool = True,
    entries: bool = True,
    progress: bool = True,
) -> Findings:
    """Read every target once; with merged models, all other floating tensors too.

    A NaN or infinity is an error that names the model and the tensor. Without a config, the merge in question
    is the first of the merged models that CORAM reports on. Given factors are left out: what is found
    describes the experts as they are.
    """
    reports = _reports(merged)
    config = replace(config or _described(reports, len(inputs.experts)) or CoramConfig(), factors=None)
    names = inputs.floating if merged is not None else tuple(inputs.targets)
    run, strength = MemoryRunner(inputs, config.line, progress), _strength(config, inputs)
    known = None if config.balance is None else run.norms().measured
    factors, experts = choose(known, strength).factors, list(inputs.experts)

    def look(name: str) -> tuple[Anatomy | None, Record, dict[str, float]]:
        for opened in filter(None, (inputs, merged)):
            opened.prefetch(name)
        moved = {} if merged is None else _moved(merged, name)
        parameter = to_device(inputs.parameter(name), inputs.device_of(name))
        if parameter.target is None:
            return None, measure(parameter, Record(), experts), moved
        place = inputs.place(name)
        here, signed = config.at(place, len(experts)), config.weighing(len(experts), place).signed(factors)
        low = low_rank_updates(inputs, parameter) if here.decorrelate is not None else None
        anatomy = together(
            dissect_matrix(matrix, here, signed, parameter.device, low, geometry=geometry, entries=entries)
            for matrix in parameter.matrices()
        )
        record = _record(anatomy, factors)
        check_finite(name, record, experts)
        return anatomy, record, moved

    found = run.map("diagnostics", names, look)
    targets = {name: anatomy for name, (anatomy, _, _) in found.items() if anatomy is not None}
    survey = Survey.of({name: record for name, (_, record, _) in found.items()}, inputs)
    moved = {
        model: {name: of_models[model] for name, (_, _, of_models) in found.items()}
        for model in (merged.experts if merged else ())
    }
    amplitude = choose(survey.measured, strength)
    return Findings(inputs, config, survey, amplitude, targets, moved, reports)


def _reports(merged: Inputs | None) -> dict[str, MergeReport]:
    """The reports beside merged models, by model."""
    opened = {} if merged is None else merged.experts
    folders = {name: weights.folder for name, weights in opened.items() if weights.folder is not None}
    return {n: MergeReport.load(path) for n, path in folders.items() if (path / REPORT_NAME).is_file()}


def _described(reports: Mapping[str, MergeReport], n_experts: int) -> CoramConfig | None:
    """The configuration of the first merge by CORAM, at the lambda it has."""
    for report in reports.values():
        if report.slice_height is not None and len(report.relative_updates) == n_experts:
            found = CoramConfig.from_report(report)
            if report.lam_source in MEASURED:
                found = replace(found, kappa=None, lam=report.lam)
            return found if found.target_modules is None and found.keep is None else None
    return None


def _strength(config: CoramConfig, inputs: Inputs) -> Strength:
    return Strength.of(config, len(inputs.experts), map(inputs.place, inputs.targets))


def _record(anatomy: Anatomy, factors: Iterable[float]) -> Record:
    squares = zip(anatomy.inner.diagonal().tolist(), factors, strict=True)
    record = Record()
    record.measure(anatomy.base, [square / factor**2 for square, factor in squares])
    return record


def _moved(merged: Inputs, name: str) -> dict[str, float]:
    """|W_merge - W_0|^2 of one tensor, by merged model."""
    parameter = merged.parameter(name)
    _, squares = squared_norms(parameter.base, parameter.experts)
    for model, square in zip(merged.experts, squares, strict=True):
        if not math.isfinite(square):
            raise CoramError(f"merged model {model!r}, tensor {name!r}: holds NaN or infinite values")
    return dict(zip(merged.experts, squares, strict=True))
