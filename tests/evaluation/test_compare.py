"""Comparisons: every number by itself, and the layout of the paper's main tables."""

import json
import math

import pytest
from helpers.adapters import adapted
from helpers.command import coram_hf, summary
from helpers.suites import EXPERTS, accuracy, assembled, make_suite, sources, task_files
from peft import OFTConfig
from transformers import AutoModelForCausalLM

from coram_hf import CoramConfig, CoramMerger, compare_methods
from coram_hf.baselines import METHODS, PRESETS, merge, merge_oft
from coram_hf.evaluation.compare import RIVALS
from coram_hf.evaluation.tasks import LightScorer
from coram_hf.methods.registry import usual_names

LINES = ("full", "lr.ta")
BASELINES = ("linear", "OrthoMerge TIES+C")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return make_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def found(suite):
    return compare_methods(
        *sources(suite), LINES, tasks=task_files(suite), out_of_domain=[suite / "world.jsonl"],
        lambdas="0.5:2.5:0.5", baselines=BASELINES, output=suite / "out", progress=False,
    )  # fmt: skip


def cells(text):
    """The cells of the first table."""
    first = text.strip().split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()]


def percent(value):
    return f"{100 * value:.2f}"


def test_the_layout_is_the_papers(suite, found):
    header, _, *rows = cells(str(found))
    assert header == [
        "method", "math", "code", "average (rule)", "s.e.", "average (best lambda)", "world",
        "out-of-domain average",
    ]  # fmt: skip
    assert [row[0] for row in rows] == ["base", "task-specific FT", *BASELINES, *LINES]
    assert (suite / "out" / "compare.md").read_text() == str(found)
    expert = rows[1]
    assert expert[4:] == ["-", "-", "-", "-"]
    assert all(row[5] == "-" for row in rows[:4])
    assert all("(at " in row[5] for row in rows[4:])


def test_every_number_is_that_of_its_model(suite, found):
    base = AutoModelForCausalLM.from_pretrained(suite / "base")
    rule = 1.15 * math.sqrt(2)
    models = {
        "base": base,
        "linear": merge(*sources(suite), "linear", progress=False).model,
        "OrthoMerge TIES+C": merge(
            *sources(suite), "orthomerge", **PRESETS["OrthoMerge TIES+C"].parameters, progress=False
        ).model,
    }
    for line in LINES:
        config = CoramConfig.from_line(line, lam=rule)
        models[line] = CoramMerger(*sources(suite), config, progress=False).merge().model
    rows = {row[0]: [cell.strip("*") for cell in row[1:]] for row in cells(str(found))[2:]}
    for name, model in models.items():
        inside = [accuracy(model, path) for path in task_files(suite)]
        world = accuracy(model, suite / "world.jsonl")
        assert rows[name][:3] == [*map(percent, inside), percent(sum(inside) / 2)], name
        assert rows[name][5:] == [percent(world), percent(world)], name
        errors = [
            math.sqrt(p * (1 - p) / len(path.read_text().splitlines()))
            for p, path in zip(inside, task_files(suite), strict=True)
        ]
        assert rows[name][3] == percent(math.hypot(*errors) / 2), name
    experts = {name: AutoModelForCausalLM.from_pretrained(suite / name) for name in EXPERTS}
    scores = {path: [accuracy(expert, path) for expert in experts.values()] for path in task_files(suite)}
    own = [values[i] for i, values in enumerate(scores.values())]
    assert rows["task-specific FT"][:3] == [*map(percent, own), percent(sum(own) / 2)]
    numbers = json.loads((suite / "out" / "compare.json").read_text())
    for i, name in enumerate(EXPERTS):
        for path, values in scores.items():
            assert numbers["experts"][name][path.stem]["value"] == values[i]


def test_the_best_lambda_is_that_of_the_tasks_in_domain(suite, found):
    base = AutoModelForCausalLM.from_pretrained(suite / "base")
    merged = CoramMerger(*sources(suite), CoramConfig(lam=1.0), progress=False).merge().model
    averages = {}
    for lam in (0.5, 1.0, 1.5, 1.15 * math.sqrt(2), 2.0, 2.5):
        model = assembled(base, merged, lam)
        averages[lam] = sum(accuracy(model, path) for path in task_files(suite)) / 2
    line = found.lines[0]
    assert averages[line.best.lam] == max(averages.values()) == line.best.average
    row = next(row for row in cells(str(found)) if row[0] == "full")
    assert row[5].replace("*", "") == f"{percent(max(averages.values()))} (at {line.best.lam:.2f})"
    assert all(set(point.results) == {"math", "code"} for point in line.points)
    assert set(line.beyond) == {"world"}


