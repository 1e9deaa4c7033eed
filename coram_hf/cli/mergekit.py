"""mergekit's YAML files, with its defaults, for the methods that both packages have and for `coram`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coram_hf.cli.mergekit_options import read_options
from coram_hf.config import check_names, with_fallback
from coram_hf.errors import CoramError
from coram_hf.methods.registry import find_method, method_names

KEYS = (
    "base_model", "models", "slices", "merge_method", "parameters", "dtype", "out_dtype", "tokenizer_source",
    "tokenizer", "chat_template", "name", "out_path",
)  # fmt: skip
ALIASES = {"breadcrumbs_ties": ("breadcrumbs", {"consensus": True})}
"""mergekit's methods that are parameters of one of ours."""

REFUSED = {
    "passthrough": "it stacks layers into another architecture; here a merge has the base's architecture",
    "moe": "it builds a mixture of experts, which is another architecture; use mergekit-moe",
    "multislerp": "use karcher, which averages on the same sphere, or nuslerp for two models",
    "nearswap": "use arcee_fusion or slerp, which also merge one model into another",
    "ram": "use sce, which also weighs experts by what sets them apart",
    "ramplus_tl": "use sce, which also weighs experts by what sets them apart",
}
"""Methods of mergekit that we do not have, with the reason or what to use instead."""


def is_mergekit(content: Mapping[str, Any]) -> bool:
    """Whether a mapping is in mergekit's form, including its files for mixtures."""
    return bool({"merge_method", "base_model", "slices", "experts_per_token"} & content.keys())


def result_name(content: Mapping[str, Any]) -> str | None:
    """The name by which other documents refer to the result of this one."""
    name = content.get("name") or content.get("out_path")
    return None if name is None else str(name)


class Model(NamedTuple):
    """One of the models of a recipe: its source, an adapter to add to it, and its parameters."""

    source: str
    adapter: str | None = None
    parameters: Mapping[str, Any] = {}

    def as_expert(self, base: str) -> str:
        """The source of this expert; an adapter of the base is an expert by itself."""
        if self.adapter is None:
            return self.source
        return self.adapter if self.source == base else f"{self.source}+{self.adapter}"


