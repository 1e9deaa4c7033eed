"""Settings: numbers that may differ by layer, by module and by expert, written as in mergekit's recipes.

A setting is a number; a gradient, which is a list of numbers interpolated over the layers; or a list of
`{filter: text, value: number or gradient}`, of which the first applies whose filter is part of a tensor's
name. An entry without a filter, or with "*", applies to every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from coram_hf.errors import CoramError

Setting = Any
"""A number, a gradient, or conditions; see above."""

EVERY = "*"
"""The filter that applies to every tensor, like an entry without a filter."""


class Place(NamedTuple):
    """Where a tensor is: its name, and its layer's position from 0 (first) to 1 (last).

    As in mergekit, tensors outside the layers are at 0, and the only layer of a model is at 1.
    """

    name: str = ""
    depth: float = 0.0


@dataclass(frozen=True)
class Varies:
    """Marks an option that takes a setting in place of a number, or a list of one setting per expert."""

    by_expert: bool = False


def check_setting(value: Any, check: Callable[[Any], Any], what: str) -> Setting:
    """Return a setting in which every number has passed `check`, with tuples in place of lists."""
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, str) or not isinstance(value, Sequence):
        return check(value)
    if not value:
        raise CoramError(f"{what}: found an empty list; pass a number, a gradient or filters")
    if not any(isinstance(entry, Mapping) for entry in value):
        return tuple(check(number) for number in value)
    return tuple(_check_condition(entry, check, what) for entry in value)


def _check_condition(entry: Any, check: Callable[[Any], Any], what: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or "value" not in entry or not set(entry) <= {"filter", "value"}:
        raise CoramError(f"{what}: expected {{filter: part of a name, value: number}}, found {entry!r}")
    if not isinstance(entry.get("filter", ""), str | None):
        raise CoramError(f"{what}: a filter must be a part of a tensor's name, found {entry['filter']!r}")
    value = entry["value"]
    plain = isinstance(value, str) or not isinstance(value, Sequence)
    kept = {"filter": entry["filter"]} if entry.get("filter") is not None else {}
    return {**kept, "value": check(value) if plain else tuple(check(number) for number in value)}


def varies(setting: Setting) -> bool:
    """Whether a setting is more than a number."""
    return isinstance(setting, Sequence) and not isinstance(setting, str)


def setting_at(setting: Setting, place: Place) -> float | None:
    """The number that a setting has for one tensor; None if no filter applies to it."""
    if not varies(setting):
        return None if setting is None else float(setting)
    if not isinstance(setting[0], Mapping):
        return _interpolated(setting, place.depth)
    for entry in setting:
        if _is_general(entry) or (place.name and entry["filter"] in place.name):
            return setting_at(entry["value"], place)
    return None


def with_fallback(setting: Setting, other: Setting) -> Setting:
    """A setting that takes another's value where none of its filters applies."""
    if setting is None:
        return other
    if not varies(setting) or not isinstance(setting[0], Mapping) or any(map(_is_general, setting)):
        return setting
    if other is None:
        return setting
    conditions = varies(other) and isinstance(other[0], Mapping)
    return (*setting, *(other if conditions else ({"value": other},)))


def _is_general(entry: Mapping[str, Any]) -> bool:
    return entry.get("filter", EVERY) == EVERY


def _interpolated(gradient: Sequence[float], depth: float) -> float:
    """Piecewise linear interpolation between equally spaced points."""
    scaled = depth * (len(gradient) - 1)
    lower = int(scaled)
    upper = min(len(gradient) - 1, lower + 1)
    share = scaled - lower
    return (1 - share) * float(gradient[lower]) + share * float(gradient[upper])
