"""One table and its renderings; one registry of the diagnostics that page, terminal and command line read."""

import io
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers.models import fine_tuned, tiny_llama
from rich.console import Console

from coram_hf import CoramError
from coram_hf.report import diagnostics
from coram_hf.report.diagnostics import SECTIONS, diagnose
from coram_hf.report.page import render_page
from coram_hf.report.tables import Table, markdown, print_tables

HEAVY = {"torch", "transformers", "numpy", "matplotlib", "peft"}
TABLE = Table("Sizes", ["expert", "r_i", "rows"], [["<b>math</b>", 0.0123456, 1234], ["x" * 90, None, 5]])


def lines(table, **options):
    console = Console(file=io.StringIO(), width=160)
    console.print(table.rich(**options))
    return [line.split() for line in console.file.getvalue().splitlines() if "─" not in line and line.strip()]


def test_a_table_in_a_terminal():
    assert lines(TABLE) == [
        ["expert", "r_i", "rows"],
        ["<b>math</b>", "0.01235", "1,234"],
        ["x" * 77 + "...", "-", "5"],
    ]
    assert lines(TABLE, longest=40)[2][0] == "x" * 37 + "..."
    assert lines(Table("Facts", (), [("D", 3.0), ("kappa", None)])) == [["D", "3"], ["kappa", "-"]]


def test_a_table_in_a_notebook():
    text = TABLE.html()
    assert "<td>&lt;b&gt;math&lt;/b&gt;</td><td>0.01235</td><td>1,234</td>" in text
    assert re.findall(r"<th>([^<]*)</th>", text) == TABLE.header
    assert Table("Facts", (), [("D", 3.0)]).html() == "<table><tr><th>D</th><td>3</td></tr></table>"


def test_a_table_in_markdown():
    expected = "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert markdown(["a", "b"], iter([("1", "2")])) == expected
    assert Table("any", ["a", "b"], [["1", "2"]]).markdown() == expected


def test_titles_are_printed_once(capsys):
    print_tables([TABLE, Table("More", ["name"], [["one"]])])
    printed = capsys.readouterr().out
    assert printed.index("Sizes") < printed.index("math") < printed.index("More") < printed.index("one")
    assert printed.count("Sizes") == 1


@pytest.fixture(scope="module")
def models():
    base = tiny_llama()
    return base, {"math": fine_tuned(base, 0.02, 0), "code": fine_tuned(base, 0.03, 1)}


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_has_a_function_help_numbers_and_tables(models, name):
    section = SECTIONS[name]
    assert section.help.endswith(".")
    assert getattr(diagnostics, name).__doc__
    numbers = diagnose(*models, merged={"m": models[1]["math"]}, only=name, progress=False)
    assert set(numbers) == {"models", name, *section.extras}
    tables = section.tables(numbers)
    assert tables
    assert all(len(row) == len(table.header) for table in tables for row in table.rows)


def test_a_new_section_is_in_the_numbers_and_on_the_page(models, monkeypatch):
    whole = render_page(diagnose(*models, progress=False))
    section = replace(
        SECTIONS["conflict"],
        name="count",
        help="How many experts there are.",
        numbers=lambda findings: {"experts": len(findings.experts)},
        tables=lambda numbers: [
            Table("Count", ["what", "how many"], [["experts", numbers["count"]["experts"]]])
        ],
    )
    monkeypatch.setitem(SECTIONS, "count", section)
    numbers = diagnose(*models, progress=False)
    assert numbers["count"] == {"experts": 2}
    page = render_page(numbers)
    assert '<section id="count">' not in whole
    assert '<section id="count">' in page
    assert '<a href="#count">Count</a>' in page
    assert "How many experts there are." in page


def test_only_retention_needs_merged_models(models):
    with pytest.raises(CoramError, match="retention is measured on merged models"):
        diagnose(*models, only=["retention"], progress=False)
    assert diagnose(*models, only=["retention", "conflict"], progress=False)["retention"] == {}


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"], ["report", "audit", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys; from coram_hf.cli import app\ntry: app()\nfinally: print(*sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert "Usage" in run.stdout
    modules = run.stderr.split()
    assert "coram_hf.report.diagnostics.sections" in modules
    assert not HEAVY & {module.partition(".")[0] for module in modules}


def test_merged_is_repeated():
    run = subprocess.run(
        [sys.executable, "-m", "coram_hf", "report", "retention", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "may be repeated" in " ".join(run.stdout.split())
