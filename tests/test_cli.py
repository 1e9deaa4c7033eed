"""The command line, run as a user runs it."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import peft
import pytest
import torch
from models import fine_tuned, tiny_llama
from test_adapters import adapted
from transformers import AutoModelForCausalLM

from coram_hf import CoramConfig, CoramMerger, MergeError
from coram_hf.cli import main
from coram_hf.sources.locate import Located, Source, fetch, parse_source


class Run(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def coram_hf(*arguments):
    """The command line in this process, as `coram-hf` starts it."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", ["coram-hf", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
    return Run(stop.value.code or 0, stdout.getvalue(), stderr.getvalue())


def test_it_starts_without_loading_torch():
    code = "import sys, coram_hf.cli; assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    run = subprocess.run(
        [sys.executable, "-m", "coram_hf", "--help"], capture_output=True, text=True, check=True
    )
    assert "merge" in run.stdout


@pytest.fixture
def suite(tmp_path):
    """A base, a checkpoint and an adapter on disk."""
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    fine_tuned(base, 0.03, 0).save_pretrained(tmp_path / "math")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    adapted(base, config, 1).save_pretrained(tmp_path / "adapters" / "code")
    return tmp_path


def test_checkpoints_and_adapters_alike(suite):
    run = coram_hf(
        "merge", suite / "base", suite / "math", f"coder={suite / 'adapters' / 'code'}", "-o", suite / "out",
        "--line", "SS(nca,mean).ta", "--lambda", "1.5", "--weights", "2,1",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "lambda 1.5" in run.stdout
    merged = AutoModelForCausalLM.from_pretrained(suite / "out").state_dict()
    config = CoramConfig.from_line("SS(nca,mean).ta", lam=1.5, weights=(2, 1))
    experts = {"math": suite / "math", "coder": suite / "adapters" / "code"}
    expected = CoramMerger(suite / "base", experts, config, progress=False).merge().model.state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-7)
    record = json.loads((suite / "out" / "coram_report.json").read_text())
    assert record["expert_kinds"] == {"math": "full", "coder": "LORA"}
    assert not list(suite.glob(".out*"))

    again = coram_hf("merge", suite / "base", suite / "math", "-o", suite / "out")
    assert again.returncode == 2
    assert "exists" in again.stderr
    assert (
        coram_hf("merge", suite / "base", suite / "math", "-o", suite / "out", "--overwrite").returncode == 0
    )


def test_inspect_prints_the_plan(suite):
    run = coram_hf("inspect", suite / "base", suite / "math", suite / "adapters" / "code")
    assert run.returncode == 0, run.stderr
    assert "14 tensors" in run.stdout
    assert "r(math)" in run.stdout
    assert "r(code)" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--line", "ful"], "unknown X 'ful'"),
        (["--weights", "1,x"], "'x' is not a number"),
        (["--weights", "1,2,3"], "found 3 for 1 experts"),
        (["--balance", "dampen"], "valid: 'damp', 'equal'"),
        (["--vocabulary", "all"], "valid: 'base', 'union', 'error'"),
        (["--lambada", "2"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(suite, arguments, message):
    run = coram_hf("merge", suite / "base", suite / "math", "-o", suite / "out", *arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert not (suite / "out").exists()


def test_missing_sources_are_named(suite):
    for source in (suite / "nowhere", "./nowhere", "org/none@main"):
        run = coram_hf("inspect", suite / "base", source)
        assert run.returncode == 2
        assert "nowhere" in run.stderr or "org/none" in run.stderr
        assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("org/repo", Source("org/repo", "org/repo")),
        ("org/repo@v1.0", Source("org/repo", "org/repo", None, "v1.0")),
        ("org/repo:a/b_adapter@abc123", Source("b_adapter", "org/repo", "a/b_adapter", "abc123")),
        ("math=org/repo:folder", Source("math", "org/repo", "folder")),
    ],
)
def test_sources_are_read_apart(text, source):
    assert parse_source(text) == source


def test_an_existing_folder_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1e-4").mkdir()
    assert parse_source("lr=1e-4") == Source("lr=1e-4", "lr=1e-4")
    assert parse_source("x=lr=1e-4") == Source("x", "lr=1e-4")
    (tmp_path / "file").write_text("")
    with pytest.raises(MergeError, match="is a file"):
        parse_source("file")


@pytest.mark.parametrize("text", ["", "/no/such/folder", "a b", "org/repo:", "org/repo@"])
def test_unreadable_sources(text):
    with pytest.raises(MergeError, match=r"org/repo:folder/inside@revision"):
        parse_source(text)


def test_a_folder_inside_a_repository(tmp_path, monkeypatch):
    (tmp_path / "snapshot" / "inner").mkdir(parents=True)
    calls = []

    def download(repo, revision, allow_patterns, ignore_patterns):
        calls.append((repo, revision, allow_patterns))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("coram_hf.sources.locate.snapshot_download", download)
    assert fetch(parse_source("org/repo:inner@v1")) == Located(
        tmp_path / "snapshot" / "inner", "org/repo:inner"
    )
    assert calls == [("org/repo", "v1", ["inner/*"])]
    with pytest.raises(MergeError, match="has no folder 'outer'"):
        fetch(parse_source("org/repo:outer"))
