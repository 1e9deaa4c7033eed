"""`coram-hf analyse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coram_hf.cli.summary import conclude_measured


def analyse(
    sweeps: Annotated[
        list[Path], typer.Argument(help="sweep.json files or their folders, or a grid of several suites.")
    ],
    threshold: Annotated[
        list[float] | None, typer.Option("--threshold", help="D_0 to try; may be repeated.")
    ] = None,
    line: Annotated[
        list[str] | None,
        typer.Option("--line", help="Lines to score at a held-out kappa, in order of preference."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for tables, numbers and figure.")
    ] = None,
) -> None:
    """Compare sweeps of several suites: kappa against D, and the rule.

    Held-out kappa, thresholds and components are shown as well. Suites stand beside the paper's bases. The
    file examples/paper/grid.json holds the paper's complete grid.
    """
    from coram_hf.evaluation.analyse import PREFERRED, THRESHOLDS
    from coram_hf.evaluation.analyse import analyse as run

    found = run(sweeps, thresholds=threshold or THRESHOLDS, lines=line or PREFERRED, output=output)
    conclude_measured("Analysis", found, found.to_dict(), output)
