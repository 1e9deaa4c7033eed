"""Where a parameter is in its model: in which block, and in which module of the block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

NUMBERED = re.compile(r"(?:(.*?)\.)??(\d+)\.(.+)")


class Place(NamedTuple):
    """A layer and a module, named for a reader; parameters outside the blocks have no layer."""

    layer: str
    module: str


def places(names: Iterable[str]) -> dict[str, Place]:
    """The places of some parameters, by the shortest names that tell them apart.

    A layer is its number, after the name of its stack where there are several (encoder and decoder); a module
    is the last part of its name, or as many parts as it takes to tell the modules of a layer apart.
    """
    parts = {name: _parts(name) for name in names}
    stacks = {stack for stack, number, _ in parts.values() if number}
    length = {module: 1 for _, _, module in parts.values()}
    while clash := _clashes(parts.values(), length):
        length |= {module: length[module] + 1 for module in clash}
    return {
        name: Place(
            f"{stack}.{number}" if number and len(stacks) > 1 else number, _last(module, length[module])
        )
        for name, (stack, number, module) in parts.items()
    }


def _clashes(parts: Iterable[tuple[str, str, str]], length: Mapping[str, int]) -> set[str]:
    """Modules whose name is that of another one in their layer, and can still be made longer."""
    holders: dict[tuple[str, str, str], set[str]] = {}
    for stack, number, module in parts:
        holders.setdefault((stack, number, _last(module, length[module])), set()).add(module)
    return {
        module
        for modules in holders.values()
        for module in modules
        if len(modules) > 1 and length[module] <= module.count(".")
    }


def _parts(name: str) -> tuple[str, str, str]:
    found = NUMBERED.fullmatch(name)
    stack, number, module = found.groups("") if found else ("", "", name)
    return stack, number, module.removesuffix(".weight")


def _last(module: str, count: int) -> str:
    return ".".join(module.split(".")[-count:])
