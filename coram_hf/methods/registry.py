"""The registry: one line per method, plus those of other packages (entry points `coram_hf.methods`).

Methods are imported on first use, so that their names can be listed without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple

from coram_hf.config import check_names
from coram_hf.errors import CoramError, reason

if TYPE_CHECKING:
    from coram_hf.methods.entry import Entry

GROUP = "coram_hf.methods"
"""The entry point group with which other packages register their methods."""

DEFAULT = "coram"

BUILT_IN = {
    "coram": "coram_hf.methods.coram:CORAM",
    "linear": "coram_hf.methods.linear:LINEAR",
    "task_arithmetic": "coram_hf.methods.task_arithmetic:TASK_ARITHMETIC",
    "ties": "coram_hf.methods.ties:TIES",
    "dare_ties": "coram_hf.methods.dare_ties:DARE_TIES",
    "dare_linear": "coram_hf.methods.dare_linear:DARE_LINEAR",
    "della": "coram_hf.methods.della:DELLA",
    "della_linear": "coram_hf.methods.della_linear:DELLA_LINEAR",
    "breadcrumbs": "coram_hf.methods.breadcrumbs:BREADCRUMBS",
    "sce": "coram_hf.methods.sce:SCE",
    "model_stock": "coram_hf.methods.model_stock:MODEL_STOCK",
    "slerp": "coram_hf.methods.slerp:SLERP",
    "nuslerp": "coram_hf.methods.nuslerp:NUSLERP",
    "karcher": "coram_hf.methods.karcher:KARCHER",
    "arcee_fusion": "coram_hf.methods.arcee_fusion:ARCEE_FUSION",
    "tsvm": "coram_hf.methods.tsvm:TSVM",
    "iso_c": "coram_hf.methods.iso_c:ISO_C",
    "wudi": "coram_hf.methods.wudi:WUDI",
    "ace": "coram_hf.methods.ace:ACE",
    "orthomerge": "coram_hf.methods.orthomerge:ORTHOMERGE",
}


class Preset(NamedTuple):
    """A method and the parameters that differ from its defaults."""

    method: str
    parameters: dict[str, Any] = {}  # noqa: RUF012


def method_names() -> tuple[str, ...]:
    """The names of all methods, built-in ones first."""
    return (*BUILT_IN, *(name for name in _foreign() if name not in BUILT_IN))


def rival_names() -> tuple[str, ...]:
    """The names of all methods except CORAM."""
    return tuple(name for name in method_names() if name != DEFAULT)


def usual_names() -> tuple[str, ...]:
    """The names of the methods that comparisons include unless others are named."""
    return tuple(name for name in rival_names() if find_method(name).usual)


@cache
def find_method(name: str) -> Entry:
    """The method of that name; the error for an unknown name suggests the closest one."""
    check_names([name], list(method_names()), "merge method")
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found: Entry = getattr(import_module(module), attribute)
        return found
    return _load(_foreign()[name])


def paper_presets() -> dict[str, Preset]:
    """The baselines of the paper's tables, with their authors' defaults."""
    return {
        title: Preset(name, values)
        for name in rival_names()
        for title, values in find_method(name).presets.items()
    }


def mergebench_presets() -> dict[str, Preset]:
    """The baselines with the coefficients that MergeBench uses.

    `scripts/merge.sh` of uiuctml/MergeBench: task arithmetic with --scaling-coef 0.4, TIES with --K 0.3
    --scaling-coef 0.4, DARE with --p 0.9 --scaling-coef 0.4, which the paper's protocol follows. TIES and
    DARE sum the agreeing entries there.
    """
    return {
        title: Preset(name, values)
        for name in rival_names()
        for title, values in find_method(name).mergebench.items()
    }


@cache
def _foreign() -> Mapping[str, EntryPoint]:
    """The methods that other packages register, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> Entry:
    """A method of another package: an entry of the registry, or a plain function of Updates."""
    try:
        found: Any = point.load()
    except Exception as error:  # other people's code
        raise CoramError(
            f"method {point.name!r} ({point.value}) cannot be loaded: {reason(error)}"
        ) from error
    if not hasattr(found, "choose"):
        from coram_hf.methods.baseline import Baseline

        found = Baseline(found)
    if found.name != point.name:
        raise CoramError(
            f"method {point.name!r} ({point.value}) calls itself {found.name!r}; "
            "name the entry point after the function"
        )
    entry: Entry = found
    return entry
