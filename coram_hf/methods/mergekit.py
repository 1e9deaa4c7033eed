"""mergekit's `weight`, `density`, `lambda` and `normalize` as parameters of our methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from coram_hf.config import check_names
from coram_hf.errors import CoramError

Values = Mapping[str, Any]


def linear_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `linear`, which mergekit normalises by default."""
    read = _read(shared, own, ("weight",), normalizes=True)
    return {"weights": read.weights, "normalize": read.normalize}


def task_arithmetic_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `task_arithmetic`."""
    read = _read(shared, own, ("weight",), normalizes=False)
    scale = read.scale / len(read.weights) if read.normalize else read.scale
    return {"weights": read.weights, "scale": scale}


def ties_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `ties`, which mergekit normalises by default."""
    read = _read(shared, own, ("weight", "density"), normalizes=True)
    return {**read.election(), "density": read.density()}


def dare_ties_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `dare_ties`."""
    read = _read(shared, own, ("weight", "density"), normalizes=False)
    return {**read.election(), "drop": 1 - read.density(), "rescale": truth(shared, "rescale", True)}


class _Read(NamedTuple):
    weights: list[float]
    normalize: bool
    scale: float
    densities: set[float]

    def election(self) -> dict[str, Any]:
        """The parameters common to TIES and DARE-TIES."""
        combine = "mean" if self.normalize else "sum"
        return {"weights": self.weights, "scale": self.scale, "combine": combine}

    def density(self) -> float:
        """The one density of all models."""
        if len(self.densities) != 1:
            raise CoramError(f"density must be the same for all models, found {sorted(self.densities)}")
        return next(iter(self.densities))


def _read(shared: Values, own: Sequence[Values], named: tuple[str, ...], normalizes: bool) -> _Read:
    check_names(shared, (*named, "lambda", "normalize", "int8_mask", "rescale"), "parameter")
    for values in own:
        check_names(values, named, "parameter of a model")
    merged = [{**shared, **values} for values in own]
    weights = [_number(values, "weight") for values in merged]
    if not weights:
        raise CoramError("models lists no expert; add at least one model besides the base")
    normalize = truth(shared, "normalize", normalizes)
    strength = _number(shared, "lambda")
    scale = strength if normalize else strength * sum(weights) / len(weights)
    return _Read(weights, normalize, scale, {_number(values, "density") for values in merged})


def _number(values: Values, key: str) -> float:
    value = values.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CoramError(f"{key} must be a number, found {value!r}")
    return float(value)


def truth(values: Values, key: str, default: bool) -> bool:
    """Return a value that must be true or false; raise for anything else."""
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise CoramError(f"{key} must be true or false, found {value!r}")
    return value
