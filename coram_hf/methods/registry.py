"""The Euclidean rivals by name: their formula, their parameters, and the checks on them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from coram_hf.config import check_names
from coram_hf.errors import CoramError
from coram_hf.methods.dare_ties import dare_ties
from coram_hf.methods.linear import linear
from coram_hf.methods.orthomerge import orthomerge
from coram_hf.methods.task_arithmetic import task_arithmetic
from coram_hf.methods.ties import ties
from coram_hf.methods.tsvm import tsvm
from coram_hf.methods.updates import Updates


@dataclass(frozen=True)
class Method:
    """A merge method: a function of Updates whose keyword arguments are the method's parameters.

    by_rows: whether it may be given some rows of a tensor at a time.
    """

    update: Callable[..., Tensor]
    by_rows: bool = False

    @property
    def name(self) -> str:
        return self.update.__name__

    @property
    def formula(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.update) or "").partition("\n")[0]

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Parameter names and their default values."""
        parameters = inspect.signature(self.update).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}

    def __call__(self, updates: Updates, parameters: Mapping[str, Any]) -> Tensor:
        """The merged update of one tensor; an empty tensor has an empty one."""
        if updates.base.numel() == 0:
            return updates.shaped(updates.empty())
        return self.update(updates, **parameters)

    def complete(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """All parameters of the method, the given ones checked."""
        check_names(parameters, list(self.defaults), f"parameter of {self.name}")
        hints = get_type_hints(self.update)
        for name, value in parameters.items():
            _check_value(f"{self.name}: {name}", name, value, hints[name])
        return self.defaults | dict(parameters)


_FUNCTIONS: tuple[Callable[..., Tensor], ...] = (
    linear,
    task_arithmetic,
    ties,
    dare_ties,
    tsvm,
    orthomerge,
)
_BY_ROWS = (linear, task_arithmetic)
METHODS = {function.__name__: Method(function, function in _BY_ROWS) for function in _FUNCTIONS}


def find_method(name: str) -> Method:
    """The method of that name; an unknown name is an error with a suggestion."""
    check_names([name], list(METHODS), "merge method")
    return METHODS[name]


def _check_value(what: str, name: str, value: Any, hint: Any) -> None:
    options = get_args(hint) if get_origin(hint) is Literal else None
    if options is not None:
        if value not in options:
            raise CoramError(f"{what}: unknown value {value!r}; valid: {', '.join(map(repr, options))}")
    elif hint is bool:
        if not isinstance(value, bool):
            raise CoramError(f"{what} must be True or False, found {value!r}")
    elif value is None:
        if type(None) not in get_args(hint):
            raise CoramError(f"{what} must not be None")
    elif not _in_range(name, value):
        raise CoramError(f"{what} must be {_RANGES[name][0]}, found {value!r}")


_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "density": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "drop": ("at least 0 and below 1", lambda x: 0 <= x < 1),
    "scale": ("a finite number", math.isfinite),
    "rank": ("a positive integer", lambda x: isinstance(x, int) and x > 0),
    "seed": ("an integer", lambda x: isinstance(x, int)),
}


def _in_range(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _RANGES[name][1](value)
