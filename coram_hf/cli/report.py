"""`coram-hf report`: the page of all diagnostics, and each of them by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coram_hf.cli.shared import read_given, with_shared_options
from coram_hf.errors import CoramError

PAGE = "page"
SECTIONS = {
    "dispersion": "Update sizes r_i by expert and layer, D, and where it stands among the paper's bases.",
    "threshold": "kappa and lambda by the rule, for thresholds D_0 from 4 to 12.",
    "contraction": "c_RMS beside sqrt(N), by matrix, and the other coefficients that need no data.",
    "branches": "Size and direction of the update that every subset of the factors makes.",
    "audit": "Errors of the rotation logarithm, and condition numbers of the slices.",
    "ownership": "Shares of rows by expert, and pairwise cosine and sign agreement.",
    "conflict": "Shares of columns on which experts work against the mean update.",
    "retention": "How much of the experts' update merged models keep, by group of modules.",
}
Output = Annotated[Path, typer.Option("--output", "-o", help="File of the page.")]
Json = Annotated[Path | None, typer.Option("--json", help="File for the numbers.")]
Figures = Annotated[Path | None, typer.Option(help="Folder for the figures as PNG, for a model card.")]
Merged = Annotated[
    list[str] | None,
    typer.Option(help="Merged models, by any method, each [name=]source, up to the next option."),
]


class DefaultGroup(TyperGroup):
    """A group whose first word may be left out: `report BASE EXPERT...` is `report page BASE EXPERT...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] != "--help" and args[0] not in self.commands:
            args = [PAGE, *args]
        return super().parse_args(ctx, _repeat_merged(args))


def _repeat_merged(args: list[str]) -> list[str]:
    """`--merged A B` as `--merged A --merged B`: all that follows up to the next option."""
    repeated: list[str] = []
    following = False
    for arg in args:
        if following and not arg.startswith("-") and repeated[-1] != "--merged":
            repeated.append("--merged")
        following = arg == "--merged" or arg.startswith("--merged=") or (following and arg[:1] != "-")
        repeated.append(arg)
    return repeated


report = typer.Typer(
    cls=DefaultGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    subcommand_metavar="[DIAGNOSTIC] BASE EXPERT... [OPTIONS]",
    help="""Look at a merge before or after it is made.

    `coram-hf report BASE EXPERT... -o report.html` writes one page with all diagnostics;
    `coram-hf report audit BASE EXPERT...` prints one of them. All take the options of `merge`, which say what
    merge they are about. A folder that is called like a diagnostic is written ./audit.
    """,
)


@report.command(PAGE)
@with_shared_options
def page(
    given: dict[str, Any],
    output: Output = Path("report.html"),
    merged: Merged = None,
    json: Json = None,
    figures: Figures = None,
) -> None:
    """All diagnostics as one page that needs no network (also without the word `page`)."""
    _check_files(output, json, folder=figures)
    numbers = _diagnose(given, merged, json)
    from coram_hf.outputs.files import write_whole
    from coram_hf.report.diagnostic_figures import draw_figures
    from coram_hf.report.page import render_page

    write_whole(output, render_page(numbers))
    if figures is not None:
        draw_figures(numbers, figures)
    print(f"wrote {output}")


@report.command(help=SECTIONS["retention"])
@with_shared_options
def retention(given: dict[str, Any], merged: Merged = None, json: Json = None) -> None:
    _print_section("retention", given, merged, json)


def _section(name: str) -> Callable[..., None]:
    def command(given: dict[str, Any], json: Json = None) -> None:
        _print_section(name, given, None, json)

    return with_shared_options(command)


for _name in SECTIONS:
    if _name != "retention":
        report.command(_name, help=SECTIONS[_name])(_section(_name))


def _print_section(name: str, given: dict[str, Any], merged: list[str] | None, json: Path | None) -> None:
    _check_files(json)
    numbers = _diagnose(given, merged, json, name)
    from coram_hf.report.sheets import print_sheets, sheets

    print_sheets(sheets(numbers, name))


def _diagnose(
    given: dict[str, Any], merged: list[str] | None, json: Path | None, only: str | None = None
) -> dict[str, Any]:
    from coram_hf.report.diagnostics import diagnose, write_json

    recipe = read_given(given)
    without = f"the diagnostics are those of CORAM; merge by {recipe.method} first, and pass it as --merged"
    options: Any = recipe.options
    numbers = diagnose(
        recipe.base,
        recipe.experts,
        recipe.config(without),
        merged=merged or (),
        only=None if only is None else [only],
        **options,
    )
    if json is not None:
        write_json(numbers, json)
    return numbers


def _check_files(*files: Path | None, folder: Path | None = None) -> None:
    """Refuse what cannot be written before anything is read."""
    named = [path.resolve() for path in (*files, folder) if path is not None]
    if len(set(named)) < len(named):
        raise CoramError(f"{named[0]} is named for two outputs; give each a place of its own")
    for path in filter(None, files):
        if path.is_dir():
            raise CoramError(f"{path} is a folder; name a file")
    for path in filter(None, (*files, folder)):
        above = path.parents if path in files else (path, *path.parents)
        parent = next(place for place in above if place.exists())
        if not parent.is_dir():
            raise CoramError(f"{path} cannot be written: {parent} is not a folder")
