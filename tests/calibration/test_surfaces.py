"""Calibration through the merger, the command line and recipes; in reports, cards and pages."""

import json

import pytest
import yaml
from helpers.command import coram_hf
from helpers.folders import assert_same_tensors, on_disk
from helpers.models import tiny_llama, tiny_tokenizer

from coram_hf import CoramConfig, CoramError, CoramMerger, MergeReport
from coram_hf.config import CalibrationConfig
from coram_hf.report.calibration import Calibration
from coram_hf.report.diagnostics import diagnose
from coram_hf.report.page import render_page

PROMPTS = {"math": ["1+1=", "2+2=?", "3-1", "4"], "code": ["def f", "if a:", "x = ", "go"]}
OPTIONS = CalibrationConfig(granularity="expert", answer_tokens=4)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    on_disk(folder, tiny_llama(), {"math": 0.2, "code": 0.3}, tiny_tokenizer())
    (folder / "prompts").mkdir()
    for name, texts in PROMPTS.items():
        (folder / "prompts" / f"{name}.txt").write_text("\n".join(texts))
    return folder


@pytest.fixture(scope="module")
def merged(suite):
    """A merge by the command line, from files to files."""
    run = coram_hf(
        "merge", suite / "base", suite / "math", suite / "code", "--line", "DEC(full)", "--answer-tokens", 4,
        "--calibrate", suite / "prompts", "--granularity", "expert", "-o", suite / "merged",
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return suite / "merged"


def sources(suite):
    return suite / "base", {name: suite / name for name in PROMPTS}


def test_the_command_line_the_merger_and_the_result_calibrate_alike(suite, merged):
    config = CoramConfig.from_line("DEC(full)")
    made = CoramMerger(*sources(suite), config, calibrate=PROMPTS, calibration=OPTIONS, progress=False)
    made.merge(keep_update=False).save_pretrained(suite / "memory")
    assert_same_tensors(merged, suite / "memory")
    plain = CoramMerger(*sources(suite), config, progress=False).merge()
    found = plain.calibrate(PROMPTS, granularity="expert", answer_tokens=4, progress=False)
    reports = [MergeReport.load(merged), MergeReport.load(suite / "memory"), found.report]
    assert len({json.dumps(report.to_dict()["calibration"], sort_keys=True) for report in reports}) == 1
    assert [report.lam_source for report in reports] == ["calibrated"] * 3
    assert reports[0].calibration["sha256"]


def test_the_command_on_the_card_repeats_the_merge_without_prompts(suite, merged):
    report = MergeReport.load(merged)
    factors = report.config["factors"]
    words = ["--lambda", report.lam, *(["--factors", ",".join(map(str, factors))] if factors else [])]
    run = coram_hf("merge", *sources(suite)[:1], suite / "math", suite / "code", "--line", "DEC(full)",
                   *words, "-o", suite / "again")  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert_same_tensors(merged, suite / "again")
    card = (merged / "README.md").read_text()
    assert all(f"{word}" in card for word in words)


def test_cards_and_pages_show_the_calibration(suite, merged):
    card = (merged / "README.md").read_text()
    found = Calibration.from_dict(MergeReport.load(merged).calibration)
    assert "## Calibration" in card
    assert "calibrated on unlabelled prompts" in card
    assert "8 unlabelled prompts" in card
    assert found.sha256[:16] in card
    assert "figures/calibration.png" in card
    assert (merged / "figures" / "calibration.png").stat().st_size > 1000
    without = render_page(diagnose(*sources(suite), progress=False))
    page = render_page(diagnose(*sources(suite), merged={"merge": merged}, progress=False))
    assert 'id="calibration"' in page
    assert page.count("<polyline") > without.count("<polyline")
    assert 'href="#calibration"' in page
    assert 'id="calibration"' not in without
    assert 'href="#calibration"' not in without


def test_recipes_calibrate(suite, tmp_path):
    recipe = {
        "base": str(suite / "base"),
        "experts": {name: str(suite / name) for name in PROMPTS},
        "line": "DEC(full)",
        "calibrate": str(suite / "prompts"),
        "granularity": "lambda",
        "answer_tokens": 3,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    run = coram_hf("merge", "--config", path, "-o", tmp_path / "merged")
    assert run.returncode == 0, run.stderr
    found = MergeReport.load(tmp_path / "merged").calibration
    assert (found["requested"], found["options"]["answer_tokens"]) == ("lambda", 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--calibrate", "{suite}/nowhere"], "nowhere is not a folder"),
        (["--granularity", "expert"], "granularity is an option of a calibration"),
        (["--calibrate", "{suite}/prompts", "--granularity", "all"], "granularity: unknown value 'all'"),
        (["--calibrate", "{suite}/prompts", "--method", "linear"], "has no lambda to calibrate"),
        (["--calibrate", "{suite}/prompts", "--chat"], "no chat template"),
        (["--factors", "1,2,3"], "factors: found 3 for 2 experts"),
    ],
)
def test_bad_calibrations_are_one_line_and_exit_2(suite, arguments, message):
    given = [argument.format(suite=suite) for argument in arguments]
    run = coram_hf("merge", suite / "base", suite / "math", suite / "code", "-o", suite / "out", *given)
    assert run.returncode == 2
    assert message in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (suite / "out").exists()


def test_the_merger_refuses_before_it_merges(suite):
    with pytest.raises(CoramError, match="no prompts for expert 'code'"):
        CoramMerger(*sources(suite), calibrate={"math": ["1"]}, progress=False)


def test_in_a_pipe_a_calibration_says_a_line_now_and_then(suite, monkeypatch, capsys):
    monkeypatch.setattr("coram_hf.execution.progress.INTERVAL", 0.0)
    made = CoramMerger(
        *sources(suite), CoramConfig.from_line("DEC(full)"), calibrate=PROMPTS, calibration=OPTIONS
    )
    made.merge(keep_update=False)
    said = capsys.readouterr().err.splitlines()
    assert "calibrate: answers: 100%, 8 of 8 answers, 0 min left" in said
    assert [line for line in said if line.startswith("calibrate: lambda: ") and "of 6 merges" in line]
    assert [line for line in said if line.startswith("calibrate: factors: ") and "of 18 steps" in line]
