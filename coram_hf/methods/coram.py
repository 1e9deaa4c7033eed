"""CORAM: slices merged in the base's frame on the targets, and a residual pathway for everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from coram_hf.amplitude import Strength
from coram_hf.config import (
    CoramConfig,
    Declared,
    check_names,
    options_of,
    write_factors,
    write_residual_parameters,
)
from coram_hf.errors import CoramError
from coram_hf.geometry import merge_rows
from coram_hf.geometry.slices import CHUNK_BYTES
from coram_hf.inputs.inputs import Inputs, Parameter
from coram_hf.methods.baseline import euclidean_blocks, yaml_text
from coram_hf.methods.decorrelated import decorrelated_blocks, memory_of
from coram_hf.methods.entry import Choice, MergekitBase
from coram_hf.methods.linear import weighted_mean
from coram_hf.methods.protocol import Block, How, Work
from coram_hf.methods.residual import BY_ROWS, merge_residual, prepare_residual
from coram_hf.methods.updates import Updates

STATED_BY_LINE = ("branch", "conflict", "spread", "residual", "decorrelate", "slice_height")


@dataclass(frozen=True)
class Coram:
    """W* = W_0 + lambda (W_merge - W_0) on the targets, W_0 + rho on the residual pathway."""

    configuration: CoramConfig

    @property
    def settings(self) -> dict[str, Any]:
        """The method and every field of its configuration."""
        return {"method": "coram", **self.configuration.to_dict()}

    def names(self, inputs: Inputs) -> dict[str, How]:
        """The amplified targets, and with a residual pathway all other floating-point tensors."""
        config, residual = self.configuration, self.configuration.residual
        more = sum(CHUNK_BYTES for part in (config.conflict, config.spread) if part is not None)
        found = dict.fromkeys(inputs.targets, How(amplified=True, by_rows=True, memory=more))
        if config.decorrelate is not None:
            found = {n: how._replace(memory=more + memory_of(inputs, n)) for n, how in found.items()}
        if residual is not None:
            found |= dict.fromkeys(inputs.outside, How(amplified=False, by_rows=residual in BY_ROWS))
        return found

    def bind(self, inputs: Inputs, factors: Sequence[float], *, measure: bool = False) -> Work:
        """Apply the geometry to targets, and the residual merge to other parameters."""
        whole, residual, n_experts = self.configuration, self.configuration.residual, len(inputs.experts)
        given = whole.expert_factors(n_experts)
        balance = tuple(factors)

        def maker(name: str) -> Callable[..., Updates]:
            own = balance if given is None else inputs.factors(given, name)
            weighing = whole.weighing(n_experts, inputs.place(name))
            return partial(Updates.weighed, weighing=weighing, factors=own)

        def outside() -> Iterator[Updates]:
            for name in inputs.outside:
                parameter = inputs.parameter(name)
                yield maker(name)(parameter.base, parameter.experts, name=name)

        prepared = prepare_residual(outside, whole.residual_parameters) if inputs.outside else None

        def work(parameter: Parameter) -> Iterator[Block]:
            place = inputs.place(parameter.name)
            config, weighing = whole.at(place, n_experts), whole.weighing(n_experts, place)
            own = balance if given is None else inputs.factors(given, parameter.name)
            factors = weighing.signed(own)
            make = maker(parameter.name)
            if not any(weighing.signs):
                counted = parameter.target is not None
                yield from euclidean_blocks(parameter, make, weighted_mean, by_rows=True, counted=counted)
            elif parameter.target is not None and config.decorrelate is not None:
                yield from decorrelated_blocks(parameter, inputs, config, factors, measured=measure)
            elif parameter.target is not None:
                for i, (_, base, experts) in enumerate(parameter.matrices()):
                    for merged in merge_rows(
                        base,
                        experts,
                        config,
                        factors=factors,
                        device=parameter.device,
                        measure=measure,
                        exact=config.scale != "sqrt_n",
                        result=inputs.dtype,
                    ):
                        yield Block(i, merged.rows, merged.update, merged.stats, merged.squares)
            elif residual is not None:
                merge = partial(merge_residual, residual=residual, parameters=whole.residual_parameters)
                make = partial(make, prepared=prepared)
                yield from euclidean_blocks(parameter, make, merge, residual in BY_ROWS, counted=False)

        return work


class CoramEntry:
    """CORAM in the registry; its parameters are a line and the fields of CoramConfig."""

    name = "coram"
    title = "CORAM"
    formula = "W = W_0 + lambda (U_0 Qbar S_0 (I + dSbar) Vbar^T - W_0), slice by slice"
    presets: Mapping[str, dict[str, Any]] = {}
    mergebench: Mapping[str, dict[str, Any]] = {}
    mergekit_base: MergekitBase = "required"
    usual = False

    @property
    def options(self) -> dict[str, Declared]:
        """A line, and every field of CoramConfig."""
        line = Declared("line", str, optional=True, help=LINE_HELP)
        return {"line": line, **options_of(CoramConfig)}

    def config(self, parameters: Mapping[str, Any]) -> CoramConfig:
        """The configuration from a line and from the fields that it does not encode."""
        if parameters.get("amplitude") is not None:
            raise CoramError(
                'amplitude is an option of baselines; for CORAM, kappa is that with scale="c_rms" or '
                "decorrelate"
            )
        check_names(parameters, list(self.options), "CoramConfig option")
        given = {key: value for key, value in parameters.items() if key != "line"}
        if "line" not in parameters:
            return CoramConfig.from_dict(given)
        return CoramConfig.from_line(parameters["line"], **given)

    def choose(self, parameters: Mapping[str, Any]) -> Choice:
        """CORAM with the configuration of these parameters."""
        return choose_coram(self.config(parameters))

    def from_mergekit(self, shared: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return our own parameters unchanged, with mergekit's weight of every model."""
        parameters = {key: value for key, value in shared.items() if key != "base_model"}
        if any(own):
            for values in own:
                check_names(values, ("weight",), "parameter of a model")
            parameters["weights"] = [values.get("weight", 1.0) for values in own]
        return parameters

    def python(self, sources: str, options: str, line: str, config: Mapping[str, Any]) -> list[str]:
        """Python code that repeats a merge."""
        given = "".join(f", {key}={value!r}" for key, value in _not_stated(config).items())
        return [
            "from coram_hf import CoramConfig, CoramMerger",
            f"config = CoramConfig.from_line({line!r}{given})",
            f"CoramMerger({sources}, config{options}).merge_to('merged')",
        ]

    def recipe(self, line: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a recipe that repeats a merge."""
        return {"line": line, **_not_stated(config)}

    def words(self, line: str, config: Mapping[str, Any]) -> list[str]:
        """Command-line arguments that repeat a merge."""
        words = ["--line", line]
        for key, value in _not_stated(config).items():
            option = f"--{'lambda' if key == 'lam' else key.replace('_', '-')}"
            several = key in ("target_modules", "keep") and not isinstance(value, str)
            for one in (value if len(value) > 1 else [*value] * 2) if several else [value]:
                words += [option, _written(key, one)]
        return words


LINE_HELP = "The configuration by its line, such as SS(ca+ave,variance).ties, or recommended."
CORAM = CoramEntry()


def choose_coram(config: CoramConfig) -> Choice:
    """CORAM with the given configuration."""
    return Choice(
        label=config.line,
        make=lambda inputs: Coram(config),
        strength=lambda inputs: Strength.of(config, len(inputs.experts), map(inputs.place, inputs.targets)),
        target_modules=config.target_modules,
        keep=config.keep,
        compute_dtype=config.compute_dtype,
        carrying=() if config.residual else config.residual_lines,
        config=config,
    )


def _written(key: str, value: Any) -> str:
    """The value of an option as the command line reads it."""
    if key == "weights":
        return ", ".join(map(yaml_text, value))
    if key == "residual_parameters":
        return write_residual_parameters(value)
    return write_factors(value) if isinstance(value, list | tuple) else str(value)


def _not_stated(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that the line does not encode and that differ from their defaults."""
    defaults = {name: option.default for name, option in options_of(CoramConfig).items()}
    return {
        key: value
        for key, value in config.items()
        if key not in STATED_BY_LINE and value is not None and value != defaults.get(key)
    }
