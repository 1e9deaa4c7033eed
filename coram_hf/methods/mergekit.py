"""mergekit's parameters as those of our methods, with mergekit's defaults.

A converter gets the shared parameters, with the `base_model` if the recipe names one, and those of every
model, and returns ours. Values may be numbers, gradients over the layers, or conditions with filters; what a
method does not use is ignored, as in mergekit.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coram_hf.config import Setting, check_names, with_fallback
from coram_hf.config.settings import check_setting
from coram_hf.errors import CoramError

Values = Mapping[str, Any]
logger = logging.getLogger("coram_hf")

KNOWN = (
    "weight", "density", "lambda", "normalize", "int8_mask", "rescale", "gamma", "epsilon", "t",
    "select_topk", "filter_wise", "max_iter", "tol", "nuslerp_flatten", "nuslerp_row_wise", "embed_slerp",
    "normalize_weights", "eps", "scale", "similarity_threshold", "consensus_method", "swapping", "r",
    "base_model", "noise_scale", "alpha",
)  # fmt: skip
"""Names of parameters of mergekit's methods, past and present."""


def linear_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `linear`, which mergekit normalises by default."""
    read = Read(shared, own)
    return {"weights": read.weights(), "normalize": read.flag("normalize", True)}


def task_arithmetic_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `task_arithmetic`."""
    read = Read(shared, own)
    normalize, n_experts = read.flag("normalize", False), len(own)
    scale = read.one("lambda", 1.0, lambda strength: strength / n_experts if normalize else strength)
    return {"weights": read.weights(), "scale": scale, "normalize": normalize}


def ties_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `ties`, which mergekit normalises by default."""
    read = Read(shared, own)
    return {**_election(read, True), "density": read.density(), "rescale": read.flag("rescale", False)}


def dare_ties_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `dare_ties`."""
    read = Read(shared, own)
    return {**_election(read, False), **_dare(read)}


def dare_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `dare_linear`."""
    read = Read(shared, own)
    return {**_sum(read, False), **_dare(read)}


def della_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `della`, which mergekit normalises by default."""
    return _della(Read(shared, own), True)


def della_linear_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `della_linear`."""
    return _della(Read(shared, own), False)


def breadcrumbs_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `breadcrumbs`."""
    read = Read(shared, own)
    pruning = {"density": read.density(), "gamma": read.each("gamma", 0.01)}
    return {**_sum(read, False), **pruning, "rescale": read.flag("rescale", False)}


def slerp_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `slerp`."""
    if "t" not in shared:
        raise CoramError("slerp needs the parameter t, from 0 for the base to 1 for the other model; add it")
    return {"t": Read(shared, own).one("t", 0.5)}


def nuslerp_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `nuslerp`."""
    read = Read(shared, own)
    along = "columns" if read.flag("nuslerp_row_wise", False) else "rows"
    return {
        "weights": read.weights(),
        "of": "updates" if shared.get("base_model") else "weights",
        "along": "tensor" if read.flag("nuslerp_flatten", True) else along,
    }


def karcher_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `karcher`."""
    read = Read(shared, own)
    return {"max_iter": int(number("max_iter", shared.get("max_iter", 10))), "tol": read.one("tol", 1e-5)}


def model_stock_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `model_stock`."""
    return {"filter_wise": Read(shared, own).flag("filter_wise", False)}


def sce_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `sce`."""
    return {"select_topk": Read(shared, own).one("select_topk", 1.0, _share)}


def arcee_fusion_parameters(shared: Values, own: Sequence[Values]) -> dict[str, Any]:
    """Parameters of `arcee_fusion`, which has none."""
    Read(shared, own)
    return {}


class Read:
    """The shared parameters of a recipe, and those of each of its models."""

    def __init__(self, shared: Values, own: Sequence[Values]) -> None:
        self._shared, self._own = shared, own
        if not own:
            raise CoramError("models lists no expert; add at least one model besides the base")
        _check_names([shared, *own])

    def one(self, name: str, default: float, change: Callable[[float], float] = float) -> Setting:
        """A parameter that is the same for all models."""
        value = _conditions(self._shared.get(name, default))
        return _setting(name, value if value is None else with_fallback(value, default), change)

    def each(self, name: str, default: float, change: Callable[[float], float] = float) -> Setting:
        """A parameter of every model: one number if they all have the same, else a list."""
        found = self.every(name, default, change)
        plain = isinstance(found[0], float) and all(setting == found[0] for setting in found)
        return found[0] if plain else found

    def every(self, name: str, default: float, change: Callable[[float], float] = float) -> list[Setting]:
        """A parameter of every model: its own or else the shared one, or else the default."""
        shared = with_fallback(_conditions(self._shared.get(name)), default)
        found = [with_fallback(_conditions(values.get(name)), shared) for values in self._own]
        return [_setting(name, setting, change) for setting in found]

    def weights(self) -> list[Setting]:
        """The weight of every model, 1 by default."""
        return self.every("weight", 1.0)

    def density(self, change: Callable[[float], float] = float) -> Setting:
        """The density of every model; values above 1 count as 1."""
        return self.each("density", 1.0, lambda density: change(_share(density)))

    def flag(self, name: str, default: bool) -> bool:
        """A parameter that is true or false, the same for all models and tensors."""
        return truth(self._shared, name, default)


def _check_names(every: Sequence[Values]) -> None:
    """Raise for a name that is probably a misspelt parameter; warn about others that no method has."""
    unknown = dict.fromkeys(str(name) for values in every for name in values if name not in KNOWN)
    for name in unknown:
        if difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.75):
            check_names([name], KNOWN, "parameter")
    if unknown:
        logger.warning("ignored parameters that no method of mergekit has: %s", ", ".join(unknown))


def _election(read: Read, normalizes: bool) -> dict[str, Any]:
    """The parameters common to TIES and DARE-TIES."""
    combine = "mean" if read.flag("normalize", normalizes) else "sum"
    return {
        "weights": read.weights(),
        "scale": read.one("lambda", 1.0),
        "combine": combine,
        "normalize": combine == "mean",
    }


def _sum(read: Read, normalizes: bool) -> dict[str, Any]:
    normalize = read.flag("normalize", normalizes)
    return {"weights": read.weights(), "scale": read.one("lambda", 1.0), "normalize": normalize}


def _dare(read: Read) -> dict[str, Any]:
    drop = read.density(lambda density: 1 - density)
    return {"drop": drop, "rescale": read.flag("rescale", True), "rescale_by": "norm"}


def _della(read: Read, normalizes: bool) -> dict[str, Any]:
    pruning = {"density": read.density(), "epsilon": read.each("epsilon", 0.15)}
    return {**_sum(read, normalizes), **pruning, "rescale": read.flag("rescale", True)}


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _conditions(value: Any) -> Any:
    """A single condition as a list of one."""
    return [value] if isinstance(value, Mapping) else value


def _setting(name: str, value: Any, change: Callable[[float], float]) -> Setting:
    return check_setting(value, lambda given: change(number(name, given)), name)


def number(name: str, value: Any) -> float:
    """A number, which YAML reads as text if it is written like 1e-3."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        return float(value)
    except ValueError:
        raise CoramError(f"{name} must be a number, found {value!r}") from None


def truth(values: Values, key: str, default: bool) -> bool:
    """Return a value that must be true or false; raise for anything else."""
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise CoramError(f"{key} must be true or false, found {value!r}")
    return value
