"""Whose file or setting a merged model gets: the base's, the experts' where they agree, or a given one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from coram_hf.errors import CoramError

T = TypeVar("T")
BASE, AUTO = "base", "auto"


class Choice(NamedTuple, Generic[T]):
    """What was chosen, whose it is, and what the plan says about it.

    owner: "" for the base, the first of the experts that have it, or None for a file. warning: about what
    the experts disagree on.
    """

    value: T | None
    owner: str | None
    said: str
    warning: str | None = None


def choose(
    option: str,
    asked: str | Path,
    base: T | None,
    experts: Mapping[str, T | None],
    read: Callable[[Path], T | None],
    noun: str = "",
) -> Choice[T]:
    """Choose by `asked`: auto, base, an expert or a file; `experts` maps those without one to None.

    `auto` takes the experts' where all that have one agree, and the base's otherwise.
    """
    noun = noun or option.replace("_", " ")
    if asked == BASE:
        return Choice(base, "", "the base's" if base is not None else "none, like the base")
    if asked == AUTO:
        return _agreed(option, noun, base, {name: own for name, own in experts.items() if own is not None})
    if asked in experts:
        own = experts[str(asked)]
        if own is None:
            having = [name for name, found in experts.items() if found is not None]
            raise CoramError(
                f"{option}: expert {asked!r} has no {noun} of its own; those that have one: {having}"
            )
        return Choice(own, str(asked), f"that of {asked!r}")
    path = Path(asked).expanduser()
    if not path.exists():
        raise CoramError(
            f"{option} must be 'auto', 'base', an expert ({', '.join(map(repr, experts))}) or an existing "
            f"file; found {str(asked)!r}"
        )
    return Choice(read(path), None, f"from {path.name}")


def _agreed(option: str, noun: str, base: T | None, experts: Mapping[str, T]) -> Choice[T]:
    groups = grouped(experts)
    if not groups or (len(groups) == 1 and groups[0][0] == base):
        return Choice(base, "", "the base's" if base is not None else "none")
    if len(groups) == 1:
        value, names = groups[0]
        why = "the base has none" if base is None else "the base's differs"
        return Choice(value, names[0], f"that of {listed(names)}; {why}")
    parties = [listed(names) + (" like the base" if value == base else "") for value, names in groups]
    outcome = "the base's is kept" if base is not None else "the base has none, so the merge has none"
    flag = f"--{option.replace('_', '-')}"
    return Choice(
        base,
        "",
        "the base's; the experts disagree" if base is not None else "none; the experts disagree",
        f"the experts differ in their {noun} ({' | '.join(parties)}): {outcome}; choose one with "
        f"{option}={groups[0][1][0]!r} ({flag} {groups[0][1][0]})",
    )


def grouped(values: Mapping[str, T]) -> list[tuple[T, list[str]]]:
    """The distinct values, each with the names that have it."""
    groups: list[tuple[Any, list[str]]] = []
    for name, value in values.items():
        names = next((names for other, names in groups if other == value), None)
        if names is None:
            groups.append((value, [name]))
        else:
            names.append(name)
    return groups


def listed(names: list[str], most: int = 6) -> str:
    """Names in quotes, separated by commas; only the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
