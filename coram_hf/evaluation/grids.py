"""Grids of the paper's ablations: one line expanded along its components."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from coram_hf.config import CoramConfig, check_names
from coram_hf.config.line import Conflict, Residual, Spread

HEIGHTS = (8, 16, 32, 64)
BRANCHES = ("full", "lr", "q", "s", "v", "qs", "sv")
GEOMETRIES: tuple[dict[str, Any], ...] = (
    {"branch": "full", "conflict": None},
    {"branch": "lr", "conflict": None},
    *({"branch": "full", "conflict": conflict} for conflict in get_args(Conflict)),
)
"""The paper's branches: full, lr, and the conflict-aware ones."""
AXES: dict[str, tuple[dict[str, Any], ...]] = {
    "conflict": tuple({"conflict": conflict} for conflict in (None, *get_args(Conflict))),
    "spread": tuple({"spread": spread} for spread in (None, *get_args(Spread))),
    "residual": tuple({"residual": residual} for residual in (None, *get_args(Residual))),
    "branch": tuple({"branch": branch, "conflict": None} for branch in BRANCHES),
    "height": tuple({"slice_height": height} for height in HEIGHTS),
}
GRIDS = (*AXES, "all")


def expand(config: CoramConfig, grids: Sequence[str]) -> list[CoramConfig]:
    """The line and all variants along the grids, those with the same geometry one after another.

    `all` is the paper's grid, branches x spread x residual, and the line at every height.
    """
    check_names(grids, GRIDS, "grid")
    found = [config]
    for grid in grids:
        if grid == "all":
            found += [
                replace(config, **geometry, **spread, **residual)
                for geometry in GEOMETRIES
                for spread in AXES["spread"]
                for residual in AXES["residual"]
            ]
        found += [replace(config, **change) for change in AXES["height" if grid == "all" else grid]]
    distinct = {one.line: one for one in found}
    geometry: dict[str, int] = {}
    for one in distinct.values():
        geometry.setdefault(bare(one).line, len(geometry))
    return sorted(distinct.values(), key=lambda one: (geometry[bare(one).line], one.residual is not None))


def bare(config: CoramConfig) -> CoramConfig:
    """The line without its residual, which decides its geometry."""
    return replace(config, residual=None)


def changed(first: CoramConfig, second: CoramConfig) -> str | None:
    """The one component in which two lines differ; None if they differ in none or in several."""
    fields = ("branch", "conflict", "spread", "residual", "slice_height")
    found = [name for name in fields if getattr(first, name) != getattr(second, name)]
    return found[0] if len(found) == 1 else None
