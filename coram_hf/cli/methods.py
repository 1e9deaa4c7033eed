"""`coram-hf methods`."""

from __future__ import annotations

from typing import Annotated

import typer


def methods(
    name: Annotated[str | None, typer.Argument(help="One method; by default all.")] = None,
) -> None:
    """List the merge methods, including those of other packages: formula, parameters, defaults."""
    from coram_hf.methods.registry import find_method, method_names

    for method in (name,) if name else method_names():
        entry = find_method(method)
        print(f"{entry.name}: {entry.formula}")
        for option in entry.options.values():
            print(f"  {option.name}={option.default!r}: {option.summary}")
