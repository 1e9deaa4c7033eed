"""`coram-hf eval`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coram_hf.cli.shared import Limit, Tasks, split_tasks
from coram_hf.report.tables import Table


def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a model, merged or not.")],
    tasks: Tasks,
    limit: Limit = None,
    device: Annotated[str | None, typer.Option(help="Device of the model: cpu, cuda, mps or auto.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run custom code of the model.")] = False,
    write: Annotated[
        bool | None,
        typer.Option("--write/--no-write", help="Write the results; by default only without --limit."),
    ] = None,
) -> None:
    """Score a model on tasks, and write the results to eval_results.json and its card.

    Results of the same tasks are replaced, others are kept.
    """
    from coram_hf.cli.summary import conclude
    from coram_hf.evaluation.folder import evaluate_folder

    writes = limit is None if write is None else write
    results = evaluate_folder(
        folder,
        split_tasks(tasks),
        limit=limit,
        device=device,
        trust_remote_code=trust_remote_code,
        write=writes,
    )
    rows = [
        (
            result.task,
            result.metric,
            f"{result.value:.4f}",
            None if result.interval is None else "{:.4f} to {:.4f}".format(*result.interval),
            result.questions,
        )
        for result in results
    ]
    if writes:
        where = f"written to {folder / 'eval_results.json'} and {folder / 'README.md'}"
    else:
        where = "not written; pass --write to write the scores"
    header = ("task", "metric", "value", "95% interval", "questions")
    data = {"model": str(folder), "written": writes, "results": [asdict(result) for result in results]}
    conclude(Table(f"{folder}: {where}", header, rows), data)
