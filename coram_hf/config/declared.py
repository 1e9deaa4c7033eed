"""Options, declared once in annotations and used by Python, recipes and the command line.

An annotation such as `density: Annotated[float, Range("(0, 1]"), "Share of the entries that are kept."]`
gives an option's type, valid values and help.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from coram_hf.config.settings import Place, Varies, check_setting, setting_at
from coram_hf.errors import CoramError

_INTERVAL = re.compile(r"([(\[])\s*(\S+)\s*,\s*(\S+)\s*([)\]])")


@dataclass(frozen=True)
class Range:
    """The valid numbers as an interval in mathematical notation, such as `(0, 1]` or `[1, inf)`."""

    interval: str

    def bounds(self) -> tuple[str, float, float, str]:
        """The opening bracket, both ends, and the closing bracket."""
        found = _INTERVAL.fullmatch(self.interval)
        if found is None:
            raise TypeError(f"Range takes an interval such as '(0, 1]', not {self.interval!r}")
        return found[1], float(found[2]), float(found[3]), found[4]

    def __contains__(self, value: float) -> bool:
        opening, low, high, closing = self.bounds()
        above = value >= low if opening == "[" else value > low
        return above and (value <= high if closing == "]" else value < high)

    def __str__(self) -> str:
        """The interval in words."""
        opening, low, high, closing = self.bounds()
        ends = []
        if math.isfinite(low):
            ends.append(f"{'at least' if opening == '[' else 'above'} {low:g}")
        if math.isfinite(high):
            ends.append(f"{'at most' if closing == ']' else 'below'} {high:g}")
        return " and ".join(ends)


@dataclass(frozen=True)
class Checked:
    """A custom check, for values that are neither numbers nor choices; returns the value to use."""

    check: Callable[[Any], Any]


@dataclass(frozen=True)
class PythonOnly:
    """Marks an option whose values cannot be written as text."""


FINITE = Range("(-inf, inf)")


@dataclass(frozen=True)
class Declared:
    """One option: its name, type, valid values, help and default.

    kind: str, int, float, bool, or list if it takes several values.
    """

    name: str
    kind: type
    optional: bool = False
    choices: tuple[str, ...] = ()
    range: Range = FINITE
    help: str = ""
    default: Any = None
    check: Callable[[Any], Any] | None = field(default=None, repr=False)
    python_only: bool = False
    varies: Varies | None = None

    def checked(self, value: Any, of: str = "") -> Any:
        """Return the value if it is valid, else raise; `of` names the owner of the option in the message."""
        what = f"{of}: {self.name}" if of else self.name
        if value is None and self.optional:
            return value
        if self.check is not None:
            return self.check(value)
        if self.varies is not None and isinstance(value, Mapping | list | tuple):
            several = self.varies.by_expert and not isinstance(value, Mapping)
            check = partial(replace(self, varies=None).checked, of=of)
            found = [check_setting(part, check, what) for part in (value if several else [value])]
            return tuple(found) if several else found[0]
        if self.choices:
            if value not in self.choices:
                valid = ", ".join(map(repr, self.choices)) + (", None" if self.optional else "")
                raise CoramError(f"{what}: unknown value {value!r}; valid: {valid}")
        elif self.kind is bool:
            if not isinstance(value, bool):
                raise CoramError(f"{what} must be True or False, found {value!r}")
        elif self.kind in (int, float):
            number = Integral if self.kind is int else Real
            if isinstance(value, bool) or not isinstance(value, number) or float(value) not in self.range:
                raise CoramError(f"{what} must be {self.expected}, found {value!r}")
        return value

    def at(self, value: Any, n_experts: int, place: Place) -> Any:
        """The value for one tensor: a number or, for an option that varies by expert, a tuple of N."""
        if self.varies is None or value is None:
            return value
        by_expert = self.varies.by_expert
        several = by_expert and isinstance(value, list | tuple)
        if several and len(value) != n_experts:
            raise CoramError(f"{self.name}: found {len(value)} for {n_experts} experts; pass one per expert")
        found = [setting_at(part, place) for part in (value if several else [value])]
        if None in found:
            raise CoramError(
                f"{self.name}: no filter applies to {place.name!r}; add an entry without filter, "
                "{value: ...}, for all other tensors"
            )
        return tuple(found * (1 if several else n_experts)) if by_expert else found[0]

    @property
    def expected(self) -> str:
        """The valid numbers in words, such as `a positive integer`."""
        if self.kind is int and self.range.bounds()[1] >= 1:
            return "a positive integer"
        noun = "an integer" if self.kind is int else "a finite number"
        words = str(self.range)
        return f"{noun} {words}" if words else noun

    @property
    def summary(self) -> str:
        """The help, followed by the valid values."""
        if self.choices:
            *others, last = self.choices
            return f"{self.help} One of {', '.join(others)} or {last}." if others else f"{self.help} {last}."
        words = str(self.range)
        return f"{self.help} Must be {words}." if words else self.help


def declared(hints: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Declared]:
    """Read options from annotations, as returned by `get_type_hints(..., include_extras=True)`."""
    return {name: _read(name, hint, (defaults or {}).get(name)) for name, hint in hints.items()}


def _read(name: str, hint: Any, default: Any) -> Declared:
    notes: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        notes = tuple(rest)
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    plain = [member for member in members if member is not NoneType]
    choices = tuple(c for member in plain if get_origin(member) is Literal for c in get_args(member))
    simple = next((kind for kind in (bool, int, float, str) if kind in plain), str if choices else list)
    ranges = [note for note in notes if isinstance(note, Range)]
    checks = [note.check for note in notes if isinstance(note, Checked)]
    return Declared(
        name,
        simple,
        optional=NoneType in members,
        choices=choices,
        range=ranges[0] if ranges else FINITE,
        help=next((note for note in notes if isinstance(note, str)), ""),
        default=default,
        check=checks[0] if checks else None,
        python_only=any(isinstance(note, PythonOnly) for note in notes),
        varies=next((note for note in notes if isinstance(note, Varies)), None),
    )


def check_names(given: Iterable[str], valid: Sequence[str], what: str) -> None:
    """Raise for the first invalid name, and suggest the closest valid one."""
    for name in given:
        if name not in valid:
            raise CoramError(f"unknown {what} {name!r}; {suggestion(name, valid)}valid: {', '.join(valid)}")


def suggestion(name: str, valid: Sequence[str]) -> str:
    """A question about the closest valid name; nothing if none is close."""
    near = difflib.get_close_matches(str(name), valid, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def check_number(name: str, value: object) -> None:
    """Raise unless the value is a finite number."""
    Declared(name, float).checked(value)
