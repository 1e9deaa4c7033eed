"""What a plan, a report or a result shows of itself: a table in a terminal, HTML in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, NamedTuple

from coram_hf.report.text import readable, show

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 100


class Facts(NamedTuple):
    """A title, single facts, numbers by expert, and warnings."""

    title: str
    single: Mapping[str, Any]
    header: Sequence[str]
    experts: Mapping[str, Sequence[Any]]
    warnings: Sequence[str]


class Shown(ABC):
    """Mixin: rich, notebooks and the interpreter show the facts of an object."""

    @abstractmethod
    def _facts(self) -> Facts: ...

    def __rich__(self) -> Table:
        return _rich_table(self._facts())

    def _repr_html_(self) -> str:
        return _html(self._facts())

    def __repr__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=WIDTH).print(self)
        return text.getvalue().rstrip()


def _rich_table(facts: Facts) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    whole = Table.grid(padding=(0, 0))
    single = Table(box=box.SIMPLE_HEAD, title=Text(facts.title), title_justify="left", show_header=False)
    for name, value in facts.single.items():
        single.add_row(Text(name), Text(show(value), justify="right"))
    experts = Table(box=box.SIMPLE_HEAD)
    for head in facts.header:
        experts.add_column(Text(head), justify="left" if head == facts.header[0] else "right")
    for name, values in facts.experts.items():
        experts.add_row(Text(readable(name, 40)), *(Text(show(value)) for value in values))
    whole.add_row(single)
    whole.add_row(experts)
    for warning in facts.warnings:
        whole.add_row(Text(f"warning: {readable(warning, 600)}", style="yellow"))
    return whole


def _html(facts: Facts) -> str:
    """Tables without a style of their own, which a notebook gives them; every name is escaped."""
    single = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(show(value))}</td></tr>"
        for name, value in facts.single.items()
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in facts.header)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(show(cell))}</td>" for cell in (name, *values)) + "</tr>"
        for name, values in facts.experts.items()
    )
    warnings = "".join(f"<li>{escape(readable(warning, 600))}</li>" for warning in facts.warnings)
    return (
        f"<div><b>{escape(readable(facts.title))}</b><table>{single}</table>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        f"{f'<ul>{warnings}</ul>' if warnings else ''}</div>"
    )


def print_shown(thing: Shown) -> None:
    """The table in a terminal; elsewhere, such as in a pipe, the plain lines of `str`."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(thing) if console.is_terminal else print(thing)
