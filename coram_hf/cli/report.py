"""`coram-hf report`: a page of all diagnostics, or a single one in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coram_hf.cli.shared import read_given, with_shared_options
from coram_hf.cli.summary import conclude, facts, print_json
from coram_hf.cli.voice import VOLUME, audible
from coram_hf.errors import CoramError
from coram_hf.report.diagnostics.section import Section
from coram_hf.report.diagnostics.sections import SECTIONS
from coram_hf.report.tables import print_tables

PAGE = "page"
Output = Annotated[Path, typer.Option("--output", "-o", help="File for the page.")]
Json = Annotated[Path | None, typer.Option("--json", help="File for the numbers; - is stdout.")]
STDOUT = Path("-")
Figures = Annotated[Path | None, typer.Option(help="Folder for the figures as PNG, for a model card.")]
Merged = Annotated[
    list[str] | None,
    typer.Option(help="A merged model, by any method, as [name=]source; may be repeated."),
]


class DefaultGroup(TyperGroup):
    """A group whose first word may be left out: `report BASE EXPERT...` is `report page BASE EXPERT...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] != "--help" and args[0] not in self.commands:
            args = [PAGE, *args]
        return super().parse_args(ctx, args)


report = typer.Typer(
    cls=DefaultGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    subcommand_metavar="[DIAGNOSTIC] BASE EXPERT... [OPTIONS]",
    help="""Inspect a merge, before or after it is made.

    `coram-hf report BASE EXPERT... -o report.html` writes one page with all diagnostics;
    `coram-hf report audit BASE EXPERT...` prints one of them. All take the options of `merge`, which
    describe the merge in question. Write a folder that has the name of a diagnostic as ./audit.
    """,
)


@report.command(PAGE)
@audible
@with_shared_options
def page(
    given: dict[str, Any],
    output: Output = Path("report.html"),
    merged: Merged = None,
    json: Json = None,
    figures: Figures = None,
) -> None:
    """Write all diagnostics as one page that needs no network (the word `page` may be left out)."""
    _check_files(output, json, folder=figures)
    numbers = _diagnose(given, merged, json)
    from coram_hf.outputs.files import write_whole
    from coram_hf.report.diagnostic_figures import draw_figures
    from coram_hf.report.page import render_page
    from coram_hf.report.verdict import verdict

    write_whole(output, render_page(numbers))
    if figures is not None:
        draw_figures(numbers, figures)
    if not _for_a_program(json):
        found, written = numbers["dispersion"], {"page": output, "numbers": json, "figures": figures}
        rows = {"verdict": verdict(found), "dispersion D": found["D"], "lambda": found["lam"]}
        rows |= {name: path and str(path) for name, path in written.items()}
        conclude(facts(f"wrote {output}", rows), {})


def _command(section: Section) -> Callable[..., None]:
    """The command of one section; merged models are an option of those that are about them."""

    def alone(given: dict[str, Any], json: Json = None) -> None:
        _print_section(section, given, None, json)

    def beside_merged(given: dict[str, Any], merged: Merged = None, json: Json = None) -> None:
        _print_section(section, given, merged, json)

    return audible(with_shared_options(beside_merged if section.merged else alone))


for _section in SECTIONS.values():
    report.command(_section.name, help=_section.help)(_command(_section))


def _print_section(
    section: Section, given: dict[str, Any], merged: list[str] | None, json: Path | None
) -> None:
    _check_files(json)
    numbers = _diagnose(given, merged, json, section.name)
    if not _for_a_program(json):
        print_tables(section.tables(numbers))


def _for_a_program(json: Path | None) -> bool:
    """Whether the numbers go to stdout, in place of a table."""
    return json == STDOUT or VOLUME.get().json


def _diagnose(
    given: dict[str, Any], merged: list[str] | None, json: Path | None, only: str | None = None
) -> dict[str, Any]:
    from coram_hf.report.diagnostics import diagnose, write_json

    recipe = read_given(given)
    without = f"the diagnostics are those of CORAM; merge with {recipe.method} first, and pass it as --merged"
    options: Any = recipe.options
    config = recipe.config(without)
    numbers = diagnose(
        recipe.base,
        recipe.experts,
        config if recipe.parameters else None,
        merged=merged or (),
        only=None if only is None else [only],
        **options,
    )
    if _for_a_program(json):
        print_json(numbers)
    elif json is not None:
        write_json(numbers, json)
    return numbers


def _check_files(*files: Path | None, folder: Path | None = None) -> None:
    """Raise if an output cannot be written, before anything is read."""
    named = [path.resolve() for path in (*files, folder) if path is not None]
    if len(set(named)) < len(named):
        raise CoramError(f"{named[0]} is named for two outputs; give each its own path")
    for path in filter(None, files):
        if path.is_dir():
            raise CoramError(f"{path} is a folder; name a file")
    for path in filter(None, (*files, folder)):
        above = path.parents if path in files else (path, *path.parents)
        parent = next(place for place in above if place.exists())
        if not parent.is_dir():
            raise CoramError(f"{path} cannot be written: {parent} is not a folder")
