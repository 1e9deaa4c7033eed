"""The command line. Commands import what they need when they run, so that `--help` is fast."""

from __future__ import annotations

import sys

import typer

from coram_hf.cli.compare import compare
from coram_hf.cli.demo import demo
from coram_hf.cli.evaluate import evaluate
from coram_hf.cli.merge import inspect, merge
from coram_hf.cli.methods import methods
from coram_hf.cli.push import push
from coram_hf.cli.report import report
from coram_hf.cli.sweep import sweep
from coram_hf.errors import CoramError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)
for command in (inspect, merge, sweep, compare, methods, push, demo):
    app.command()(command)
app.command("eval")(evaluate)
app.add_typer(report, name="report")


def main() -> None:
    """Run the command line: exit 0 on success, 2 on bad input with one clear line on stderr."""
    try:
        app()
    except (CoramError, OSError) as error:
        print(f"coram-hf: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
