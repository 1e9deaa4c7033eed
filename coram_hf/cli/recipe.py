"""Recipes: a whole merge in one YAML file, in our form or in mergekit's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from coram_hf.config import CoramConfig, check_names
from coram_hf.errors import CoramError

if TYPE_CHECKING:
    from coram_hf.base_merger import Merger

CONFIG_FIELDS = tuple(f.name for f in fields(CoramConfig))
OPTIONS = ("vocabulary", "dtype", "device", "trust_remote_code", "allow_pickle")
OWN_KEYS = ("base", "experts", "method", "line", "parameters")
MERGEKIT_KEYS = (
    "base_model",
    "models",
    "merge_method",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
)
MERGEKIT_NORMALIZES = {"linear": True, "task_arithmetic": False, "ties": True, "dare_ties": False}
"""The methods that are read from mergekit's form, and its default for `normalize`."""


@dataclass(frozen=True)
class Recipe:
    """What to merge and how: the sources, the method, its parameters, and the options of the merge.

    parameters: for `coram` a `line` and fields of CoramConfig, else those of the baseline; `space: oft`
        merges the generators of OFT adapters by `orthomerge`.
    """

    base: str
    experts: list[str] | dict[str, str]
    method: str = "coram"
    parameters: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def merger(self, *, progress: bool = True) -> Merger:
        """The merger of this recipe, with all sources opened and checked."""
        from coram_hf.baseline_merger import BaselineMerger
        from coram_hf.merger import CoramMerger
        from coram_hf.oft_merger import OftMerger

        options: Any = {**self.options, "progress": progress}
        if self.method == "orthomerge" and "space" in self.parameters:
            check_names([self.parameters["space"]], ("oft",), "space of orthomerge")
            check_names(self.parameters, ("space", "weights"), "parameter of orthomerge on OFT")
            return OftMerger(self.base, self.experts, weights=self.parameters.get("weights"), **options)
        if self.method != "coram":
            return BaselineMerger(self.base, self.experts, self.method, **self.parameters, **options)
        return CoramMerger(self.base, self.experts, self.config(), **options)

    def config(self) -> CoramConfig:
        """The CoramConfig of a recipe for CORAM."""
        check_names(self.parameters, ("line", *CONFIG_FIELDS), "CoramConfig option")
        given = {key: value for key, value in self.parameters.items() if key != "line"}
        if "line" not in self.parameters:
            return CoramConfig.from_dict(given)
        return CoramConfig.from_line(self.parameters["line"], **given)


class UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} is given twice")
        return super().construct_mapping(node, deep)


def read_recipe(path: Path) -> Recipe:
    """A recipe from a YAML file; unknown keys are errors with a suggestion."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise CoramError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise CoramError(f"{path} is not a mapping; see the README for the two forms of a recipe")
    try:
        theirs = "merge_method" in content or "base_model" in content
        return _from_mergekit(content) if theirs else _own(content)
    except ValueError as error:
        raise CoramError(f"{path}: {error}") from error


def _own(content: Mapping[str, Any]) -> Recipe:
    check_names(content, (*OWN_KEYS, *CONFIG_FIELDS, *OPTIONS), "key")
    _require(content, "base", str)
    _require(content, "experts", list | dict)
    others = {
        k: v for k, v in content.items() if k not in ("base", "experts", "method", "parameters", *OPTIONS)
    }
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise CoramError(f"parameters must be a mapping, found {parameters!r}")
    if not isinstance(content.get("method", "coram"), str):
        raise CoramError(f"method must be a name, found {content['method']!r}")
    for key in ("trust_remote_code", "allow_pickle"):
        _truth(content, key, False)
    return Recipe(
        content["base"],
        _sources(content["experts"]),
        content.get("method", "coram"),
        {**parameters, **others},
        {key: content[key] for key in OPTIONS if key in content},
    )


def _from_mergekit(content: Mapping[str, Any]) -> Recipe:
    """mergekit's form, with its defaults, for the methods that both have, and for `coram`."""
    check_names(content, MERGEKIT_KEYS, "key")
    _require(content, "merge_method", str)
    _require(content, "models", list)
    method = content["merge_method"]
    check_names([method], ("coram", *MERGEKIT_NORMALIZES), "merge_method")
    shared = _values(content.get("parameters") or {}, "parameters")
    models = [_model(entry) for entry in content["models"]]
    if not models:
        raise CoramError("models names no expert")
    base = content.get("base_model") or (models[0][0] if method == "linear" else None)
    if not isinstance(base, str):
        raise CoramError(f"base_model must be the name of a model, found {base!r}")
    if method != "linear":
        models = [(model, values) for model, values in models if model != base]
    own = [values for _, values in models]
    if method == "coram":
        parameters = dict(shared)
        if any(own):
            parameters["weights"] = [values.get("weight", 1.0) for values in own]
            _only(own, ("weight",))
    else:
        parameters = _euclidean(method, shared, own)
    return Recipe(base, [model for model, _ in models], method, parameters, _mergekit_options(content))


