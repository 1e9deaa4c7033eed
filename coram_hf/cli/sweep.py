"""`coram-hf sweep`."""

from __future__ import annotations

import html
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from coram_hf.cli.shared import (
    Baselines,
    Limit,
    Lines,
    NoBaselines,
    Tasks,
    chosen_baselines,
    read_lines,
    split_tasks,
    with_shared_options,
)
from coram_hf.cli.summary import conclude_markdown
from coram_hf.methods.registry import usual_names

Range = Annotated[str, typer.Option("--lambda", help="start:stop:step, or numbers separated by commas.")]
Heights = Annotated[list[int] | None, typer.Option(help="Rows per slice, h; may be repeated.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the table, figure and numbers.")]


@partial(with_shared_options, without=("method", "parameter"))
def sweep(
    given: dict[str, Any],
    lam: Range,
    tasks: Tasks,
    output: Output,
    line: Lines = None,
    slice_height: Heights = None,
    baseline: Baselines = None,
    no_baselines: NoBaselines = False,
    limit: Limit = None,
) -> None:
    """Score a merge over lambda: the rule's lambda, the optimum, the gap between them, and the baselines.

    Every line is merged once. An interrupted sweep resumes when the same command is run again.
    """
    from coram_hf.evaluation.bench import read_baselines
    from coram_hf.evaluation.sweep import run_sweep

    recipe, configs, own = read_lines(given, line, slice_height)
    try:
        found = run_sweep(
            recipe.base,
            recipe.experts,
            configs,
            lambdas=lam,
            tasks=split_tasks(tasks),
            output=output,
            baselines=read_baselines(chosen_baselines(baseline, no_baselines, usual_names())) | own,
            limit=limit,
            **recipe.options,
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    conclude_markdown(html.unescape(str(found)), found.to_dict(), output)
