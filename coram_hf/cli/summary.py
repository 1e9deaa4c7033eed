"""How a command ends: one table for a reader, or one JSON object for a program (`--json`)."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from coram_hf.cli.voice import VOLUME
from coram_hf.report.tables import Shown, Table, print_tables
from coram_hf.report.text import json_values


def conclude(tables: Table | Iterable[Table], data: Any) -> None:
    """Print the outcome of a command: its tables, or with `--json` its data."""
    if VOLUME.get().json:
        print_json(data)
    else:
        print_tables([tables] if isinstance(tables, Table) else tables)


def conclude_shown(thing: Shown, data: Any) -> None:
    """Print the facts of an object and its warnings, or with `--json` its data."""
    if VOLUME.get().json:
        print_json(data)
    else:
        found = thing.facts()
        print_tables(found.tables(), found.warnings)


class Measured(Protocol):
    """Scores: their tables in Markdown, and the facts in short."""

    def __str__(self) -> str: ...

    def summary(self) -> dict[str, Any]: ...


def conclude_measured(title: str, found: Measured, data: Any, folder: Path | None) -> None:
    """Print one table of facts, after all the tables unless a folder has them; or with `--json` the data."""
    if folder is None and not VOLUME.get().json:
        print_markdown(html.unescape(str(found)))
    conclude(facts(title, {**found.summary(), "written to": folder}), data)


def print_markdown(text: str) -> None:
    """Print Markdown, drawn on a terminal and plain in a pipe."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.print(Markdown(text)) if console.is_terminal else print(text)


def facts(title: str, rows: Mapping[str, Any]) -> Table:
    """A table of names and values; values that are None are left out."""
    return Table(title, (), [(name, value) for name, value in rows.items() if value is not None])


def print_json(data: Any) -> None:
    """Print one JSON object; infinite and undefined numbers become strings, paths their text."""
    print(json.dumps(json_values(data), indent=1, allow_nan=False, default=str))
