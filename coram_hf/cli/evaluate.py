"""`coram-hf eval`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from coram_hf.cli.shared import Limit, Tasks, split_tasks
from coram_hf.errors import CoramError
from coram_hf.report.tables import Table

OptionalTasks = Annotated[list[str] | None, get_args(Tasks)[1]]
Generate = Annotated[
    Path | None,
    typer.Option(
        help="A .jsonl file of prompts: prints how healthy the answers are (foreign script, length, empty, "
        "repeating)."
    ),
]


def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a model, merged or not.")],
    tasks: OptionalTasks = None,
    generate: Generate = None,
    limit: Limit = None,
    device: Annotated[str | None, typer.Option(help="Device of the model: cpu, cuda, mps or auto.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run custom code of the model.")] = False,
    write: Annotated[
        bool | None,
        typer.Option("--write/--no-write", help="Write the results; by default only without --limit."),
    ] = None,
) -> None:
    """Score a model on tasks, and keep the results in its card.

    They are also in eval_results.json. Results of the same tasks are replaced, others are kept.
    """
    from coram_hf.cli.summary import conclude, facts
    from coram_hf.evaluation.folder import evaluate_folder

    if not tasks and generate is None:
        raise CoramError("nothing to evaluate; pass --tasks, or --generate with a file of prompts")
    tables: list[Table] = []
    data: dict[str, Any] = {"model": str(folder)}
    if generate is not None:
        from coram_hf.evaluation.health import generate_health

        found = generate_health(
            folder, generate, limit=limit, device=device, trust_remote_code=trust_remote_code
        )
        health = found.to_dict()
        shown = {name.replace("_", " "): _shown(value) for name, value in health.items()}
        tables.append(facts(f"{folder}: {generate}", shown))
        data["health"] = health
    if not tasks:
        conclude(tables, data)
        return
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
    tables.append(Table(f"{folder}: {where}", header, rows))
    data |= {"written": writes, "results": [asdict(result) for result in results]}
    conclude(tables, data)


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4g}"
