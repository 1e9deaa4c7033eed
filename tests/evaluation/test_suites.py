"""Suite files, scores of other harnesses, seeds, and intervals, each against a computation by hand."""

import json
import math
import sys
from statistics import fmean, stdev

import numpy as np
import pytest
import yaml
from helpers.command import coram_hf
from helpers.paths import ROOT
from helpers.suites import make_suite, sources

from coram_hf import compare_methods
from coram_hf.errors import CoramError
from coram_hf.evaluation.external import read_result
from coram_hf.evaluation.formula import Formula
from coram_hf.evaluation.intervals import difference
from coram_hf.evaluation.suite import Domain, Suite
from coram_hf.evaluation.suite_file import open_suite, read_scores
from coram_hf.report.eval_results import Result

SCRIPT = """
import json, sys
from pathlib import Path
folder, output, seed = sys.argv[1:]
size = (Path(folder) / "model.safetensors").stat().st_size
assert (Path(folder) / "tokenizer.json").is_file()
with (Path(output).parent.parent / "calls.txt").open("a") as calls: calls.write("x")
json.dump({"harm": 0.1 * int(seed), "refusal": {"outcomes": [1, 0, 1, int(seed) % 2]}}, open(output, "w"))
"""
ROWS = ("base", "linear", "full", "lr")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = make_suite(tmp_path_factory.mktemp("suite"))
    (found / "judge.py").write_text(SCRIPT)
    return found


def written(path, content):
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def whole(folder):
    return {
        "in_domain": {
            "skills": {"tasks": {"math.jsonl": 3, "code.jsonl": 1}, "weight": 2, "expert": "math"},
            "errors": {"tasks": "code.jsonl", "score": "1 - x", "expert": "code"},
            "safety": {"score": "mean(1 - harm, refusal, 1 - asr)", "expert": "code"},
        },
        "out_of_domain": {"world": "world.jsonl"},
        "external": ["asr"],
        "commands": [
            {
                "run": f"{sys.executable} {folder / 'judge.py'} {{model}} {{output}} {{seed}}",
                "tasks": ["harm", "refusal"],
            }
        ],
    }


@pytest.fixture(scope="module")
def found(folder):
    suite = written(folder / "suite.yaml", whole(folder))
    given = {row: {"asr": 0.1 * (i + 1)} for i, row in enumerate((*ROWS, "code", "math"))}
    given["lr"]["asr"] = {"value": 0.4, "standard_error": 0.05}
    (folder / "scores.json").write_text(json.dumps(given))
    return compare_methods(
        *sources(folder), ["full", "lr"], suite=suite, scores=folder / "scores.json", seeds=(1, 4),
        baselines=("linear",), output=folder / "out", progress=False,
    )  # fmt: skip


def test_averages_are_over_domains(folder, found):
    numbers = json.loads((folder / "out" / "compare.json").read_text())
    tasks = {"base": numbers["base"], "linear": numbers["baselines"]["linear"]}
    tasks |= {line["line"]: line["points"][0]["results"] for line in numbers["lines"]}
    for i, row in enumerate(ROWS):
        math_, code, asr = (tasks[row][task]["value"] for task in ("math", "code", "asr"))
        assert asr == pytest.approx(0.1 * (i + 1))
        assert tasks[row]["harm"]["by_seed"] == pytest.approx({"1": 0.1, "4": 0.4})
        skills, errors = (3 * math_ + code) / 4, 1 - code
        safety = ((1 - 0.25) + (0.75 + 0.5) / 2 + (1 - asr)) / 3
        shown = numbers["rows"][row]
        assert [shown[name] for name in ("skills", "errors", "safety")] == pytest.approx(
            [skills, errors, safety]
        )
        assert shown["average (rule)"] == pytest.approx((2 * skills + errors + safety) / 4)
    specific = numbers["rows"]["task-specific FT"]
    own = {name: numbers["experts"][name] for name in ("math", "code")}
    skills = (3 * own["math"]["math"]["value"] + own["math"]["code"]["value"]) / 4
    assert specific["skills"] == pytest.approx(skills)
    assert specific["errors"] == pytest.approx(1 - own["code"]["code"]["value"])


