"""`coram-hf compare`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from coram_hf.cli.shared import (
    Baselines,
    Limit,
    Lines,
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

InDomain = Annotated[
    list[str] | None,
    typer.Option(
        "--in-domain", "--tasks", help="The experts' own tasks: .jsonl files, datasets or lm-eval tasks."
    ),
]
OutOfDomain = Annotated[list[str] | None, typer.Option(help="Tasks that no expert was trained for.")]
Range = Annotated[
    str | None,
    typer.Option(
        "--lambda", help="Candidates for the best lambda: start:stop:step; by default only the rule's."
    ),
]
Experts = Annotated[bool, typer.Option("--experts/--no-experts", help="Also score the experts.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for the table, the numbers, and a journal.")
]


@partial(with_shared_options, without=("method", "parameter"))
def compare(
    given: dict[str, Any],
    in_domain: InDomain = None,
    out_of_domain: OutOfDomain = None,
    line: Lines = None,
    suite: SuiteFile = None,
    scores: Scores = None,
    seeds: Seeds = None,
    lam: Range = None,
    baseline: Baselines = None,
    no_baselines: NoBaselines = False,
    score_experts: Experts = True,
    limit: Limit = None,
    output: Output = None,
) -> None:
    """Compare lines of CORAM with all baselines on one suite.

    The layout is that of the paper's main tables. A line is scored at the rule's lambda, with the best lambda
    beside it. With an output folder, an interrupted comparison resumes when the same command is run again.
    """
    from coram_hf.evaluation.bench import read_baselines
    from coram_hf.evaluation.compare import RIVALS, compare_methods

    recipe, configs, own = read_lines(given, line)
    try:
        found = compare_methods(
            recipe.base,
            recipe.experts,
            configs,
            tasks=split_tasks(in_domain or ()),
            out_of_domain=split_tasks(out_of_domain or ()),
            suite=suite,
            scores=scores,
            seeds=split_seeds(seeds),
            lambdas=lam or (),
            baselines=read_baselines(chosen_baselines(baseline, no_baselines, RIVALS)) | own,
            score_experts=score_experts,
            limit=limit,
            output=output,
            **recipe.options,
        )
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    conclude_measured("Comparison", found, found.to_dict(), output)