def test_the_best_of_a_column_is_bold(found):
    rows = cells(str(found))[2:]
    for row in rows[:2]:
        assert "**" not in "".join(row)
    assert not any(row[4].startswith("**") for row in rows)
    for column in (1, 2, 3, 5, 6, 7):
        shown = [row[column].partition(" ")[0] for row in rows[2:] if row[column] != "-"]
        numbers = [float(cell.strip("*")) for cell in shown]
        assert [cell.startswith("**") for cell in shown] == [number == max(numbers) for number in numbers]


def test_without_a_range_or_other_tasks(suite, monkeypatch):
    calls = []
    call = LightScorer.__call__
    monkeypatch.setattr(
        LightScorer, "__call__", lambda self, *models: calls.append(self.name) or call(self, *models)
    )
    options = {"tasks": task_files(suite), "baselines": (), "score_experts": False, "limit": 5}
    found = compare_methods(*sources(suite), progress=False, **options)
    header, _, *rows = cells(str(found))
    assert header == ["method", "math", "code", "average (rule)", "s.e.", "average (best lambda)"]
    assert [row[0] for row in rows] == ["base", "full"]
    assert rows[1][5] == "-"
    assert sorted(calls) == ["code", "code", "math", "math"]


def test_all_rivals_of_the_paper_by_default():
    assert {"MergeBench TIES", "MergeBench Task Arithmetic", "OrthoMerge TIES+G"} < set(RIVALS)
    assert not {"TIES", "Task Arithmetic"} & set(RIVALS)
    assert {PRESETS[name].method if name in PRESETS else name for name in RIVALS} == {
        name for name, method in METHODS.items() if method.usual
    }
    assert {"ties", "tsvm"} < set(usual_names())
    assert not {"slerp", "nuslerp", "della"} & set(usual_names())


def test_what_was_scored_is_not_scored_again(suite, found, monkeypatch):
    monkeypatch.setattr(LightScorer, "__call__", lambda *_: pytest.fail("scored again"))
    before = {path.name: path.read_bytes() for path in (suite / "out").iterdir()}
    arguments = [
        "compare", suite / "base", suite / "math", suite / "code", "--in-domain", suite / "math.jsonl",
        "--in-domain", suite / "code.jsonl", "--out-of-domain", suite / "world.jsonl", "--line", LINES[0],
        "--line", LINES[1], "--lambda", "0.5:2.5:0.5", "--baseline", BASELINES[0], "--baseline", BASELINES[1],
        "-o", suite / "out",
    ]  # fmt: skip
    run = coram_hf(*arguments)
    assert run.returncode == 0, run.stderr
    shown = summary(run.stdout)
    rows = found.to_dict()["rows"]
    rival = max(BASELINES, key=lambda name: rows[name]["average (rule)"])
    assert shown["base"] == percent(rows["base"]["average (rule)"])
    assert shown["best baseline"] == f"{percent(rows[rival]['average (rule)'])} ({rival})"
    ahead = rows[LINES[0]]["average (rule)"] - rows[rival]["average (rule)"]
    assert shown[f"{LINES[0]} against {rival}"].startswith(f"{100 * ahead:+.2f} (")
    assert shown["task-specific FT"] == percent(rows["task-specific FT"]["average (rule)"])
    assert shown["written to"] == str(suite / "out")
    assert {path.name: path.read_bytes() for path in (suite / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tasks: none given"),
        (["--tasks", "MATH", "--out-of-domain", "MATH"], "two are called 'math'"),
        (["--tasks", "MATH", "--baseline", "OrthoMerge"], "unknown baseline 'OrthoMerge'"),
        (["--tasks", "MATH", "--lambda", "1:2"], "neither start:stop:step"),
        (["--tasks", "MATH", "--limit", "0"], "limit must be a positive number"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(suite, arguments, message):
    arguments = [suite / "math.jsonl" if argument == "MATH" else argument for argument in arguments]
    run = coram_hf("compare", suite / "base", suite / "math", *arguments)
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_oft_experts_are_compared_with_orthomerge_on_their_generators(suite, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(suite / "base")
    adapters = {}
    for seed, name in enumerate(EXPERTS):
        adapters[name] = tmp_path / name
        config = OFTConfig(oft_block_size=4, target_modules=["q_proj", "down_proj"])
        adapted(base, config, seed).save_pretrained(adapters[name])
    tasks = task_files(suite)[:1]
    options = {"tasks": tasks, "limit": 4, "score_experts": False, "progress": False}
    chosen = compare_methods(suite / "base", adapters, "lr", baselines=("OrthoMerge (OFT)",), **options)
    rows = compare_methods(suite / "base", adapters, "lr", **options).baselines
    assert list(rows) == [*RIVALS, "OrthoMerge (OFT)"]
    model = merge_oft(suite / "base", adapters, progress=False).model
    first = tmp_path / "first.jsonl"
    first.write_text("".join(tasks[0].read_text().splitlines(True)[:4]))
    assert rows["OrthoMerge (OFT)"][tasks[0].stem].value == accuracy(model, first)
    assert chosen.baselines["OrthoMerge (OFT)"] == rows["OrthoMerge (OFT)"]