def read_mergekit(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Recipe from one document."""
    _refuse_mixtures(content)
    check_names(content, KEYS, "key")
    require(content, "merge_method", str)
    method, more = ALIASES.get(content["merge_method"], (content["merge_method"], {}))
    if method in REFUSED:
        raise CoramError(f"merge_method {method!r} is not supported: {REFUSED[method]}")
    readable = [name for name in method_names() if find_method(name).from_mergekit is not None]
    check_names([method], readable, "merge_method")
    entry = find_method(method)
    shared = _parameters(content.get("parameters"), "parameters")
    models, shared, layers = _models(content, shared)
    base = None if content.get("base_model") is None else _reference(content["base_model"])
    role = entry.mergekit_base
    if base is None and role == "required":
        raise CoramError(f"{method} needs a base_model; name the model that the others were fine-tuned from")
    if base is not None and base.adapter is not None:
        raise CoramError(f"base_model {content['base_model']!r} has an adapter; merge it into a folder first")
    origin = models[0].source if base is None else base.source
    if role == "member":
        if base is not None and all(model.source != base.source for model in models):
            models = [*models, base]
    else:
        models = [model for model in models if model.adapter or base is None or model.source != base.source]
    if base is not None:
        shared = {**shared, "base_model": origin}
    assert entry.from_mergekit is not None
    experts = _named([model.as_expert(origin) for model in models])
    return {
        "base": origin,
        "experts": experts,
        "method": method,
        "parameters": {**entry.from_mergekit(shared, [model.parameters for model in models]), **more},
        "options": read_options(content, origin, experts),
        "layers": layers,
    }


def _refuse_mixtures(content: Mapping[str, Any]) -> None:
    if "modules" in content:
        raise CoramError(
            "modules merges parts of a model in different ways, which is not supported; list models, and use "
            "filters for parameters that differ by module"
        )
    if "merge_method" not in content and {"experts", "experts_per_token", "gate_mode"} & content.keys():
        raise CoramError(f"a mixture of experts is not supported: {REFUSED['moe']}")


def _models(
    content: Mapping[str, Any], shared: Mapping[str, Any]
) -> tuple[list[Model], dict[str, Any], int | None]:
    """The models, the parameters that they share, and the number of layers that slices state, if any."""
    if "slices" not in content:
        require(content, "models", list)
        models, layers = [_model(entry) for entry in content["models"]], None
    else:
        if "models" in content:
            raise CoramError("models and slices are mutually exclusive; remove one of them")
        models, shared, layers = _slices(content, shared)
    if not models:
        raise CoramError("models lists no expert; add at least one model besides the base")
    return models, dict(shared), layers


def _slices(content: Mapping[str, Any], shared: Mapping[str, Any]) -> tuple[list[Model], dict[str, Any], int]:
    """The models of slices that together repeat all their layers; others build another architecture."""
    require(content, "slices", list)
    layers = 0
    parts: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
    for part in content["slices"]:
        if not isinstance(part, Mapping) or not isinstance(part.get("sources"), list) or not part["sources"]:
            raise CoramError(f"slices: each must have sources, found {part!r}")
        if part.get("base_model", content.get("base_model")) != content.get("base_model"):
            raise CoramError("slices: base_model differs from that of the recipe; name one base_model")
        listed = [source if isinstance(source, Mapping) else {} for source in part["sources"]]
        layers = _continued(layers, [source.get("layer_range") for source in listed])
        plain = [{k: v for k, v in source.items() if k != "layer_range"} for source in listed]
        parts.append((plain, _parameters(part.get("parameters"), "slices: parameters")))
    if not parts:
        raise CoramError("slices lists nothing; add a slice with all layers of every model")
    sources, over = parts[0]
    if any(part != parts[0] for part in parts):
        raise CoramError(
            "slices: models or parameters differ from slice to slice, which is not supported; list models, "
            "and use gradients or filters such as layers.3. for parameters that differ by layer"
        )
    shared = {**shared, **{key: with_fallback(value, shared.get(key)) for key, value in over.items()}}
    models = [_model(source) for source in sources]
    if len(parts) > 1 and any(map(_is_gradient, [*shared.values(), *_values(models)])):
        raise CoramError(
            "slices: a gradient starts again in every slice, which is not supported; merge one slice with "
            "all layers"
        )
    return models, shared, layers


def _continued(layers: int, ranges: Sequence[Any]) -> int:
    """The number of layers after one more slice; raises unless it continues where the last one ended."""
    first = ranges[0]
    pair = isinstance(first, list) and len(first) == 2 and all(isinstance(end, int) for end in first)
    if not pair or first[0] != layers or first[1] <= layers or any(other != first for other in ranges):
        raise CoramError(
            f"slices: layer_range must be [{layers}, end] for every model of this slice, found {ranges}; "
            "slices that do not repeat all layers in order stack or cut them into another architecture, "
            "which is not supported"
        )
    return int(first[1])


def _values(models: Sequence[Model]) -> list[Any]:
    return [value for model in models for value in model.parameters.values()]


def _is_gradient(setting: Any) -> bool:
    """Whether a parameter, or one of its filters, is a list of numbers over the layers."""
    if isinstance(setting, Mapping):
        return _is_gradient(setting.get("value"))
    if not isinstance(setting, list | tuple):
        return False
    return (
        any(map(_is_gradient, setting)) if any(isinstance(s, Mapping) for s in setting) else len(setting) > 1
    )


def _model(entry: Any) -> Model:
    if isinstance(entry, str):
        entry = {"model": entry}
    if not isinstance(entry, Mapping):
        raise CoramError(f"models: each must have a key 'model', found {entry!r}")
    check_names(entry, ("model", "lora", "parameters"), "key of a model")
    if not entry.get("model"):
        raise CoramError(f"models: each must have a key 'model', found {dict(entry)!r}")
    found = _reference(entry["model"])
    adapter = entry.get("lora") or found.adapter
    return Model(found.source, adapter, _parameters(entry.get("parameters"), found.source))


def _reference(value: Any) -> Model:
    """A model as text, `model[@revision][+adapter]`, or as mergekit's mapping of the same parts."""
    if isinstance(value, str) and value:
        source, _, adapter = (value, "", "") if Path(value).is_dir() else value.partition("+")
        return Model(source, adapter or None)
    if isinstance(value, Mapping) and set(value) <= {"model", "lora", "path", "revision"}:
        if "path" in value:
            revision = value.get("revision")
            return Model(f"{value['path']}@{revision}" if revision else str(value["path"]))
        if "model" in value:
            lora = value.get("lora")
            return Model(_reference(value["model"]).source, _reference(lora).source if lora else None)
    raise CoramError(f"a model must be given by its name, found {value!r}")


def _named(sources: Sequence[str]) -> dict[str, str]:
    """Experts by the names of their folders or repositories; by their whole sources if names repeat."""
    short = [_short(source) for source in sources]
    return {
        name if short.count(name) == 1 else source: source
        for name, source in zip(short, sources, strict=True)
    }


def _short(source: str) -> str:
    path = Path(source).expanduser()
    return path.name if path.is_dir() or source.startswith(("/", ".", "~")) else source.partition("@")[0]


def _parameters(parameters: Any, where: str) -> dict[str, Any]:
    if parameters is not None and not isinstance(parameters, Mapping):
        raise CoramError(f"{where}: parameters must be a mapping, found {parameters!r}")
    return dict(parameters or {})


def require(content: Mapping[str, Any], key: str, kind: type | Any) -> None:
    """Raise unless a key is present with a value of its type."""
    if not isinstance(content.get(key), kind):
        expected = "text" if kind is str else "a list" if kind is list else "a list or a mapping"
        raise CoramError(f"{key} must be {expected}, found {content.get(key)!r}")
