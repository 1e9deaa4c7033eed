"""One table and its renderings: rich in a terminal, HTML in a notebook, Markdown in cards and results."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

from coram_hf.report.text import VISIBLE, readable, show

if TYPE_CHECKING:
    from rich.table import Table as RichTable

WIDTH = 100
"""Width of a `repr`, in columns."""
PIPE = 160
"""Width of what is printed into a pipe, in columns."""
HEAD, EXPERT, WARNING = 40, 40, 600
"""Longest column head, expert name and warning, in characters."""


class Table(NamedTuple):
    """Rows of names and numbers (None: not defined); without a header, pairs of a name and a value."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def rich(self, longest: int = VISIBLE) -> RichTable:
        """A rich table without the title; names in the first column are cut at `longest` characters."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, show_header=bool(self.header))
        for i, head in enumerate(self.header or ("", "")):
            right = bool(i and self.header) and not any(_is_words(row[i]) for row in self.rows)
            table.add_column(Text(readable(head, HEAD)), justify="right" if right else "left")
        for name, *values in self.rows:
            first = readable(name, longest) if isinstance(name, str) else show(name)
            table.add_row(Text(first), *(Text(show(value, WARNING)) for value in values))
        return table

    def html(self) -> str:
        """An HTML table without a style, which the notebook adds; every cell is escaped."""
        if not self.header:
            facts = (f"<tr><th>{_cell(name)}</th><td>{_cell(value)}</td></tr>" for name, value in self.rows)
            return f"<table>{''.join(facts)}</table>"
        head = "".join(f"<th>{escape(name)}</th>" for name in self.header)
        rows = ("".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def markdown(self) -> str:
        """A Markdown table; the cells must be text that is already escaped."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


class Facts(NamedTuple):
    """A title, single facts, numbers by expert, and warnings."""

    title: str
    single: Mapping[str, Any]
    experts: Table
    warnings: Sequence[str]

    def rich(self) -> RichTable:
        """The tables and the warnings, one below the other."""
        from rich.table import Table as RichTable
        from rich.text import Text

        facts, experts = self.tables()
        single = facts.rich()
        single.title, single.title_justify = Text(self.title), "left"
        whole = RichTable.grid(padding=(0, 0))
        whole.add_row(single)
        whole.add_row(experts.rich(EXPERT))
        for warning in self.warnings:
            whole.add_row(Text(f"warning: {readable(warning, WARNING)}", style="yellow"))
        return whole

    def html(self) -> str:
        """The tables, and the warnings as a list."""
        warnings = "".join(f"<li>{escape(readable(warning, WARNING))}</li>" for warning in self.warnings)
        facts, experts = self.tables()
        return (
            f"<div><b>{escape(readable(self.title))}</b>{facts.html()}{experts.html()}"
            f"{f'<ul>{warnings}</ul>' if warnings else ''}</div>"
        )

    def tables(self) -> tuple[Table, Table]:
        """The single facts, and the numbers by expert."""
        return Table(self.title, (), list(self.single.items())), self.experts


class Shown(ABC):
    """Mixin: rich, notebooks and the interpreter show the facts of an object."""

    @abstractmethod
    def facts(self) -> Facts: ...

    def __rich__(self) -> RichTable:
        return self.facts().rich()

    def _repr_html_(self) -> str:
        return self.facts().html()

    def __repr__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=WIDTH).print(self)
        return text.getvalue().rstrip()


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table without a title; the cells must be already escaped."""
    return Table("", header, list(rows)).markdown()


def print_tables(tables: Iterable[Table], warnings: Iterable[str] = ()) -> None:
    """Print tables with their titles, and warnings below, to a terminal or into a pipe."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else PIPE)
    for table in tables:
        console.print(Text(table.title, style="bold"), soft_wrap=True)
        console.print(table.rich())
    for warning in warnings:
        console.print(Text(f"warning: {readable(warning, WARNING)}", style="yellow"), soft_wrap=True)


def _is_words(value: object) -> bool:
    """Whether a cell holds words, which are read from the left, and not a number."""
    return isinstance(value, str) and value[:1].isalpha()


def _cell(value: object) -> str:
    return escape(show(value))
