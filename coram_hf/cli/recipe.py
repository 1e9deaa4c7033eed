"""Recipes: a whole merge in one YAML file, in our form or in mergekit's."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from coram_hf.cli.mergekit import is_mergekit, read_mergekit, require, result_name
from coram_hf.cli.starting import load_libraries
from coram_hf.config import CalibrationConfig, CoramConfig, Shared, check_names, options_of
from coram_hf.errors import CoramError
from coram_hf.inputs.locate import parse_source, split_adapter
from coram_hf.inputs.options import text_options
from coram_hf.methods.registry import DEFAULT, find_method

if TYPE_CHECKING:
    from coram_hf.calibration import Calibrate
    from coram_hf.merger import Merger

OWN_KEYS = ("base", "experts", "method", "line", "parameters", "calibrate")

ALMOST = 0.95
"""The share of the base's size that a merge takes at least."""


@dataclass(frozen=True)
class Recipe:
    """What to merge and how: the sources, the method, its parameters, and the options of the merge.

    parameters: for `coram` a `line` and fields of CoramConfig, else those of the baseline; `space: oft`
        merges the generators of OFT adapters by `orthomerge`.
    calibration: `calibrate`, a folder of prompts or files by expert, and fields of CalibrationConfig.
    layers: the number of layers that the models must have, where a recipe of mergekit says it.
    stages: merges to make first, by the names under which this one uses their results.
    """

    base: str
    experts: list[str] | dict[str, str]
    method: str = DEFAULT
    parameters: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    layers: int | None = None
    stages: tuple[tuple[str, Recipe], ...] = ()

    def merger(self, *, progress: bool = True) -> Merger:
        """The merger of this recipe, with all sources opened and checked."""
        load_libraries()
        from coram_hf.merger import Merger

        if self.stages:
            raise CoramError(
                "the recipe has several documents, the last of which merges the results of the others; "
                "run them with `coram-hf merge -o`"
            )
        choice = find_method(self.method).choose(self.parameters)
        options: Any = {"progress": progress, **self.options}
        merger = Merger.open(self.base, self.experts, choice, options, self._calibrate())
        found = sorted({count for _, count in merger.inputs.layers.values()})
        if self.layers is not None and self.layers not in found:
            raise CoramError(
                f"slices: layer_range ends at {self.layers}, but the models have {found[-1]} layers; a merge "
                "of some layers builds another architecture, which is not supported"
            )
        return merger

    def using(self, results: Mapping[str, str]) -> Recipe:
        """This recipe without its stages, with the folders of their results in place of their names."""
        experts = self.experts
        if isinstance(experts, dict):
            experts = {name: results.get(source, source) for name, source in experts.items()}
        else:
            experts = [results.get(source, source) for source in experts]
        return replace(self, base=results.get(self.base, self.base), experts=experts, stages=())

    def check_output(self, folder: Path, *, overwrite: bool, disk: bool = True) -> None:
        """Raise if it is clear before any model is opened that the merge cannot be written.

        `disk`: also if the disk is too small, as far as the base's size is known without downloading it. What
        an interrupted merge has left is checked when it is resumed.
        """
        from coram_hf.execution.workspace import Workspace, check_target
        from coram_hf.inputs.files import stored_bytes
        from coram_hf.inputs.hub_size import hub_bytes
        from coram_hf.inputs.options import output_dtype

        target = Path(os.path.abspath(folder.expanduser()))
        dtype, base = output_dtype(self.options.get("dtype")), Path(self.base).expanduser()
        if Workspace(target).folder.exists():
            return
        check_target(target, overwrite, 0, [base] if base.is_dir() else [])
        if disk and not base.is_file():
            size = None if dtype is None else dtype.itemsize
            known = stored_bytes(base, size) if base.is_dir() else hub_bytes(parse_source(self.base), size)
            check_target(target, overwrite, int(ALMOST * known), [])

    def _calibrate(self) -> Calibrate | None:
        """The prompts and options of the calibration, if there is one."""
        if not self.calibration:
            return None
        from coram_hf.calibration import Calibrate

        rest = {key: value for key, value in self.calibration.items() if key != "calibrate"}
        if "calibrate" not in self.calibration:
            raise CoramError(f"{next(iter(rest))} is an option of a calibration; add calibrate, its prompts")
        return Calibrate(self.calibration["calibrate"], CalibrationConfig.from_dict(rest))

    def config(self, without: str = "") -> CoramConfig:
        """The CoramConfig of a recipe; `without` is the message for a method that has none."""
        found = find_method(self.method).config(self.parameters)
        if found is None:
            raise CoramError(without or f"{self.method} has no CoramConfig")
        return found


class UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key {key!r} is given twice")
        return super().construct_mapping(node, deep)