def _euclidean(method: str, shared: dict[str, Any], own: list[dict[str, Any]]) -> dict[str, Any]:
    """Our parameters for mergekit's `weight`, `density`, `lambda` and `normalize`."""
    named = ("weight", "density") if method in ("ties", "dare_ties") else ("weight",)
    check_names(shared, (*named, "lambda", "normalize", "int8_mask", "rescale"), "parameter")
    _only(own, named)
    merged = [{**shared, **values} for values in own]
    weights = [_number(values, "weight") for values in merged]
    if not weights:
        raise CoramError("models names no expert")
    normalize = _truth(shared, "normalize", MERGEKIT_NORMALIZES[method])
    strength = _number(shared, "lambda")
    if method == "linear":
        return {"weights": weights, "normalize": normalize}
    scale = strength if normalize else strength * sum(weights) / len(weights)
    if method == "task_arithmetic":
        return {"weights": weights, "scale": scale / len(weights) if normalize else scale}
    densities = {_number(values, "density") for values in merged}
    if len(densities) != 1:
        raise CoramError(f"density must be the same for all models, found {sorted(densities)}")
    parameters = {"weights": weights, "scale": scale, "combine": "mean" if normalize else "sum"}
    density = densities.pop()
    if method == "ties":
        return {**parameters, "density": density}
    return {**parameters, "drop": 1 - density, "rescale": _truth(shared, "rescale", True)}


def _mergekit_options(content: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    dtype = content.get("out_dtype") or content.get("dtype")
    if dtype is not None:
        options["dtype"] = dtype
    tokenizer = content.get("tokenizer_source")
    if tokenizer is not None:
        if tokenizer not in ("base", "union"):
            raise CoramError(f"tokenizer_source must be 'base' or 'union', found {tokenizer!r}")
        options["vocabulary"] = tokenizer
    return options


def _model(entry: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, str):
        entry = {"model": entry}
    if not isinstance(entry, dict):
        raise CoramError(f"models: each must have a key 'model', found {entry!r}")
    check_names(entry, ("model", "parameters"), "key of a model")
    _require(entry, "model", str)
    return entry["model"], _values(entry.get("parameters") or {}, entry["model"])


def _values(parameters: Any, where: str) -> dict[str, Any]:
    """Parameters that hold for all layers; mergekit's gradients and filters are not read."""
    if not isinstance(parameters, dict):
        raise CoramError(f"{where}: parameters must be a mapping, found {parameters!r}")
    for key, value in parameters.items():
        if isinstance(value, list) and key not in CONFIG_FIELDS:
            raise CoramError(f"{where}: {key} differs by layer, which is not supported; give one number")
    return parameters


def _number(values: Mapping[str, Any], key: str) -> float:
    value = values.get(key, 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CoramError(f"{key} must be a number, found {value!r}")
    return float(value)


def _truth(values: Mapping[str, Any], key: str, default: bool) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise CoramError(f"{key} must be true or false, found {value!r}")
    return value


def _only(own: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    for values in own:
        check_names(values, names, "parameter of a model")


def _sources(experts: Any) -> list[str] | dict[str, str]:
    values = experts.values() if isinstance(experts, dict) else experts
    if not values or not all(isinstance(value, str) for value in values):
        raise CoramError(f"experts must be sources, as a list or by name, found {experts!r}")
    return {str(k): v for k, v in experts.items()} if isinstance(experts, dict) else list(experts)


def _require(content: Mapping[str, Any], key: str, kind: Any) -> None:
    if not isinstance(content.get(key), kind):
        raise CoramError(f"{key} is missing or not as it should be, found {content.get(key)!r}")
