"""Factors f_i that rescale the experts' updates: one per expert, or one per expert and group of modules.

Groups are attention and MLP in equal parts of the depth: thirds, or single layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from coram_hf.config.declared import Declared, Range
from coram_hf.errors import CoramError

PARTS, THIRDS = ("attention", "MLP"), ("early", "middle", "late")
GROUPS = tuple(f"{third} {part}" for part in PARTS for third in THIRDS)
"""Groups of modules that can have factors of their own: attention and MLP in each third of the depth."""

Factors = tuple[float, ...] | tuple[tuple[float, ...], ...]
"""f_i in expert order, or 2 k numbers per expert: attention in k equal parts of the depth, then MLP."""

_EXPECTED = (
    f"one number per expert, or {len(GROUPS)} per expert ({', '.join(GROUPS)}), or two per expert and layer "
    "(attention of all layers, then MLP of all), as many for every expert"
)
_FACTOR = Declared("factors", float, range=Range("(0, inf)"))


class Position(NamedTuple):
    """Where a module is: in attention (0) or MLP (1), and in which of how many layers."""

    part: int
    layer: int
    layers: int

    def group(self, count: int) -> int:
        """Which of `count` groups, attention and MLP in equal parts of the depth, the module is in."""
        depths = count // len(PARTS)
        return self.part * depths + depths * self.layer // self.layers


def group_names(count: int) -> list[str]:
    """The names of `count` groups."""
    depths = range(1, count // len(PARTS) + 1)
    return list(GROUPS) if count == len(GROUPS) else [f"{part} {depth}" for part in PARTS for depth in depths]


def check_factors(factors: Any) -> Factors:
    """Return factors as floats; text as on the command line is read first."""
    given = read_factors(factors) if isinstance(factors, str) else factors
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise CoramError(f"factors must be {_EXPECTED}, found {factors!r}")
    rows = list(given)
    if not rows:
        raise CoramError(f"factors must be {_EXPECTED}, found none")
    if any(isinstance(row, Iterable) for row in rows):
        for row in rows:
            if not isinstance(row, Sequence) or isinstance(row, str) or not row or len(row) % len(PARTS):
                raise CoramError(f"factors must be {_EXPECTED}, found {row!r} for one expert")
        if len(set(map(len, rows))) > 1:
            raise CoramError(f"factors must be {_EXPECTED}, found {', '.join(str(len(row)) for row in rows)}")
        return tuple(tuple(float(_FACTOR.checked(number)) for number in row) for row in rows)
    return tuple(float(_FACTOR.checked(number)) for number in rows)


def read_factors(text: str) -> list[Any]:
    """Factors as written on the command line: experts separated by commas, groups by slashes."""
    try:
        rows = [[float(number) for number in row.split("/")] for row in text.split(",")]
    except ValueError:
        raise CoramError(
            f"factors: {text!r} is not a list of numbers; separate experts by commas and groups by slashes"
        ) from None
    return rows if any(len(row) > 1 for row in rows) else [row[0] for row in rows]


def write_factors(factors: Iterable[Any]) -> str:
    """Factors as text, the inverse of `read_factors`."""
    return ",".join(
        "/".join(map(repr, row)) if isinstance(row, list | tuple) else repr(row) for row in factors
    )


def check_count(factors: Factors, n_experts: int) -> None:
    """Raise unless there are factors for every expert."""
    if len(factors) != n_experts:
        raise CoramError(f"factors: found {len(factors)} for {n_experts} experts; pass {_EXPECTED}")


def factors_in(factors: Factors, position: Position | None) -> tuple[float, ...]:
    """f_i of a module; one that is in no layer (None) takes the geometric mean over the groups."""

    def one(row: float | tuple[float, ...]) -> float:
        if isinstance(row, float):
            return row
        return geometric_mean(row) if position is None else row[position.group(len(row))]

    return tuple(one(row) for row in factors)


def geometric_mean(numbers: Iterable[float]) -> float:
    """exp(mean log x)."""
    logarithms = [math.log(number) for number in numbers]
    return math.exp(math.fsum(logarithms) / len(logarithms))
