"""What plans, reports and results show of themselves."""

import io
import os
import pty
from html.parser import HTMLParser

import pytest
from helpers.command import coram_hf
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama
from rich.console import Console

from coram_hf import CoramMerger

HOSTILE = "[red]<script>alert(1)</script>"


@pytest.fixture(scope="module")
def shown():
    base = tiny_llama()
    experts = {"math": fine_tuned(base, 0.02, 0), HOSTILE: fine_tuned(base, 0.2, 1)}
    merger = CoramMerger(base, experts, progress=False)
    result = merger.merge()
    return {"plan": merger.inspect(), "report": result.report, "result": result}


class Cells(HTMLParser):
    """The texts of table cells, and the tags of a document."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.tags, self._open = [], set(), False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self._open = tag in ("td", "th")
        if self._open:
            self.cells.append("")

    def handle_endtag(self, tag):
        self._open = False

    def handle_data(self, data):
        if self._open:
            self.cells[-1] += data


@pytest.mark.parametrize("kind", ["plan", "report", "result"])
def test_terminal_and_notebook_show_the_same_numbers(shown, kind):
    thing = shown[kind]
    plan = shown["plan"]
    numbers = [plan.dispersion, plan.lam, *plan.relative_updates.values()]
    console = Console(file=io.StringIO(), width=120)
    console.print(thing)
    found = Cells(thing._repr_html_())
    for text in (f"{number:.4g}" for number in numbers):
        assert text in console.file.getvalue()
        assert text in repr(thing)
        assert text in found.cells
    assert HOSTILE in console.file.getvalue()
    assert HOSTILE in found.cells
    assert "script" not in found.tags
    assert plan.warnings
    assert "warning: dispersion D" in repr(thing)
    assert len(repr(thing).splitlines()) < 40


def test_the_command_shows_its_table_in_a_terminal_and_in_a_pipe(tmp_path, monkeypatch):
    on_disk(tmp_path, experts={"math": 0.02})
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert coram_hf("inspect", tmp_path / "base", tmp_path / "math", stdout=terminal).returncode == 0
    text = os.read(ours, 1 << 16).decode()
    piped = coram_hf("inspect", tmp_path / "base", tmp_path / "math").stdout
    assert "\x1b[" in text
    assert "\x1b[" not in piped
    for shown in (text, piped):
        assert "─" in shown
        assert "dispersion D" in shown
        assert "warning: 98" in shown
