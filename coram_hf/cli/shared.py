"""What the commands share: the options that describe a merge, and the recipe that they define."""

from __future__ import annotations

import inspect as introspection
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from coram_hf.cli.voice import VOLUME
from coram_hf.config import AdapterOptions, CalibrationConfig, CoramConfig, Declared, Shared, options_of
from coram_hf.errors import CoramError
from coram_hf.inputs.options import text_options
from coram_hf.methods.registry import DEFAULT, Preset, find_method, method_names

if TYPE_CHECKING:
    from coram_hf.cli.recipe import Recipe

SOURCE = "path, org/repo, org/repo@revision or org/repo:folder/inside@revision"
SOURCES = {
    "base": (str | None, typer.Argument(help=f"The model that all experts were fine-tuned from: {SOURCE}.")),
    "experts": (
        list[str] | None,
        typer.Argument(help=f"Checkpoints or adapters, each [name=]source: {SOURCE}."),
    ),
    "config": (Path | None, typer.Option("--config", help="A recipe in YAML, ours or mergekit's.")),
}


def complete_method(incomplete: str) -> list[str]:
    """The methods that begin with what was typed, for the shell."""
    return [name for name in method_names() if name.startswith(incomplete)]


METHOD = {
    "method": (
        str | None,
        typer.Option(
            help=f"{', '.join(method_names())}; `coram-hf methods` explains them.",
            autocompletion=complete_method,
        ),
    ),
    "parameter": (list[str] | None, "A parameter of a baseline as name=value; may be repeated."),
    "line": (str | None, "Its line: full (the default), recommended, or such as SS(ca+ave,variance).ties."),
}
SPELLED = {"lam": "--lambda"}
"""Options that have another name in Python."""


def _typer_option(option: Declared) -> tuple[Any, Any]:
    """The type and the help of an option on the command line."""
    names = [SPELLED[option.name]] if option.name in SPELLED else []
    commas = " Separated by commas." if TEXT_KINDS.get(option.name) is str else ""
    info = typer.Option(*names, help=option.summary + commas)
    if option.kind is bool:
        return bool, info
    return (TEXT_KINDS.get(option.name) or option.kind) | None, info


TEXT_KINDS: dict[str, Any] = {
    "weights": str,
    "factors": str,
    "residual_parameters": str,
    "target_modules": list[str],
    "keep": list[str],
    "bases": list[str],
}
"""How options that take several values are written: numbers separated by commas, names one by one."""

CONFIG = {
    name: _typer_option(option) for name, option in {**options_of(CoramConfig), **options_of(Shared)}.items()
}
OPTIONS = {name: _typer_option(option) for name, option in text_options().items()}
ADAPTER = {name: _typer_option(option) for name, option in options_of(AdapterOptions).items()}

CALIBRATION = {
    "calibrate": (
        Path | None,
        typer.Option(help="Folder of unlabelled prompts, a .txt or .jsonl per expert, to calibrate on."),
    ),
    **{name: _typer_option(option) for name, option in options_of(CalibrationConfig).items()},
}

_TASKS = typer.Option(
    help="A .jsonl file, a dataset (hf://datasets/org/name?split=test&prompt=question&target=answer, or "
    "a folder or file with such options), or an lm-eval task; may be repeated, or a,b without options."
)
Tasks = Annotated[list[str], _TASKS]
MaybeTasks = Annotated[list[str] | None, _TASKS]
SuiteFile = Annotated[
    Path | None, typer.Option(help="A suite in YAML, with domains and formulas, in place of tasks.")
]
Scores = Annotated[
    Path | None, typer.Option(help="JSON with scores of other harnesses, by row and task, for the suite.")
]
Seeds = Annotated[
    str | None, typer.Option(help="Seeds separated by commas, under which sampled answers are repeated.")
]
Limit = Annotated[int | None, typer.Option(help="Largest number of questions per task.")]
Lines = Annotated[
    list[str] | None,
    typer.Option(help="A configuration by its line, such as lr.ties; may be repeated."),
]
Baselines = Annotated[
    list[str] | None,
    typer.Option(
        help="A method or preset to compare with; by default the paper's rivals and newer ones.",
        autocompletion=complete_method,
    ),
]
NoBaselines = Annotated[bool, typer.Option("--no-baselines", help="Compare with none.")]


def with_shared_options(
    command: Callable[..., None],
    without: Collection[str] = (),
    more: Mapping[str, tuple[Any, Any]] | None = None,
) -> Callable[..., None]:
    """Add the options that describe a merge before a command's own; it receives them as `given`.

    A command's own option replaces the shared one of the same name; those in `without` are left out, those in
    `more` added.
    """
    own = list(introspection.signature(command).parameters.values())[1:]
    left_out = {*without, *(parameter.name for parameter in own)}
    shared = []
    for name, (kind, info) in {**SOURCES, **METHOD, **CONFIG, **OPTIONS, **(more or {})}.items():
        if name in left_out:
            continue
        info = typer.Option(help=info) if isinstance(info, str) else info
        default = False if kind is bool else None
        shared.append(
            introspection.Parameter(
                name, introspection.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
            )
        )

    def wrapped(**everything: Any) -> None:
        given = dict.fromkeys(left_out)
        given |= {parameter.name: everything.pop(parameter.name) for parameter in shared}
        command(given, **everything)

    hints = get_type_hints(command, include_extras=True)
    keyword = introspection.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword, annotation=hints[p.name]) for p in own]
    signature = introspection.Signature([*shared, *parameters])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