def read_recipe(path: Path) -> Recipe:
    """A recipe from a YAML file; unknown keys are errors with a suggestion."""
    if not path.is_file():
        what = "is a folder; a recipe is a YAML file" if path.is_dir() else "does not exist"
        raise CoramError(f"the recipe {path} {what}")
    try:
        contents = list(yaml.load_all(path.read_text(encoding="utf-8"), UniqueKeys))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise CoramError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    documents = [content for content in contents if content is not None] or [None]
    if not all(isinstance(content, dict) for content in documents):
        raise CoramError(f"{path} is not a mapping; see the README for the two forms of a recipe")
    try:
        recipes = [_read(content) for content in documents]
        if len(recipes) == 1:
            return recipes[0]
        return in_stages([result_name(content) for content in documents], recipes)
    except CoramError as error:
        raise CoramError(f"{path}: {error}") from error


def _read(content: Mapping[str, Any]) -> Recipe:
    return Recipe(**read_mergekit(content)) if is_mergekit(content) else _own(content)


def _own(content: Mapping[str, Any]) -> Recipe:
    options = text_options()
    calibration = ("calibrate", *options_of(CalibrationConfig))
    method = dict.fromkeys([*OWN_KEYS, *options_of(CoramConfig), *options_of(Shared)])
    check_names(content, (*method, *options, *calibration[1:]), "key")
    require(content, "base", str)
    require(content, "experts", list | dict)
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise CoramError(f"parameters must be a mapping, found {parameters!r}")
    if not isinstance(content.get("method", DEFAULT), str):
        raise CoramError(f"method must be a name, found {content['method']!r}")
    for name, option in options.items():
        if option.kind is bool and name in content and not isinstance(content[name], bool):
            raise CoramError(f"{name} must be true or false, found {content[name]!r}")
    if not isinstance(content.get("calibrate", ""), str | dict):
        raise CoramError(f"calibrate must be a folder, or files by expert, found {content['calibrate']!r}")
    experts, bases = _sources(content["experts"])
    apart = ("base", "experts", "method", "parameters", *options, *calibration)
    return Recipe(
        content["base"],
        experts,
        content.get("method", DEFAULT),
        {**parameters, **{key: value for key, value in content.items() if key not in apart}},
        {key: content[key] for key in options if key in content} | _bases(content.get("bases"), bases),
        {key: content[key] for key in calibration if key in content},
    )


def _sources(experts: Any) -> tuple[list[str] | dict[str, str], dict[str, str]]:
    """The experts as a list or by name, and the bases of those that are given as {source, base}."""
    pairs = list(experts.items()) if isinstance(experts, dict) else [(None, expert) for expert in experts]
    found = [(name, value if isinstance(value, dict) else {"source": value}) for name, value in pairs]
    texts = [text for _, value in found for text in (value.get("source"), value.get("base", ""))]
    strange = {key for _, value in found for key in value} - {"source", "base"}
    if not found or strange or not all(isinstance(text, str) for text in texts):
        raise CoramError(
            f"experts must be sources or {{source, base}}, as a list or by name, found {experts!r}"
        )
    bases = {
        str(name) if name is not None else parse_source(split_adapter(value["source"])[0]).name: value["base"]
        for name, value in found
        if "base" in value
    }
    sources = [value["source"] for _, value in found]
    if not isinstance(experts, dict):
        return sources, bases
    return {str(name): source for name, source in zip(experts, sources, strict=True)}, bases


def _bases(given: Any, named: dict[str, str]) -> dict[str, Any]:
    """The option `bases`, joined from the recipe's key of that name and its experts."""
    if given is not None and not isinstance(given, dict):
        raise CoramError(f"bases must map names of experts to sources, found {given!r}")
    joined = {**(given or {}), **named}
    return {"bases": joined} if joined else {}


def in_stages(names: Sequence[str | None], recipes: Sequence[Recipe]) -> Recipe:
    """Several documents as one recipe: the last one, or the one without a name, after all that it needs."""
    unnamed = [i for i, name in enumerate(names) if name is None]
    if len(unnamed) > 1:
        raise CoramError(f"{len(unnamed)} documents have no name; name all but the last one")
    final = unnamed[0] if unnamed else len(recipes) - 1
    named = {str(names[i]): recipe for i, recipe in enumerate(recipes) if i != final}
    if len(named) != len(recipes) - 1:
        raise CoramError("two documents have the same name; give each its own")
    ordered: dict[str, Recipe] = {}
    while len(ordered) < len(named):
        ready = [n for n, r in named.items() if n not in ordered and _uses(r, named) <= ordered.keys()]
        if not ready:
            raise CoramError(
                f"the documents {sorted(named.keys() - ordered.keys())} need each other's results"
            )
        ordered |= {name: named[name] for name in ready}
    return replace(recipes[final], stages=tuple(ordered.items()))


def _uses(recipe: Recipe, names: Collection[str]) -> set[str]:
    """The other documents whose results a recipe merges."""
    experts = recipe.experts.values() if isinstance(recipe.experts, dict) else recipe.experts
    return {recipe.base, *experts} & set(names)
