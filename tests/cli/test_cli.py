"""The command line, run as a user runs it."""

import json
import re
import subprocess
import sys
import time
from dataclasses import fields

import peft
import psutil
import pytest
import torch
from helpers.adapters import adapted
from helpers.command import coram_hf
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama
from transformers import AutoModelForCausalLM

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.cli.shared import split_tasks
from coram_hf.inputs.locate import Located, Source, fetch, parse_source


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
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    on_disk(tmp_path, base, {"math": 0.03, "adapters/code": adapted(base, config, 1)})
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
    assert re.search(r"^ +math +0\.\d+ .*\n +code +0\.\d+ ", run.stdout, re.M)
    assert "lambda" in run.stdout
    plain = coram_hf("inspect", suite / "base", suite / "math", "--method", "linear")
    assert "14 tensors" in plain.stdout
    assert "lambda" not in plain.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--line", "ful"], "unknown branch or conflict mode 'ful'"),
        (["--line", "recomended"], "did you mean 'recommended'?"),
        (["--weights", "1,x"], "'x' is not a number"),
        (["--weights", "1,2,3"], "found 3 for 1 experts"),
        (["--balance", "dampen"], "valid: 'damp', 'root', 'equal', 'auto'"),
        (["--vocabulary", "all"], "valid: 'base', 'union', 'error'"),
        (["--lambada", "2"], "No such option"),
        (["--slice-height", "0"], "slice_height must be a positive integer"),
        (["--line", ""], "cannot read the line"),
        (["--method", "ties", "--parameter", "density=[1"], "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(suite, arguments, message):
    run = coram_hf("merge", suite / "base", suite / "math", "-o", suite / "out", *arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert not (suite / "out").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{suite}/nowhere", "no such folder: '{suite}/nowhere'"),
        ("./nowhere", "no such folder: './nowhere'"),
        ("{suite}/maht", "no such folder: '{suite}/maht' (did you mean '{suite}/math'?)"),
        ("org/none@main", "no such folder: 'org/none', and it cannot be downloaded from the Hub"),
    ],
)
def test_missing_sources_are_named(suite, source, message):
    run = coram_hf("inspect", suite / "base", source.format(suite=suite))
    assert run.returncode == 2
    assert message.format(suite=suite) in run.stderr
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
    with pytest.raises(CoramError, match="is a file"):
        parse_source("file")


@pytest.mark.parametrize("text", ["", "/no/such/folder", "a b", "org/repo:", "org/repo@"])
def test_unreadable_sources(text):
    with pytest.raises(CoramError, match="no such folder"):
        parse_source(text)


def test_a_folder_inside_a_repository(tmp_path, monkeypatch):
    (tmp_path / "snapshot" / "inner").mkdir(parents=True)
    calls = []

    def download(repo, revision, allow_patterns, ignore_patterns):
        calls.append((repo, revision, allow_patterns))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("coram_hf.inputs.locate.snapshot_download", download)
    assert fetch(parse_source("org/repo:inner@v1")) == Located(
        tmp_path / "snapshot" / "inner", "org/repo:inner"
    )
    assert calls == [("org/repo", "v1", ["inner/*"])]
    with pytest.raises(CoramError, match="has no folder 'outer'"):
        fetch(parse_source("org/repo:outer"))


