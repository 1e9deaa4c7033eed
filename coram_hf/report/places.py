"""Where a parameter stands in its model: which block, and which module of the block."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

NUMBERED = re.compile(r"(?:(.*?)\.)??(\d+)\.(.+)")


class Place(NamedTuple):
    """A layer and a module, as a reader calls them; parameters outside of any block have no layer."""

    layer: str
    module: str


def places(names: Iterable[str]) -> dict[str, Place]:
    """The places of some parameters, by the shortest names that tell them apart.

    A layer is its number, after the name of its stack where there are several (encoder and decoder); a module
    is the last part of its name, or the last two where two modules of a block share it.
    """
    parts = {name: _parts(name) for name in names}
    stacks = {stack for stack, number, _ in parts.values() if number}
    modules = {module for _, _, module in parts.values()}
    short: dict[str, int] = {}
    for module in modules:
        short[_last(module, 1)] = short.get(_last(module, 1), 0) + 1
    return {
        name: Place(
            f"{stack}.{number}" if number and len(stacks) > 1 else number,
            _last(module, 1 if short[_last(module, 1)] == 1 else 2),
        )
        for name, (stack, number, module) in parts.items()
    }


def _parts(name: str) -> tuple[str, str, str]:
    found = NUMBERED.fullmatch(name)
    stack, number, module = found.groups("") if found else ("", "", name)
    return stack, number, module.removesuffix(".weight")


def _last(module: str, count: int) -> str:
    return ".".join(module.split(".")[-count:])
