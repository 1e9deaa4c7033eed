"""Baselines: functions of the updates of one tensor, turned into methods that merge whole models."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, get_type_hints

from torch import Tensor

from coram_hf.amplitude import Strength
from coram_hf.config import (
    Declared,
    Place,
    Shared,
    as_plain,
    check_names,
    declared,
    options_of,
    typical_weights,
    weigh,
)
from coram_hf.errors import CoramError
from coram_hf.geometry import SliceStats, squared_norm
from coram_hf.geometry.slices import as_rows, row_blocks
from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.methods.entry import Choice, FromMergekit, MergekitBase
from coram_hf.methods.protocol import Block, How, Work
from coram_hf.methods.updates import Updates

Tensors = Callable[[], Iterator[Updates]]
Prepare = Callable[[Tensors, Mapping[str, Any]], Any]
"""Computes what a method must know about all tensors before it merges the first one."""


@dataclass(frozen=True)
class Baseline:
    """A merge method: a function of Updates whose keyword arguments are its parameters.

    by_rows: whether it can process a few rows of a tensor at a time; what it must know of the whole tensor
    it gets by `Updates.once`.
    presets: parameters that differ from the defaults, by their names in the paper's tables;
    mergebench: presets with the coefficients that MergeBench uses.
    from_mergekit: converts mergekit's parameters for this method; mergekit_base: the role of a base there.
    fewest, most: the smallest and largest number of experts.
    usual: whether comparisons include it unless others are named.
    """

    update: Callable[..., Tensor]
    by_rows: bool = False
    prepare: Prepare | None = None
    presets: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    mergebench: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    from_mergekit: FromMergekit | None = None
    mergekit_base: MergekitBase = "required"
    fewest: int = 1
    most: int | None = None
    usual: bool = True

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.update.__name__

    @property
    def title(self) -> str:
        """The method's name in model cards."""
        return f"the baseline {self.name}"

    @property
    def formula(self) -> str:
        """The first line of the function's docstring."""
        return (inspect.getdoc(self.update) or "").partition("\n")[0]

    @cached_property
    def options(self) -> dict[str, Declared]:
        """The parameters declared in the function's signature."""
        parameters = inspect.signature(self.update).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        hints = get_type_hints(self.update, include_extras=True)
        return declared({name: hints[name] for name in defaults}, defaults)

    def complete(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Check the given parameters and fill in the defaults of the others."""
        check_names(parameters, list(self.options), f"parameter of {self.name}")
        given = {name: self.options[name].checked(value, self.name) for name, value in parameters.items()}
        return {name: option.default for name, option in self.options.items()} | given

    def check_count(self, n_experts: int) -> None:
        """Raise unless the method can merge this number of experts."""
        if n_experts < self.fewest or (self.most is not None and n_experts > self.most):
            bound = f"at least {self.fewest}" if self.most is None else f"exactly {self.most}"
            raise CoramError(f"{self.name}: the number of experts must be {bound}, found {n_experts}")

    def at(self, parameters: Mapping[str, Any], n_experts: int, place: Place) -> dict[str, Any]:
        """The parameters for one tensor, as numbers."""
        options = self.options
        return {k: options[k].at(v, n_experts, place) if k in options else v for k, v in parameters.items()}

    def __call__(self, updates: Updates, parameters: Mapping[str, Any]) -> Tensor:
        """The merged update of one tensor, with the parameters for it; empty for an empty tensor."""
        if updates.base.numel() == 0:
            return updates.shaped(updates.empty())
        return self.update(updates, **parameters)

    def prepared(self, tensors: Tensors, parameters: Mapping[str, Any]) -> Any:
        """What the method must know about all tensors before it merges the first one; None for most."""
        return None if self.prepare is None else self.prepare(tensors, parameters)

    def choose(self, parameters: Mapping[str, Any]) -> Choice:
        """The method with these parameters, including those of every method."""
        check_names(parameters, [*self.options, *options_of(Shared)], f"option of {self.name}")
        shared = Shared(**{k: v for k, v in parameters.items() if k in options_of(Shared)})
        own = self.complete({k: v for k, v in parameters.items() if k in self.options})
        return Choice(
            label=self.name,
            make=lambda inputs: Euclidean(self, own, shared),
            strength=lambda inputs: self._strength(shared, inputs),
            target_modules=shared.target_modules,
            keep=shared.keep,
            need_targets=False,
        )

    def _strength(self, shared: Shared, inputs: Inputs) -> Strength:
        n_experts = len(inputs.experts)
        self.check_count(n_experts)
        weights = typical_weights(shared.weights, n_experts, map(inputs.place, inputs.floating))
        members = inputs.members if self.mergekit_base != "required" else ()
        return Strength(weights, shared.balance, lam=1.0, amplitude=shared.amplitude, members=members)

    def config(self, parameters: Mapping[str, Any]) -> None:
        """Return None: a baseline has no CoramConfig."""

    def python(self, sources: str, options: str, line: str, config: Mapping[str, Any]) -> list[str]:
        """Python code that repeats a merge."""
        given = "".join(f", {key}={value!r}" for key, value in config.items() if value is not None)
        call = f"merge({sources}, {self.name!r}{given}{options}).save_pretrained('merged')"
        return ["from coram_hf.baselines import merge", call]

    def recipe(self, line: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a recipe that repeats a merge."""
        given = {key: value for key, value in config.items() if value is not None}
        return {"method": self.name, "parameters": given}

    def words(self, line: str, config: Mapping[str, Any]) -> list[str]:
        """Command-line arguments that repeat a merge."""
        return command_words(self.name, config)


def command_words(name: str, config: Mapping[str, Any]) -> list[str]:
    """`--method NAME --parameter key=value ...`."""
    words = ["--method", name]
    for key, value in config.items():
        if value is not None:
            words += ["--parameter", f"{key}={yaml_text(value)}"]
    return words


def yaml_text(value: Any) -> str:
    """Format a value as YAML, whose floats need a decimal point."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_nested(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_nested, value)) + "]"
    text = str(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _nested(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else yaml_text(value)


@dataclass(frozen=True)
class Euclidean:
    """A baseline applied to all floating-point tensors of a model; only an `amplitude` rescales targets."""

    baseline: Baseline
    parameters: Mapping[str, Any]
    shared: Shared

    @property
    def settings(self) -> dict[str, Any]:
        """The method, the options of every method, and its own parameters."""
        return {"method": self.baseline.name, **self.shared.to_dict(), **as_plain(dict(self.parameters))}

    def names(self, inputs: Inputs) -> dict[str, How]:
        """All floating-point tensors; an amplitude is that of the targets or, if there are none, of all."""
        scaled = set(inputs.targets or inputs.outside) if self.shared.amplitude is not None else set()
        by_rows = self.baseline.by_rows
        return {name: How(amplified=name in scaled, by_rows=by_rows) for name in inputs.floating}

    def bind(self, inputs: Inputs, factors: Sequence[float], *, measure: bool = False) -> Work:
        """Apply the function to every matrix of a target, and to every other tensor as a whole."""
        n_experts = len(inputs.experts)

        def maker(name: str) -> Callable[..., Updates]:
            weighing = weigh(self.shared.weights, n_experts, inputs.place(name))
            return partial(Updates.weighed, weighing=weighing, factors=tuple(factors))

        def every_tensor() -> Iterator[Updates]:
            for name in inputs.floating:
                for matrix, base, experts in inputs.parameter(name).matrices():
                    yield maker(name)(base, experts, name=matrix)

        prepared = self.baseline.prepared(every_tensor, self.parameters)

        def work(parameter: Parameter) -> Iterator[Block]:
            counted = parameter.target is not None or not inputs.targets
            make = partial(maker(parameter.name), prepared=prepared)
            merge = partial(
                self.baseline,
                parameters=self.baseline.at(self.parameters, n_experts, inputs.place(parameter.name)),
            )
            yield from euclidean_blocks(parameter, make, merge, self.baseline.by_rows, counted)

        return work


def euclidean_blocks(
    parameter: Parameter,
    make: Callable[..., Updates],
    merge: Callable[[Updates], Tensor],
    by_rows: bool,
    counted: bool,
) -> Iterator[Block]:
    """The update of one parameter by a function of Updates, a few rows at a time.

    `counted`: whether its norm counts towards that of the merged update, as for targets.
    """
    for matrix, rows, update in _parts(parameter, make, merge, by_rows):
        yield Block(matrix, rows, update, SliceStats(squared_norm=squared_norm(update) if counted else 0.0))


def _parts(
    parameter: Parameter, make: Callable[..., Updates], merge: Callable[[Updates], Tensor], by_rows: bool
) -> Iterator[tuple[int | None, slice, Tensor]]:
    """Rows of the update: of a matrix of a stack, by its index, or of the parameter as stored."""
    if not by_rows:
        whole = _whole(parameter, make, merge)
        yield from ((None, rows, whole[rows]) for rows in row_blocks(parameter.base))
        return
    stacked = parameter.target is not None and parameter.base.ndim == 3
    every = parameter.matrices() if stacked else [(parameter.name, parameter.base, parameter.experts)]
    for i, (name, base, experts) in enumerate(every):
        updates = make(base, experts, name=name)
        for rows in row_blocks(base):
            yield i if stacked else None, rows, merge(updates.part(rows).on(parameter.device))


def _whole(parameter: Parameter, make: Callable[..., Updates], merge: Callable[[Updates], Tensor]) -> Tensor:
    """The update of all matrices of a parameter, in the rows of its stored layout."""
    merged = [
        merge(make(base, experts, name=name).on(parameter.device))
        for name, base, experts in parameter.matrices()
    ]
    if parameter.target is None:
        return as_rows(merged[0])
    update = merged[0].new_empty(parameter.base.shape)
    for out, part in zip(parameter.target.matrices(update), merged, strict=True):
        out.copy_(part)
    return as_rows(update)