def test_seeds_repeat_the_command_and_nothing_else(folder, found):
    text = str(found)
    header, _, *rows = text.split("\n\n")[-1].strip().splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "average",
        "seed 1",
        "seed 4",
        "mean",
        "s.d.",
    ]
    by_seed = []
    numbers = json.loads((folder / "out" / "compare.json").read_text())
    for harm, refusal in ((0.1, 0.75), (0.4, 0.5)):
        base = {task: one["value"] for task, one in numbers["base"].items()}
        skills = (3 * base["math"] + base["code"]) / 4
        by_seed.append((2 * skills + 1 - base["code"] + (1 - harm + refusal + 1 - base["asr"]) / 3) / 4)
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells == ["base", *(f"{100 * value:.2f}" for value in (*by_seed, fmean(by_seed), stdev(by_seed)))]


def test_every_outcome_is_kept(folder, found):
    kept = json.loads((folder / "out" / "outcomes.json").read_text())
    numbers = json.loads((folder / "out" / "compare.json").read_text())
    for row in ("base", "math", "linear"):
        values = numbers[row] if row == "base" else numbers["experts" if row == "math" else "baselines"][row]
        for task in ("math", "code"):
            assert set(kept[row][task]) <= {0.0, 1.0}
            assert fmean(kept[row][task]) == pytest.approx(values[task]["value"])
    assert len(kept["full"]["world"]) == len((folder / "world.jsonl").read_text().splitlines())
    assert "outcomes" not in json.dumps(numbers)


def result(outcomes, error=None):
    return Result("t", "accuracy", fmean(outcomes), error, len(outcomes), "x", tuple(outcomes))


def test_the_interval_of_a_difference_is_that_of_a_naive_paired_bootstrap():
    generator = np.random.default_rng(5)
    ours = {t: result(generator.integers(0, 2, n).astype(float)) for t, n in (("a", 30), ("b", 50))}
    theirs = {
        t: result([1 - v if generator.random() < 0.2 else v for v in one.outcomes]) for t, one in ours.items()
    }
    suite = Suite((Domain("a", {"a": 1.0}, Formula("1 - x", "here"), 3.0), Domain("b", {"b": 1.0})))
    found = difference(suite.average, ours, theirs, draws=6000, seed=1)
    naive = []
    for _ in range(6000):
        means = []
        for one in (ours, theirs):
            means.append(one)
        picks = {t: generator.integers(0, len(ours[t].outcomes), len(ours[t].outcomes)) for t in ours}
        value = [
            (
                3 * (1 - np.mean(np.array(m["a"].outcomes)[picks["a"]]))
                + np.mean(np.array(m["b"].outcomes)[picks["b"]])
            )
            / 4
            for m in means
        ]
        naive.append(value[0] - value[1])
    assert found.estimate == pytest.approx(suite.score(ours) - suite.score(theirs))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(naive, [0.025, 0.975])), abs=0.012)
    assert difference(suite.average, ours, theirs, seed=3) == difference(suite.average, ours, theirs, seed=3)


def test_a_task_without_outcomes_is_drawn_from_its_standard_error():
    suite = Suite.of_tasks(["t"])
    ours, theirs = ({"t": Result("t", "score", value, 0.03, 0, "x")} for value in (0.6, 0.5))
    found = difference(suite.average, ours, theirs, draws=40_000)
    half = 1.96 * 0.03 * math.sqrt(2)
    assert (found.low, found.high) == pytest.approx((0.1 - half, 0.1 + half), abs=0.003)


def test_the_standard_error_of_an_average_follows_weights_and_formulas():
    suite = Suite(
        (Domain("a", {"a": 3.0, "b": 1.0}, weight=2.0), Domain("b", {"b": 1.0}, Formula("1 - x", "")))
    )
    results = {"a": Result("a", "m", 0.5, 0.02, 9, "x"), "b": Result("b", "m", 0.5, 0.04, 9, "x")}
    assert suite.standard_error(results) == pytest.approx(math.hypot(0.5 * 0.02, (2 / 4 - 1) / 3 * 0.04))


