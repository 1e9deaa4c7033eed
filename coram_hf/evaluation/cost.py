"""What a sweep cost: the seconds of every merge and every point, and what the rule's lambda saves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coram_hf.evaluation.scores import Line
from coram_hf.outputs.files import write_whole
from coram_hf.report.tables import markdown as table

JSON, TABLE = "cost.json", "cost.md"


def cost_of(lines: Sequence[Line], references: float) -> dict[str, Any]:
    """Seconds by line and lambda, and of the references; points other than the rule's are what it saves.

    Seconds are those of the run that computed a value, which may be an earlier one. Those of a point include
    the assembly of its model, and after a resumed run its merge.
    """
    found = [
        {
            "line": line.name,
            "merging": line.merging,
            "points": [{"lam": point.lam, "seconds": point.seconds} for point in line.points],
            "evaluations_saved": len(line.points) - 1,
            "seconds_saved": sum(point.seconds for point in line.points if point is not line.rule),
        }
        for line in lines
    ]
    return {"lines": found, "references": references}


def cost_table(cost: dict[str, Any]) -> str:
    """The costs in Markdown."""
    header = ["line", "merging, s", "points", "mean s per point", "saved by the rule", "s saved"]
    rows = []
    for line in cost["lines"]:
        spent = [point["seconds"] for point in line["points"]]
        cells = [f"`{line['line']}`", f"{line['merging']:.2f}", str(len(spent))]
        cells += [f"{sum(spent) / len(spent):.2f}", str(line["evaluations_saved"])]
        rows.append([*cells, f"{line['seconds_saved']:.2f}"])
    points = [
        [f"`{line['line']}`", f"{point['lam']:.4g}", f"{point['seconds']:.2f}"]
        for line in cost["lines"]
        for point in line["points"]
    ]
    parts = [table(header, rows), f"The references took {cost['references']:.2f} s."]
    return "\n\n".join([*parts, table(["line", "lambda", "s"], points)]) + "\n"


def write_cost(cost: dict[str, Any], folder: Path) -> None:
    """Write the costs beside the results of a sweep, whose bytes they would change from run to run."""
    write_whole(folder / TABLE, cost_table(cost))
    write_whole(folder / JSON, json.dumps(cost, indent=1) + "\n")
