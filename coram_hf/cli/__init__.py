"""The command line. Commands import what they need when they run, so that `--help` is fast."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from coram_hf import __version__
from coram_hf.cli.analyse import analyse
from coram_hf.cli.assemble import assemble
from coram_hf.cli.compare import compare
from coram_hf.cli.demo import demo
from coram_hf.cli.doctor import doctor
from coram_hf.cli.evaluate import evaluate
from coram_hf.cli.merge import inspect, merge
from coram_hf.cli.methods import methods
from coram_hf.cli.push import push
from coram_hf.cli.report import report
from coram_hf.cli.studio import studio
from coram_hf.cli.sweep import sweep
from coram_hf.cli.voice import COLOURS, VOLUME, Json, Quiet, Verbose, Volume, audible, say
from coram_hf.errors import CoramError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (inspect, merge, assemble, sweep, compare, analyse, methods, push, demo, studio, doctor):
    app.command()(audible(command))
app.command("eval")(audible(evaluate))
app.add_typer(report, name="report")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"coram-hf {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
]


@app.callback()
def options(
    version: Version = False, quiet: Quiet = False, verbose: Verbose = False, json: Json = False
) -> None:
    """Merge fine-tuned transformers models."""
    VOLUME.set(Volume(quiet, verbose, json))


def main() -> None:
    """Run the command line: exit 0 on success, 2 on bad input with one clear line on stderr."""
    try:
        app()
    except (CoramError, OSError) as error:
        say(f"coram-hf: {' '.join(str(error).split())}", COLOURS[logging.ERROR])
        sys.exit(2)
