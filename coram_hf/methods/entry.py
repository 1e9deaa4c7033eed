"""What the registry holds: how a method is chosen by its parameters, and how a merge is repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from coram_hf.amplitude import Strength
from coram_hf.config import CoramConfig, Declared
from coram_hf.inputs.inputs import Inputs
from coram_hf.methods.protocol import Method

FromMergekit = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], dict[str, Any]]
"""Our parameters for those of mergekit: the shared ones, and those of every model."""


@dataclass(frozen=True)
class Choice:
    """A method whose parameters are chosen, before any input is opened.

    label: the name of the merge in plans and reports. make: the method on some inputs.
    strength: what decides lambda, for N experts.
    carrying: lines that would carry what this one leaves at the base.
    """

    label: str
    make: Callable[[Inputs], Method]
    strength: Callable[[int], Strength]
    target_modules: str | tuple[str, ...] | None = None
    need_targets: bool = True
    compute_dtype: str = "float64"
    carrying: tuple[str, ...] = ()


class Entry(Protocol):
    """A method in the registry.

    title: what a card calls it; formula: one line; options: its parameters.
    presets, mergebench: parameter sets by the names of the paper's and MergeBench's tables.
    from_mergekit: reads mergekit's parameters, if mergekit has the method; baseless: whether it needs no base
    model there, so that the first model takes its place.
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
    def baseless(self) -> bool: ...
    @property
    def from_mergekit(self) -> FromMergekit | None: ...

    def choose(self, parameters: Mapping[str, Any]) -> Choice:
        """The method with these parameters; unknown or invalid ones are errors."""
        ...

    def config(self, parameters: Mapping[str, Any]) -> CoramConfig | None:
        """The CoramConfig of the parameters, for a method that has one."""
        ...

    def python(self, sources: str, options: str, line: str, config: Mapping[str, Any]) -> list[str]:
        """Python that repeats a merge: an import, further statements, and the call."""
        ...

    def words(self, line: str, config: Mapping[str, Any]) -> list[str]:
        """Words of the command line that repeat a merge."""
        ...