def read_given(given: dict[str, Any]) -> Recipe:
    """The recipe of the --config file, overridden by the options of the command line."""
    return _overridden(_recipe_file(given), given)


def _recipe_file(given: dict[str, Any]) -> Recipe:
    """The recipe of the --config file; an empty one without."""
    from coram_hf.cli.recipe import Recipe, read_recipe

    return read_recipe(given["config"]) if given["config"] else Recipe("", [])


def _overridden(recipe: Recipe, given: dict[str, Any]) -> Recipe:
    """A recipe, with what the command line says in place of what it says itself."""
    base, experts = given["base"] or recipe.base, given["experts"] or recipe.experts
    if not base or not experts:
        raise CoramError("name the base and at least one expert, or pass a recipe with --config")
    named = ["line", *CONFIG]
    parameters = {key: given[key] for key in named if given[key] is not None and given[key] != []}
    if "weights" in parameters:
        parameters["weights"] = _weights(parameters["weights"])
    for name in ("target_modules", "keep"):
        if len(parameters.get(name, ())) == 1:
            parameters[name] = parameters[name][0]
    parameters |= dict(_parameter(text) for text in given["parameter"] or ())
    options = {key: given[key] for key in OPTIONS if given[key]} | {"progress": not VOLUME.get().quiet}
    if "bases" in options:
        options["bases"] = recipe.options.get("bases", {}) | dict(map(_own_base, options["bases"]))
    calibration = {key: given[key] for key in CALIBRATION if given.get(key)}
    return replace(
        recipe,
        base=base,
        experts=experts,
        method=given["method"] or recipe.method,
        parameters={**recipe.parameters, **parameters},
        options={**recipe.options, **options},
        calibration={**recipe.calibration, **calibration},
    )


def read_lines(
    given: dict[str, Any], lines: Sequence[str] | None, heights: Sequence[int] | None = None
) -> tuple[Recipe, list[CoramConfig], dict[str, Preset]]:
    """The recipe, a configuration for every line at every slice height, and the recipe's baseline if any.

    A recipe of a baseline is one more row; the lines are then those of the command line, or `full`.
    """
    recipe, own = _recipe_file(given), {}
    if find_method(recipe.method).config({}) is None:
        own = {f"{recipe.method} of the recipe": Preset(recipe.method, recipe.parameters)}
        shared = {key: value for key, value in recipe.parameters.items() if key in options_of(Shared)}
        recipe = replace(recipe, method=DEFAULT, parameters=shared)
    recipe = _overridden(recipe, given)
    parameters = [{**recipe.parameters, "line": line} for line in lines or ()] or [recipe.parameters]
    if heights:
        parameters = [{**values, "slice_height": height} for values in parameters for height in heights]
    return recipe, [replace(recipe, parameters=values).config() for values in parameters], own


def split_tasks(tasks: Sequence[str]) -> list[str]:
    """The tasks as a list; they may be given one by one or, without options, separated by commas."""
    return [
        name.strip()
        for text in tasks
        for name in ([text] if os.path.exists(text) or "?" in text else text.split(","))
        if name.strip()
    ]


def split_seeds(text: str | None) -> list[int]:
    """The seeds of a list separated by commas."""
    try:
        return [int(part) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise CoramError(f"--seeds: {text!r} is not a list of whole numbers separated by commas") from None


def _parameter(text: str) -> tuple[str, Any]:
    import yaml

    name, mark, value = text.partition("=")
    if not mark:
        raise CoramError(f"--parameter: {text!r} is not name=value")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise CoramError(f"--parameter: the value of {text!r} cannot be read as YAML") from None


def _own_base(text: str) -> tuple[str, str]:
    name, mark, source = text.partition("=")
    if not mark or not name or not source:
        raise CoramError(f"--bases: expected name=source (an expert and its own base), found {text!r}")
    return name, source


def _weights(text: str) -> list[Any]:
    """Numbers separated by commas, or YAML where some of them differ by layer or module."""
    if "[" not in text and "{" not in text:
        return [_number("--weights", part) for part in text.split(",")]
    import yaml

    try:
        return list(yaml.safe_load(f"[{text}]"))
    except yaml.YAMLError:
        raise CoramError(f"--weights: {text!r} cannot be read as YAML") from None


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CoramError(f"{option}: {text!r} is not a number") from None


def chosen_baselines(named: list[str] | None, none: bool, every: Iterable[str]) -> tuple[str, ...]:
    """The requested baselines: those named, none, or all."""
    if named and none:
        raise CoramError("--baseline and --no-baselines are mutually exclusive; pass one of them")
    return () if none else tuple(named or every)
