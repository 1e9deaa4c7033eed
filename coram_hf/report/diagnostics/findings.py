"""The one walk over base, experts and merged models that all diagnostics share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from coram_hf.amplitude import Amplitude, UpdateNorms, contraction
from coram_hf.config import CoramConfig
from coram_hf.engine import Engine
from coram_hf.errors import CoramError
from coram_hf.execution.survey import Survey, check_finite, measure
from coram_hf.geometry import squared_norms
from coram_hf.geometry.anatomy import Anatomy, dissect
from coram_hf.geometry.branches import BRANCHES
from coram_hf.inputs import Models
from coram_hf.inputs.parent_card import provenance
from coram_hf.methods.record import Record
from coram_hf.report.places import Place, places


@dataclass(frozen=True)
class Findings:
    """What the walk has found: the anatomy of every target, and |W_merge - W_0|^2 of merged models.

    Sections read properties of the findings only; where these come from is known here.
    """

    engine: Engine
    targets: Mapping[str, Anatomy]
    moved: Mapping[str, Mapping[str, float]]

    @property
    def experts(self) -> list[str]:
        return list(self.engine.models.experts)

    @property
    def config(self) -> CoramConfig:
        """The merge that the diagnosis is about."""
        return self.engine.config

    @property
    def survey(self) -> Survey:
        """The norms of every tensor, of the experts' updates of it, and of all together."""
        return self.engine.survey

    @property
    def measured(self) -> UpdateNorms:
        """The norms from which D comes."""
        return self.engine.measured

    @property
    def amplitude(self) -> Amplitude:
        return self.engine.amplitude

    @property
    def factors(self) -> tuple[float, ...]:
        """Balance factors f_i, in expert order."""
        return self.engine.factors

    def models(self) -> dict[str, Any]:
        """Which merge it is: its line, the models and their size, and what the user should know of them."""
        models = self.engine.models
        return {
            "line": self.config.line,
            "branch": self.config.branch,
            "class": type(models.base.model).__name__,
            "base": provenance(models.base)["source"],
            "experts": self.experts,
            "merged": list(self.moved),
            "targets": len(self.targets),
            "parameters": sum(models.base.original(name).numel() for name in self.targets),
            "warnings": [*models.warnings, *self.amplitude.warnings],
        }

    @cached_property
    def whole(self) -> Anatomy:
        """All targets together."""
        return together(self.targets.values())

    @cached_property
    def places(self) -> dict[str, Place]:
        """Layer and module of every target."""
        return places(self.targets)

    def by_layer(self) -> dict[str, Anatomy]:
        """The targets of each layer together."""
        layers: dict[str, list[Anatomy]] = {}
        for name, anatomy in self.targets.items():
            layers.setdefault(self.places[name].layer, []).append(anatomy)
        return {layer: together(parts) for layer, parts in layers.items()}

    def relative(self, anatomy: Anatomy) -> dict[str, float | None]:
        """r_i = |W_i - W_0| / |W_0| by expert, before any balancing."""
        squares = anatomy.inner.diagonal().tolist()
        return {
            expert: math.sqrt(square / anatomy.base) / factor if anatomy.base else None
            for expert, square, factor in zip(self.experts, squares, self.factors, strict=True)
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

    @property
    def lam(self) -> float | None:
        """Lambda of the configured merge."""
        measured = self.config.lam is None and self.config.scale == "c_rms"
        return self.amplitude.coefficient(self.config, self.c_rms(self.whole) if measured else None)


def together(parts: Iterable[Anatomy]) -> Anatomy:
    """The sum of some anatomies."""
    whole = Anatomy()
    for part in parts:
        whole += part
    return whole


def walk(
    engine: Engine, merged: Models | None = None, *, geometry: bool = True, entries: bool = True
) -> Findings:
    """Read every target once, and with merged models all other floating tensors, too.

    A NaN or infinity is an error that names the model and the tensor.
    """
    names = [*engine.targets, *(engine.outside if merged is not None else ())]
    sources = [*engine.models.named(), *(merged.experts.items() if merged else ())]
    factors = engine.factors

    def look(name: str) -> tuple[Anatomy | None, Record, dict[str, float]]:
        for _, weights in sources:
            weights.prefetch(name)
        moved = {} if merged is None else _moved(merged, name)
        if name not in engine.targets:
            return None, measure(engine.models, name), moved
        anatomy = together(
            dissect(
                base,
                experts,
                engine.config,
                factors=factors,
                device=engine.device,
                geometry=geometry,
                entries=entries,
            )
            for _, _, base, experts in engine.matrices(name, None)
        )
        record = _record(anatomy, factors)
        check_finite(name, record, list(engine.models.experts))
        return anatomy, record, moved

    found = engine.each(names, look, "diagnostics")
    targets = {name: anatomy for name, (anatomy, _, _) in found.items() if anatomy is not None}
    records = {name: record for name, (_, record, _) in found.items()}
    moved = {
        model: {name: of_models[model] for name, (_, _, of_models) in found.items()}
        for model in (merged.experts if merged else ())
    }
    engine.conclude(Survey.of(records, engine.targets, engine.outside, list(engine.models.experts)))
    return Findings(engine, targets, moved)


def _record(anatomy: Anatomy, factors: Iterable[float]) -> Record:
    squares = zip(anatomy.inner.diagonal().tolist(), factors, strict=True)
    record = Record()
    record.measure(anatomy.base, [square / factor**2 for square, factor in squares])
    return record


def _moved(merged: Models, name: str) -> dict[str, float]:
    """|W_merge - W_0|^2 of one tensor, by merged model."""
    _, squares = squared_norms(*merged.tensors(name))
    for model, square in zip(merged.experts, squares, strict=True):
        if not math.isfinite(square):
            raise CoramError(f"merged model {model!r}, tensor {name!r}: holds NaN or infinite values")
    return dict(zip(merged.experts, squares, strict=True))
