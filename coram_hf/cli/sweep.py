"""`coram-hf sweep`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from coram_hf.cli.shared import (
    Baselines,
    Limit,
    Lines,
    MaybeTasks,
    NoBaselines,
    Scores,
    Seeds,
    SuiteFile,
    chosen_baselines,
    read_lines,
    split_seeds,
    split_tasks,
    with_shared_options,
)
from coram_hf.cli.summary import conclude_measured
from coram_hf.errors import CoramError
from coram_hf.methods.registry import usual_names

Range = Annotated[
    str | None, typer.Option("--lambda", help="start:stop:step, or numbers separated by commas.")
]
Grids = Annotated[
    list[str] | None,
    typer.Option(help="Score variants of the line, too: conflict, spread, residual, branch, height or all."),
]
Heights = Annotated[list[int] | None, typer.Option(help="Rows per slice, h; may be repeated.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the table, figure and numbers.")]


@partial(with_shared_options, without=("method", "parameter"))
def sweep(
    given: dict[str, Any],
    output: Output,
    lam: Range = None,
    grid: Grids = None,
    tasks: MaybeTasks = None,
    suite: SuiteFile = None,
    scores: Scores = None,
    seeds: Seeds = None,
    line: Lines = None,
    slice_height: Heights = None,
    baseline: Baselines = None,
    no_baselines: NoBaselines = False,
    limit: Limit = None,
) -> None:
    """Score a merge over lambda, beside the rule and baselines.

    Every line is merged once. With --grid, variants of the first line are scored at the rule's lambda, and
    --lambda sweeps the given lines only. An interrupted sweep resumes when the same command is run again.
    """
    from coram_hf.evaluation.ablation import run_ablation
    from coram_hf.evaluation.bench import read_baselines
    from coram_hf.evaluation.sweep import run_sweep

    recipe, configs, own = read_lines(given, line, slice_height)
    if lam is None and not grid:
        raise CoramError(
            "name the lambdas to score, as in --lambda 1:3:0.25, or a grid of variants, as in --grid all"
        )
    run: Any = partial(run_ablation, grids=grid) if grid else run_sweep
    try:
        found = run(
            recipe.base,
            recipe.experts,
            configs,
            lambdas=lam or (),
            tasks=split_tasks(tasks or ()),
            suite=suite,
            scores=scores,
            seeds=split_seeds(seeds),
            output=output,
            baselines=read_baselines(chosen_baselines(baseline, no_baselines, usual_names())) | own,
            limit=limit,
            **recipe.options,
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    conclude_measured("Ablation" if grid else "Sweep", found, {**found.to_dict(), "cost": found.cost}, output)
