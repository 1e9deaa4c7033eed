"""`coram-hf methods`."""

from __future__ import annotations

from typing import Annotated

import typer

from coram_hf.cli.shared import complete_method


def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method; by default all.", autocompletion=complete_method)
    ] = None,
) -> None:
    """List the merge methods with formulas, or one with parameters."""
    from coram_hf.cli.summary import conclude
    from coram_hf.methods.registry import find_method, method_names
    from coram_hf.report.tables import Table

    entries = [find_method(method) for method in ((name,) if name else method_names())]
    if name:
        (entry,) = entries
        rows = [[each.name, repr(each.default), each.summary] for each in entry.options.values()]
        table = Table(f"{entry.name}: {entry.formula}", ("parameter", "default", "meaning"), rows)
    else:
        rows = [[entry.name, entry.formula] for entry in entries]
        table = Table("merge methods; add a name for its parameters", ("method", "formula"), rows)
    data = {
        entry.name: {
            "formula": entry.formula,
            "parameters": {
                each.name: {"default": each.default, "help": each.summary} for each in entry.options.values()
            },
        }
        for entry in entries
    }
    conclude(table, data)
