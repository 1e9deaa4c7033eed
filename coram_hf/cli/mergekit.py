"""mergekit's YAML files, with its defaults, for the methods that both packages have and for `coram`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coram_hf.config import CoramConfig, check_names, options_of
from coram_hf.errors import CoramError
from coram_hf.methods.registry import find_method, method_names

KEYS = (
    "base_model",
    "models",
    "merge_method",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
)


def is_mergekit(content: Mapping[str, Any]) -> bool:
    """Whether a mapping is in mergekit's form."""
    return "merge_method" in content or "base_model" in content


def read_mergekit(content: Mapping[str, Any]) -> tuple[str, list[str], str, dict[str, Any], dict[str, Any]]:
    """Base, experts, method, its parameters, and the options of the merge."""
    check_names(content, KEYS, "key")
    require(content, "merge_method", str)
    require(content, "models", list)
    method = content["merge_method"]
    readable = [name for name in method_names() if find_method(name).from_mergekit is not None]
    check_names([method], readable, "merge_method")
    shared = _values(content.get("parameters") or {}, "parameters")
    models = [_model(entry) for entry in content["models"]]
    if not models:
        raise CoramError("models names no expert; list at least one")
    entry = find_method(method)
    base = content.get("base_model") or (models[0][0] if entry.baseless else None)
    if not isinstance(base, str):
        raise CoramError(f"base_model must be the name of a model, found {base!r}")
    if not entry.baseless:
        models = [(model, values) for model, values in models if model != base]
    assert entry.from_mergekit is not None
    parameters = entry.from_mergekit(shared, [values for _, values in models])
    return base, [model for model, _ in models], method, parameters, _options(content)


def _options(content: Mapping[str, Any]) -> dict[str, Any]:
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
    require(entry, "model", str)
    return entry["model"], _values(entry.get("parameters") or {}, entry["model"])


def _values(parameters: Any, where: str) -> dict[str, Any]:
    """Parameters, which must hold for all layers: mergekit's gradients and filters are refused."""
    if not isinstance(parameters, dict):
        raise CoramError(f"{where}: parameters must be a mapping, found {parameters!r}")
    for key, value in parameters.items():
        if isinstance(value, list) and key not in options_of(CoramConfig):
            raise CoramError(f"{where}: {key} differs by layer, which is not supported; pass one number")
    return parameters


def require(content: Mapping[str, Any], key: str, kind: type | Any) -> None:
    """Raise unless a key is present with a value of its type."""
    if not isinstance(content.get(key), kind):
        expected = "text" if kind is str else "a list" if kind is list else "a list or a mapping"
        raise CoramError(f"{key} must be {expected}, found {content.get(key)!r}")
