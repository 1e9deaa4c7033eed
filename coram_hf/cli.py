"""The command line: `coram-hf inspect`, `coram-hf merge` and `coram-hf push`."""

from __future__ import annotations

import inspect as introspection
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from coram_hf.base_merger import Merger
    from coram_hf.recipe import Recipe

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

SOURCE = "path, org/repo, org/repo@revision or org/repo:folder/inside@revision"
SOURCES = {
    "base": (str | None, typer.Argument(help=f"The model that all experts were fine-tuned from: {SOURCE}.")),
    "experts": (
        list[str] | None,
        typer.Argument(help=f"Checkpoints or adapters, each [name=]source: {SOURCE}."),
    ),
    "config": (Path | None, typer.Option("--config", help="A recipe in YAML, ours or mergekit's.")),
}
METHOD = {
    "method": (
        str | None,
        "coram, or linear, task_arithmetic, ties, dare_ties, tsvm, orthomerge.",
    ),
    "parameter": (list[str] | None, "A parameter of a baseline as name=value; may be given several times."),
    "line": (str | None, "The configuration by its line, such as SS(ca+ave,variance).ties."),
    "slice_height": (int | None, "Rows per slice, h."),
    "branch": (str | None, "Merged factors: full, lr, q, s, v, qs or sv."),
    "conflict": (str | None, "Columns merged geometrically: nca, nca+ave, ca or ca+ave."),
    "spread": (str | None, "Priority of spread slicing: mean, energy, variance, owner or margin."),
    "residual": (str | None, "Merge of the other parameters: ta, ties or tsvm."),
    "kappa": (float | None, "Restoration strength; by default from the dispersion D."),
    "lam": (float | None, typer.Option("--lambda", help="Amplification; by default kappa * scale.")),
    "scale": (str | None, "Contraction scale: sqrt_n or c_rms."),
    "dispersion_threshold": (float | None, "D at which the rule for kappa changes."),
    "weights": (str | None, "One number an expert, separated by commas."),
    "balance": (str | None, "Rescale uneven experts first: damp or equal."),
    "target_modules": (list[str] | None, "Regular expression, all-linear, or several name suffixes."),
    "compute_dtype": (str | None, "Precision of the geometry: float64 or float32."),
}
OPTIONS = {
    "vocabulary": (str | None, "base, union or error."),
    "dtype": (str | None, "Dtype of the result; by default the base's."),
    "device": (str | None, "Where the geometry runs: cpu, cuda, cuda:1, mps or auto."),
    "trust_remote_code": (bool, "Run and copy custom code of the models."),
    "allow_pickle": (bool, "Read pickled checkpoints, tensors only."),
}


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, before its own options, those that describe a merge; they arrive as `given`."""
    own = list(introspection.signature(command).parameters.values())[1:]
    shared = []
    for name, (kind, info) in {**SOURCES, **METHOD, **OPTIONS}.items():
        info = typer.Option(help=info) if isinstance(info, str) else info
        default = False if kind is bool else None
        shared.append(
            introspection.Parameter(
                name, introspection.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
            )
        )

    def wrapped(**everything: Any) -> None:
        given = {parameter.name: everything.pop(parameter.name) for parameter in shared}
        command(given, **everything)

    hints = get_type_hints(command, include_extras=True)
    keyword = introspection.Parameter.KEYWORD_ONLY
    parameters = [p.replace(kind=keyword, annotation=hints[p.name]) for p in own]
    signature = introspection.Signature([*shared, *parameters])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    return wrapped


@app.command()
@with_shared_options
def inspect(given: dict[str, Any]) -> None:
    """Say what a merge would do: the parts of the model, D, kappa, lambda, warnings."""
    print(_merger(given).inspect())


Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the merged model.")]
Shards = Annotated[str, typer.Option(help="Largest size of one weight file.")]
Overwrite = Annotated[bool, typer.Option(help="Replace an existing output folder.")]
DryRun = Annotated[bool, typer.Option(help="Print the plan, and the memory and disk it takes, and stop.")]


@app.command()
@with_shared_options
def merge(
    given: dict[str, Any],
    output: Output,
    max_shard_size: Shards = "50GB",
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
) -> None:
    """Merge checkpoints and adapters into one model; the folder appears when it is whole.

    A merge that was stopped goes on where it was when the same command is run again.
    """
    merger = _merger(given)
    if dry_run:
        disk, memory = merger.requirements(max_shard_size)
        print(merger.inspect())
        print(f"  disk: {disk / 2**30:.2f} GB for {output}")
        print(f"  memory: about {memory / 2**30:.2f} GB")
        return
    try:
        report = merger.merge_to(output, overwrite=overwrite, max_shard_size=max_shard_size)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if int(os.environ.get("RANK", "0")) == 0:
        kappa = "" if report.kappa is None else f", kappa {report.kappa}, lambda {report.lam:.4g}"
        print(f"{report.line}: D {report.dispersion:.3g}{kappa}")
        print(f"merged {report.n_experts} experts into {output}")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="A folder that was merged before.")],
    repo: Annotated[str, typer.Argument(help="Where to: org/name.")],
    private: Annotated[bool | None, typer.Option(help="Whether a new repository is private.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    create_pr: Annotated[bool, typer.Option(help="Open a pull request.")] = False,
) -> None:
    """Push a merged folder to the Hub in one commit, once it is seen to be whole.

    The token is that of `hf auth login`, or HF_TOKEN. A push that was interrupted does not send again what
    has arrived.
    """
    from coram_hf.hub import push_folder

    address = push_folder(
        folder, repo, private=private, revision=revision, commit_message=message, create_pr=create_pr
    )
    print(f"pushed {folder} to {address}")


def _merger(given: dict[str, Any]) -> Merger:
    return _recipe(given).merger()


def _recipe(given: dict[str, Any]) -> Recipe:
    """The recipe of a file, with what the command line says in place of it."""
    from coram_hf.recipe import Recipe, read_recipe

    recipe = read_recipe(given["config"]) if given["config"] else Recipe("", [])
    base, experts = given["base"] or recipe.base, given["experts"] or recipe.experts
    if not base or not experts:
        raise ValueError("name the base and at least one expert, or a recipe with --config")
    named = [key for key in METHOD if key not in ("method", "parameter")]
    parameters = {key: given[key] for key in named if given[key] is not None and given[key] != []}
    if "weights" in parameters:
        parameters["weights"] = [_number("--weights", text) for text in parameters["weights"].split(",")]
    if len(parameters.get("target_modules", ())) == 1:
        parameters["target_modules"] = parameters["target_modules"][0]
    parameters |= dict(_parameter(text) for text in given["parameter"] or ())
    options = {key: given[key] for key in OPTIONS if given[key]}
    return Recipe(
        base,
        experts,
        given["method"] or recipe.method,
        {**recipe.parameters, **parameters},
        {**recipe.options, **options},
    )


def _parameter(text: str) -> tuple[str, Any]:
    import yaml

    name, mark, value = text.partition("=")
    if not mark:
        raise ValueError(f"--parameter: {text!r} is not name=value")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"--parameter: the value of {text!r} cannot be read") from None


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option}: {text!r} is not a number") from None


def main() -> None:
    """Run the command line: exit 0 on success, 2 on bad input with one clear line on stderr."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"coram-hf: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