def test_every_field_of_the_config_is_an_option(suite):
    spelled = {f"--{f.name.replace('_', '-')}" for f in fields(CoramConfig)} - {"--lam"} | {"--lambda"}
    assert not {option for option in spelled if option not in coram_hf("merge", "--help").stdout}
    run = coram_hf(
        "merge", suite / "base", suite / "math", "-o", suite / "out", "--slice-height", 4, "--branch", "lr",
        "--conflict", "nca", "--spread", "mean", "--residual", "ta", "--kappa", 0.9, "--scale", "c_rms",
        "--dispersion-threshold", 6, "--balance", "damp", "--target-modules", "q_proj", "--target-modules",
        "up_proj", "--compute-dtype", "float32", "--dtype", "bfloat16", "--device", "cpu",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    report = json.loads((suite / "out" / "coram_report.json").read_text())
    assert report["line"] == "SS(lr-nca,mean).ta (h=4)"
    assert report["config"]["target_modules"] == ["q_proj", "up_proj"]
    assert report["counts"]["targets"] == 4
    assert AutoModelForCausalLM.from_pretrained(suite / "out").dtype == torch.bfloat16


def recipe(folder, text):
    path = folder / "merge.yaml"
    path.write_text(text.replace("HERE", str(folder)))
    return path


OWN = """
base: HERE/base
experts: {math: HERE/math, code: HERE/adapters/code}
line: SS(nca,mean).ta
kappa: 0.9
dtype: bfloat16
"""
MERGEKIT = """
merge_method: METHOD
base_model: HERE/base
models:
  - model: HERE/base
  - {model: HERE/math, parameters: {weight: 0.5, density: 0.3}}
  - {model: HERE/chat, parameters: {weight: 0.2, density: 0.3}}
parameters: {normalize: NORMALIZE, lambda: 0.8}
dtype: float32
tokenizer_source: base
"""


def test_a_recipe_of_ours(suite):
    run = coram_hf("merge", "--config", recipe(suite, OWN), "-o", suite / "out", "--kappa", 0.8)
    assert run.returncode == 0, run.stderr
    report = json.loads((suite / "out" / "coram_report.json").read_text())
    assert report["line"] == "SS(nca,mean).ta"
    assert report["kappa"] == 0.8
    assert list(report["relative_updates"]) == ["math", "code"]


@pytest.mark.parametrize("normalize", ["true", "false"])
@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_a_recipe_of_mergekit_gives_what_mergekit_gives(suite, method, normalize):
    pytest.importorskip("mergekit", reason="mergekit is not installed: pip install 'coram-hf[mergekit]'")
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    base = AutoModelForCausalLM.from_pretrained(suite / "base")
    fine_tuned(base, 0.05, 7).save_pretrained(suite / "chat")
    text = MERGEKIT.replace("METHOD", method).replace("NORMALIZE", normalize)
    if method == "linear":
        text = text.replace("  - model: HERE/base\n", "").replace("base_model: HERE/base\n", "")
        text = text.replace(", lambda: 0.8", "")
    if method != "ties":
        text = text.replace(", density: 0.3", "")
    path = recipe(suite, text)
    run = coram_hf("merge", "--config", path, "-o", suite / "ours")
    assert run.returncode == 0, run.stderr
    options = MergeOptions(copy_tokenizer=False, quiet=True, write_model_card=False)
    theirs = {k: v for k, v in yaml.safe_load(path.read_text()).items() if k != "tokenizer_source"}
    run_merge(MergeConfiguration.model_validate(theirs), str(suite / "theirs"), options)
    expected = AutoModelForCausalLM.from_pretrained(suite / "theirs").state_dict()
    found = AutoModelForCausalLM.from_pretrained(suite / "ours").state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OWN.replace("kappa", "kapa"), "unknown key 'kapa'; did you mean 'kappa'"),
        (OWN.replace("base:", "bse:"), "did you mean 'base'"),
        (OWN + "method: tise\n", "unknown merge method 'tise'; did you mean 'ties'"),
        (OWN.replace("experts: {", "experts: [{").replace("code}", "code}]"), "experts must be sources"),
        (MERGEKIT.replace("METHOD", "slrp").replace("NORMALIZE", "true"), "did you mean 'slerp'"),
        (MERGEKIT.replace("METHOD", "ties").replace("NORMALIZE", "true").replace("0.5,", "[0.1, x],"),
         "weight must be a number, found 'x'"),
        (MERGEKIT.replace("METHOD", "ties").replace("lambda", "lamda"), "did you mean 'lambda'"),
        (MERGEKIT.replace("METHOD", "ties").replace("dtype", "dytpe"), "did you mean 'dtype'"),
        (OWN + "method: null\n", "method must be a name"),
        (OWN + "1: 2\n", "unknown key 1"),
        (OWN + "kappa: 1\n", "'kappa' is given twice"),
        (OWN + "allow_pickle: 'no'\n", "allow_pickle must be true or false"),
        (OWN + "device: [cpu]\n", "device: unknown value"),
        (MERGEKIT.replace("METHOD", "ties"), "normalize must be true or false"),
        (MERGEKIT.replace("METHOD", "ties").replace("NORMALIZE", "true").replace("0.8", "null"),
         "lambda must be a number"),
        ("merge_method: linear\nmodels: []\n", "lists no expert"),
        ("[" * 3000, "cannot be read as YAML"),
        ("- 1\n", "is not a mapping"),
        ("a: [\n", "cannot be read as YAML"),
    ],
)  # fmt: skip
def test_bad_recipes_are_named(suite, text, message):
    run = coram_hf("merge", "--config", recipe(suite, text), "-o", suite / "out")
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert not (suite / "out").exists()


def test_baselines_from_the_command_line(suite):
    run = coram_hf(
        "merge", suite / "base", suite / "math", suite / "adapters" / "code", "-o", suite / "out",
        "--method", "ties", "--parameter", "density=0.3", "--parameter", "combine=sum", "--balance", "damp",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    report = json.loads((suite / "out" / "coram_report.json").read_text())
    assert report["method"] == "ties"
    assert report["config"]["density"] == 0.3


def test_a_dry_run_writes_nothing(suite, monkeypatch):
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: time.time() - 50 * 3600)
    run = coram_hf("merge", suite / "base", suite / "math", "-o", suite / "out", "--dry-run")
    assert run.returncode == 0, run.stderr
    assert re.search(r"disk +0.00 GB\b.*\n +memory +about", run.stdout)
    told = re.search(r"time +about ([\d.]+) h, including startup", run.stdout)
    assert 50 <= float(told[1]) < 60
    assert not (suite / "out").exists()
    assert not list(suite.glob(".out*"))


def test_long_lists_of_tasks_are_split():
    names = [f"task_{i}" for i in range(100)]
    assert split_tasks([", ".join(names)]) == names
