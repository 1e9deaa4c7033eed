"""The first pass over the weights: every tensor is checked, and the experts' updates are measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coram_hf.amplitude import UpdateNorms
from coram_hf.errors import CoramError
from coram_hf.geometry import squared_norms
from coram_hf.inputs import Models
from coram_hf.methods.record import Record, norms


@dataclass(frozen=True)
class Survey:
    """Update norms on the target matrices, on all other floating tensors, and of each tensor."""

    targets: UpdateNorms
    outside: UpdateNorms
    tensors: Mapping[str, Record] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        records: Mapping[str, Record],
        targets: Iterable[str],
        outside: Iterable[str],
        experts: Sequence[str],
    ) -> Survey:
        """The survey of tensors that have been measured."""
        inside, others = ([records[n] for n in names if n in records] for names in (targets, outside))
        return cls(norms(inside, experts), norms(others, experts), records)

    def outside_share(self) -> dict[str, float]:
        """Per expert, |update outside the targets| / |whole update|."""
        return {
            name: _share(self.outside.updates[name], inside) for name, inside in self.targets.updates.items()
        }

    def total_outside_share(self) -> float:
        """The same for the updates of all experts together."""
        return _share(math.fsum(self.outside.updates.values()), math.fsum(self.targets.updates.values()))


def measure(models: Models, name: str) -> Record:
    """The norms of one tensor of the base and of the experts' updates of it."""
    record = Record()
    record.measure(*squared_norms(*models.tensors(name)))
    check_finite(name, record, list(models.experts))
    return record


def check_finite(name: str, record: Record, experts: Sequence[str]) -> None:
    """Raise for NaN or infinity, as the norms of a tensor show them."""
    if not math.isfinite(record.base):
        raise CoramError(f"the base, tensor {name!r}: holds NaN or infinite values")
    for expert, square in zip(experts, record.updates, strict=True):
        if not math.isfinite(square):
            raise CoramError(
                f"expert {expert!r}, tensor {name!r}: holds NaN or infinite values; "
                "its checkpoint is damaged or its training diverged"
            )


def _share(part_square: float, rest_square: float) -> float:
    whole = part_square + rest_square
    return math.sqrt(part_square / whole) if whole else 0.0
