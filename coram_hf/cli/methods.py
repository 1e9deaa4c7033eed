"""`coram-hf methods`."""

from __future__ import annotations

from typing import Annotated

import typer

from coram_hf.cli.shared import complete_method
from coram_hf.cli.voice import VOLUME


def methods(
    name: Annotated[
        str | None, typer.Argument(help="One method; by default all.", autocompletion=complete_method)
    ] = None,
) -> None:
    """List the merge methods, including those of other packages: formula, parameters, defaults."""
    from coram_hf.cli.summary import print_json
    from coram_hf.methods.registry import find_method, method_names

    entries = [find_method(method) for method in ((name,) if name else method_names())]
    if VOLUME.get().json:
        print_json(
            {
                entry.name: {
                    "formula": entry.formula,
                    "parameters": {
                        option.name: {"default": option.default, "help": option.summary}
                        for option in entry.options.values()
                    },
                }
                for entry in entries
            }
        )
        return
    for entry in entries:
        print(f"{entry.name}: {entry.formula}")
        for option in entry.options.values():
            print(f"  {option.name}={option.default!r}: {option.summary}")
