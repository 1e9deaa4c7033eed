"""Surveys: the norms of the experts' updates over a model, measured before or while merging."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coram_hf.amplitude import UpdateNorms
from coram_hf.config import Factors
from coram_hf.inputs.inputs import Inputs
from coram_hf.methods.record import Record, norms


@dataclass(frozen=True)
class Survey:
    """Update norms over the target matrices, over all other floating-point tensors, and of each tensor."""

    targets: UpdateNorms
    outside: UpdateNorms
    tensors: Mapping[str, Record] = field(default_factory=dict)
    has_targets: bool = True

    @classmethod
    def of(cls, records: Mapping[str, Record], inputs: Inputs) -> Survey:
        """The survey of the tensors that have been measured."""
        measured = {n: records[n] for n in inputs.floating if n in records and records[n].updates}
        inside = [measured[name] for name in inputs.targets if name in measured]
        others = [measured[name] for name in inputs.outside if name in measured]
        experts = list(inputs.experts)
        return cls(norms(inside, experts), norms(others, experts), measured, bool(inputs.targets))

    @property
    def measured(self) -> UpdateNorms:
        """The norms behind D and c_RMS: the targets', or those of all tensors if there are no targets."""
        return self.targets if self.has_targets else self.outside

    def with_factors(self, factors: Factors | None, inputs: Inputs) -> Survey:
        """This survey with the norms of the targets' updates as the given factors rescale them."""
        if factors is None:
            return self
        scaled = [
            [f * f * square for f, square in zip(inputs.factors(factors, name), record.updates, strict=True)]
            for name, record in self.tensors.items()
            if name in inputs.targets
        ]
        sums = [math.fsum(column) for column in zip(*scaled, strict=True)]
        rescaled = dict(zip(self.targets.updates, sums or [0.0] * len(inputs.experts), strict=True))
        return replace(self, targets=replace(self.targets, rescaled=rescaled))

    def outside_share(self) -> dict[str, float]:
        """Per expert, |update outside the targets| / |whole update|."""
        return {
            name: _share(self.outside.updates[name], inside) for name, inside in self.targets.updates.items()
        }

    def total_outside_share(self) -> float:
        """The share of the update outside the targets, over all experts together."""
        return _share(math.fsum(self.outside.updates.values()), math.fsum(self.targets.updates.values()))


def _share(part_square: float, rest_square: float) -> float:
    whole = part_square + rest_square
    return math.sqrt(part_square / whole) if whole else 0.0
