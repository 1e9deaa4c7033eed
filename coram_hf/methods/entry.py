"""Entries of the registry: how a method is configured, and how its merges are repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from coram_hf.amplitude import Strength
from coram_hf.config import CoramConfig, Declared
from coram_hf.inputs.inputs import Inputs
from coram_hf.methods.protocol import Method

FromMergekit = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], dict[str, Any]]
"""Converts mergekit's parameters, the shared ones and those of every model, to ours."""

MergekitBase = Literal["required", "optional", "member"]
"""Whether mergekit's method needs a base model, can do without, or merges it like any other model."""


@dataclass(frozen=True)
class Choice:
    """A method with its parameters, chosen before any input is opened.

    label: the name of the merge in plans and reports. make: creates the method for given inputs.
    strength: the strength for given inputs, which determines lambda.
    carrying: lines that would merge what this one leaves at the base. config: that of CORAM.
    """

    label: str
    make: Callable[[Inputs], Method]
    strength: Callable[[Inputs], Strength]
    target_modules: str | tuple[str, ...] | None = None
    keep: str | tuple[str, ...] | None = None
    need_targets: bool = True
    compute_dtype: str = "float64"
    carrying: tuple[str, ...] = ()
    config: CoramConfig | None = None

    @property
    def finds_neutral_scale(self) -> bool:
        """Whether lambda follows from the neutral scale, for which the merged model must be run."""
        return self.config is not None and self.config.scale == "neutral" and self.config.lam is None


class Entry(Protocol):
    """A method in the registry.

    title: its name in model cards; formula: one line; options: its parameters.
    presets, mergebench: parameter sets by their names in the paper's and MergeBench's tables.
    from_mergekit: converts mergekit's parameters, if mergekit has the method; mergekit_base: the role of a
    base model there. usual: whether comparisons include it unless others are named.
    """

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def formula(self) -> str: ...
    @property
    def options(self) -> Mapping[str, Declared]: ...
    @property
    def presets(self) -> Mapping[str, dict[str, Any]]: ...
    @property
    def mergebench(self) -> Mapping[str, dict[str, Any]]: ...
    @property
    def mergekit_base(self) -> MergekitBase: ...
    @property
    def usual(self) -> bool: ...
    @property
    def from_mergekit(self) -> FromMergekit | None: ...

    def choose(self, parameters: Mapping[str, Any]) -> Choice:
        """The method with these parameters; raises for unknown or invalid ones."""
        ...

    def config(self, parameters: Mapping[str, Any]) -> CoramConfig | None:
        """The CoramConfig of the parameters; None for a method without one."""
        ...

    def python(self, sources: str, options: str, line: str, config: Mapping[str, Any]) -> list[str]:
        """Python code that repeats a merge: an import, further statements, and the call."""
        ...

    def recipe(self, line: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a recipe that repeats a merge."""
        ...

    def words(self, line: str, config: Mapping[str, Any]) -> list[str]:
        """Command-line arguments that repeat a merge."""
        ...