def test_intervals_are_printed_against_the_best_rival(found):
    block = next(part for part in str(found).split("\n\n") if part.startswith("| row"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["full", "linear"], ["lr", "linear"]]
    gap = found.suite.score(found.lines[0].rule.results) - found.suite.score(found.baselines["linear"])
    assert rows[0][2] == f"{100 * gap:+.2f}"


@pytest.mark.parametrize("name", ["T1", "T2", "T3", "T4"])
def test_the_papers_suites_give_its_averages(name):
    content = yaml.safe_load((ROOT / "examples" / "paper" / "suites" / f"{name}.yaml").read_text())
    recipe = yaml.safe_load(next((ROOT / "examples" / "paper" / name).glob("coram*.yaml")).read_text())
    assert {domain["expert"] for domain in content["in_domain"].values()} == set(recipe["experts"])
    columns = {
        "T1": (["MATH500", "HEval+", "SciQA", "CSQA", "SIQA"], [19.00, 38.54, 91.82, 82.47, 56.81], 57.73),
        "T2": (["Instr.", "Math", "Coding", "Multi.", "Safety"], [39.56, 69.83, 44.33, 41.73, 80.46], 55.18),
        "T3": (["MMSI", "EmbSp.", "MMMU-Med", "PathVQA", "OCRB.", "CharXiv"],
               [32.60, 70.58, 55.17, 66.81, 85.00, 72.50], 63.78),
        "T4": (["Instr.", "Math", "Coding", "Multi.", "Safety"], [65.06, 79.76, 58.51, 55.91, 76.00], 67.05),
    }  # fmt: skip
    names, scores, average = columns[name]
    assert list(content["in_domain"]) == names
    suite = Suite(tuple(Domain(domain, {domain: 1.0}) for domain in names))
    assert suite.average(dict(zip(names, scores, strict=True))) == pytest.approx(average, abs=0.006)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"in_domain": {"a": {"tasks": "math.jsonl", "score": "1 - y"}}}, "'y', which is no task"),
        ({"in_domain": {"a": {"tasks": "math.jsonl", "score": "x ** 2"}}}, "numbers, \\+ - \\* /"),
        ({"in_domain": {"a": {"tasks": "math.jsonl", "wieght": 2}}}, "wieght"),
        ({"in_domain": {"a": {"tasks": {"math.jsonl": 0}}}}, "positive numbers"),
        ({"in_domain": {"a": {"weight": 2}}}, "has no tasks"),
        ({"domains": {}}, "must have in_domain"),
    ],
)
def test_bad_suites_are_refused(folder, content, message):
    with pytest.raises(CoramError, match=message):
        open_suite(written(folder / "bad.yaml", content))


def test_missing_and_bad_scores_are_refused_before_anything_is_merged(folder):
    suite = written(folder / "suite.yaml", whole(folder))
    options = {"suite": suite, "baselines": ("linear",), "progress": False}
    with pytest.raises(CoramError, match="row 'base': no score of asr"):
        compare_methods(*sources(folder), **options)
    few = {row: {"asr": 0.1} for row in ("base", "linear", "full")}
    (folder / "few.json").write_text(json.dumps(few))
    with pytest.raises(CoramError, match=r"row 'full @ 1\.5': no score of asr"):
        compare_methods(*sources(folder), scores=folder / "few.json", lambdas="1.5", **options)
    found = compare_methods(*sources(folder), scores=folder / "few.json", limit=2, **options)
    specific = found.to_dict()["rows"]["task-specific FT"]
    assert specific["skills"] is not None
    assert specific["safety"] is specific["average (rule)"] is None
    (folder / "bad.json").write_text('{"base": {"asr": 12}}')
    with pytest.raises(CoramError, match="from 0 to 1, found 12"):
        read_scores(folder / "bad.json")
    with pytest.raises(CoramError, match="not the mean of its outcomes"):
        read_result("t", {"value": 0.5, "outcomes": [1, 1]}, "here", "x")
    with pytest.raises(CoramError, match="mutually exclusive"):
        compare_methods(*sources(folder), tasks=[folder / "math.jsonl"], **options)
    failing = {
        "in_domain": {"a": "harm"},
        "commands": [{"run": f"{sys.executable} -c 1/0", "tasks": ["harm"]}],
    }
    run = coram_hf("compare", *map(str, (sources(folder)[0], *sources(folder)[1])), "--no-baselines",
                   "--suite", written(folder / "fails.yaml", failing))  # fmt: skip
    assert run.returncode == 2
    assert "failed with exit code 1: Traceback" in run.stderr
    assert "ZeroDivisionError" in run.stderr
