"""Sweeps: what is scored, what is concluded from it, and that an interruption changes nothing."""

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.command import coram_hf, summary
from helpers.models import fine_tuned, snapshot, tiny_llama, tiny_tokenizer
from helpers.paths import TESTS
from helpers.suites import LAMBDAS, LINES, accuracy, assembled, make_suite, sources, sweep, task_files
from scipy.stats import binomtest
from transformers import AutoModelForCausalLM

from coram_hf import CoramConfig, CoramError, CoramMerger, run_sweep
from coram_hf.baselines import merge
from coram_hf.evaluation.cost import cost_table
from coram_hf.evaluation.scores import Line, Point
from coram_hf.evaluation.sweep import parse_lambdas
from coram_hf.evaluation.tasks import LightScorer, check_scores
from coram_hf.merger import Merger
from coram_hf.report.eval_results import Result

OUTPUT = ("sweep.json", "sweep.md", "sweep.png")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return make_suite(tmp_path_factory.mktemp("suite"))


def contents(folder):
    return {name: (folder / name).read_bytes() for name in OUTPUT}


@pytest.fixture(scope="module")
def whole(suite):
    """A sweep that nothing interrupts."""
    return sweep(suite, output=suite / "whole")


def test_a_result_is_rescaled_in_place():
    base = tiny_llama()
    experts = [fine_tuned(base, 0.1, seed) for seed in range(2)]
    before = snapshot(base)
    config = CoramConfig.from_line("full.ties", lam=1.0)
    result = CoramMerger(base, experts, config, progress=False).merge()
    at_one = snapshot(result.model)
    other = result.with_lambda(3.0)
    model = result.model
    for lam in (2.25, 0.0, 1.0, 3.0):
        result.rescale_(lam)
        assert result.model is model
        assert (result.report.lam, result.report.lam_source) == (lam, "given")
        targets = set(CoramMerger(base, experts, config, progress=False).inspect().targets)
        for name, tensor in model.state_dict().items():
            start, end = before[name].double(), at_one[name].double()
            expected = start + lam * (end - start) if name in targets else end
            torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-6)
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    assert other.report == result.report
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    with pytest.raises(ValueError, match="lam must be a finite number"):
        result.rescale_(math.nan)
    forgetful = CoramMerger(base, experts, config, progress=False).merge(keep_update=False)
    with pytest.raises(CoramError, match="keep_update=True"):
        forgetful.rescale_(2.0)


def test_every_point_is_the_score_of_that_merge(suite, whole):
    base = AutoModelForCausalLM.from_pretrained(suite / "base")
    merged = CoramMerger(*sources(suite), CoramConfig(lam=1.0), progress=False).merge().model
    line = whole.lines[0]
    rule = 1.15 * math.sqrt(2)
    assert [point.lam for point in line.points] == pytest.approx([0.5, 1.0, 1.5, rule, 2.0, 2.5])
    for point in line.points:
        model = assembled(base, merged, point.lam)
        for path in task_files(suite):
            assert point.results[path.stem].value == accuracy(model, path), (point.lam, path)
    assert len({point.average for point in line.points}) > 2


def test_what_is_concluded(suite, whole):
    numbers = json.loads((suite / "whole" / "sweep.json").read_text())
    assert numbers["tasks"] == ["math", "code"]
    assert [line["line"] for line in numbers["lines"]] == list(LINES)
    plan = CoramMerger(*sources(suite), CoramConfig(), progress=False).inspect()
    for line in numbers["lines"]:
        averages = {}
        for point in line["points"]:
            values = [found["value"] for found in point["results"].values()]
            averages[point["lam"]] = sum(values) / 2
            assert point["average"] == pytest.approx(averages[point["lam"]])
        assert line["dispersion"] == pytest.approx(plan.dispersion)
        assert line["kappa"] == 1.15
        assert line["relative_updates"] == pytest.approx(plan.relative_updates)
        assert line["rule"]["lam"] == pytest.approx(1.15 * math.sqrt(2))
        assert line["rule"]["average"] == averages[line["rule"]["lam"]]
        assert line["best"]["average"] == max(averages.values())
        assert averages[line["best"]["lam"]] == max(averages.values())
        assert line["gap"] == line["best"]["average"] - line["rule"]["average"] >= 0
        assert line["kappa_best"] == pytest.approx(line["best"]["lam"] / math.sqrt(2))
        assert set(line["sources"]) == {"", "math", "code"}
        assert CoramConfig.from_dict(line["config"]).line == line["line"]
    assert max(line["gap"] for line in numbers["lines"]) > 0


def test_references_are_the_merges_of_others(suite, whole):
    assert list(whole.references) == ["base", "ties"]
    models = {
        "base": AutoModelForCausalLM.from_pretrained(suite / "base"),
        "ties": merge(*sources(suite), "ties", progress=False).model,
    }
    for name, model in models.items():
        for path in task_files(suite):
            assert whole.references[name][path.stem].value == accuracy(model, path)


def test_the_table_has_the_papers_layout(suite, whole):
    text = (suite / "whole" / "sweep.md").read_text()
    assert str(whole) == text
    blocks = [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        for block in text.split("\n\n")
    ]
    summary, points, references = blocks[:3]
    assert summary[0][0:1] + summary[0][3:] == [
        "line", "rule lambda", "rule score", "s.e.", "best lambda", "best score", "gap",
    ]  # fmt: skip
    for cells, line in zip(summary[2:], whole.lines, strict=True):
        assert cells[0] == line.name
        shown = [
            1.15 * math.sqrt(2),
            100 * line.rule.average,
            100 * math.hypot(*(one.standard_error for one in line.rule.results.values())) / 2,
            line.best.lam,
            100 * line.best.average,
            100 * line.gap,
        ]
        assert cells[3:] == [f"{value:.2f}" for value in shown]
    assert points[0] == ["line", "lambda", "math", "code", "average", ""]
    assert len(points) == 2 + 2 * 6
    assert [cells[-1] for cells in points[2:]].count("rule") + str(points).count("rule best") == 2
    assert [cells[0] for cells in references[2:]] == ["base", "ties"]
    assert (suite / "whole" / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_several_slice_heights(suite):
    configs = [CoramConfig.from_line("lr", slice_height=height) for height in (4, 8)]
    options = {"tasks": task_files(suite), "baselines": (), "progress": False}
    found = run_sweep(*sources(suite), configs, lambdas=[2.0], **options)
    assert [line.name for line in found.lines] == ["lr (h=4)", "lr"]
    base = AutoModelForCausalLM.from_pretrained(suite / "base")
    for config, line in zip(configs, found.lines, strict=True):
        given = CoramConfig.from_dict({**config.to_dict(), "lam": 1.0})
        merged = CoramMerger(*sources(suite), given, progress=False).merge().model
        model = assembled(base, merged, 2.0)
        for path in task_files(suite):
            assert line.points[-1].results[path.stem].value == accuracy(model, path)


class StopError(Exception):
    pass


@pytest.fixture
def counted(monkeypatch):
    """Count the scores, and stop after so many; count the merges."""
    seen = {"scores": 0, "merges": 0, "stop": math.inf}
    call, geometry = LightScorer.__call__, Merger.merge

    def scored(self, model, tokenizer):
        if seen["scores"] >= seen["stop"]:
            raise StopError
        seen["scores"] += 1
        return call(self, model, tokenizer)

    def merged(self, **options):
        seen["merges"] += options.get("keep_update", True)  # lines are kept, references are not
        return geometry(self, **options)

    monkeypatch.setattr(LightScorer, "__call__", scored)
    monkeypatch.setattr(Merger, "merge", merged)
    return seen


TOTAL = 2 * 2 * 6 + 2 * 2
"""Tasks x lines x lambdas, and the tasks of two references."""


@pytest.mark.parametrize("stop", [0, 1, 7, 12, 25])
def test_interrupted_and_resumed_it_gives_the_same_table(suite, whole, counted, tmp_path, stop):
    counted["stop"] = stop
    with pytest.raises(StopError):
        sweep(suite, output=tmp_path)
    assert counted["scores"] == stop
    assert not any((tmp_path / name).exists() for name in OUTPUT)
    counted |= {"stop": math.inf, "scores": 0, "merges": 0}
    resumed = sweep(suite, output=tmp_path)
    assert counted["scores"] == TOTAL - stop
    assert counted["merges"] == (2 if stop < 12 else 1 if stop < 24 else 0)
    assert contents(tmp_path) == contents(suite / "whole")
    assert str(resumed) == str(whole)
    journal = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines() if line]
    known = json.loads((tmp_path / "cost.json").read_text())
    spent = [p["seconds"] for line in known["lines"] for p in (*line["points"], {"seconds": line["merging"]})]
    total = sum(spent) + known["references"]
    assert total == pytest.approx(sum(entry["seconds"] for entry in journal), abs=0.03)
    assert min(p["seconds"] for line in known["lines"] for p in line["points"]) > 0
    counted |= {"scores": 0, "merges": 0}
    again = sweep(suite, output=tmp_path)
    assert (counted["scores"], counted["merges"]) == (0, 0)
    assert cost_table(again.cost) == (tmp_path / "cost.md").read_text()
    for line, cost in zip(again.lines, again.cost["lines"], strict=True):
        others = [point.seconds for point in line.points if point is not line.rule]
        assert (cost["evaluations_saved"], cost["seconds_saved"]) == (5, sum(others))
    assert contents(tmp_path) == contents(suite / "whole")


KILLED = """
import os, signal, sys
from pathlib import Path
from coram_hf.evaluation.tasks import LightScorer
from helpers.suites import sweep
call, seen = LightScorer.__call__, []
def scored(self, model, tokenizer):
    if len(seen) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    seen.append(1)
    return call(self, model, tokenizer)
LightScorer.__call__ = scored
sweep(Path(sys.argv[1]), output=sys.argv[2])
"""


@pytest.mark.slow
def test_killed_and_resumed_it_gives_the_same_table(suite, whole, counted, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", KILLED, suite, tmp_path], env=environment, capture_output=True
    )
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    with (tmp_path / "points.jsonl").open("ab") as journal:
        journal.write(b'\n{"key": "torn in the mid')
    sweep(suite, output=tmp_path)
    assert counted["scores"] == TOTAL - 9
    assert contents(tmp_path) == contents(suite / "whole")


def test_what_has_changed_is_scored_again(suite, counted, tmp_path):
    for name in ("base", "math", "code"):
        shutil.copytree(suite / name, tmp_path / name)
    for path in (*task_files(suite), suite / "world.jsonl"):
        shutil.copy(path, tmp_path)

    def scores(**options):
        counted["scores"] = 0
        sweep(tmp_path, output=tmp_path / "out", **options)
        return counted["scores"]

    assert scores() == TOTAL
    assert scores() == 0
    assert scores(lambdas="0.5:3:0.5") == 2 * 2
    assert scores(tasks=[*task_files(tmp_path), tmp_path / "world.jsonl"]) == TOTAL // 2
    assert scores(limit=5) == TOTAL
    text = (tmp_path / "code.jsonl").read_text()
    (tmp_path / "code.jsonl").write_text(text.replace('"answer": 1', '"answer": 2', 1))
    assert scores() == TOTAL // 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "math")
    fine_tuned(model, 0.1, 5).save_pretrained(tmp_path / "math")
    assert scores() == TOTAL


def test_the_output_is_a_folder(suite, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        sweep(suite, output=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="contains a model"):
        sweep(suite, output=suite / "base")
    assert not (suite / "base" / "points.jsonl").exists()


def test_models_in_memory_are_never_taken_for_others(suite, counted, tmp_path):
    base = tiny_llama(7)
    experts = [fine_tuned(base, 0.5, seed) for seed in range(2)]
    given = {"lambdas": [1.0], "tasks": task_files(suite), "baselines": (), "progress": False}
    for _ in range(2):
        counted["scores"] = 0
        run_sweep(base, experts, output=tmp_path, tokenizer=tiny_tokenizer(), **given)
        assert counted["scores"] == 2 * 3
    counted["merges"] = 0
    with pytest.raises(CoramError, match="the base has no tokenizer"):
        run_sweep(base, experts, **given)
    assert counted["merges"] == 0


def in_memory(model):
    """Whether a model's weights are anything but a map of a file."""
    weight = model.get_input_embeddings().weight
    if weight.is_meta:
        return False
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split()
        start, end = (int(edge, 16) for edge in span.split("-"))
        if start <= weight.data_ptr() < end:
            return not path.endswith(".safetensors")
    raise AssertionError("the weights are nowhere")


def test_one_model_at_a_time(suite, monkeypatch):
    """While scores are made, the weights of no other model are in memory, but for maps of its files."""
    others = []
    call = LightScorer.__call__

    def scored(self, model, tokenizer):
        gc.collect()
        models = [m for m in gc.get_objects() if type(m) is type(model)]
        alike = [m for m in models if m is not model and m.name_or_path == model.name_or_path]
        others.append(sum(in_memory(m) for m in alike))
        return call(self, model, tokenizer)

    monkeypatch.setattr(LightScorer, "__call__", scored)
    sweep(suite, lambdas=[1.0, 2.0])
    assert others == [0] * (2 * 2 * 3 + 2 * 2)


def test_a_tie_with_the_rule_is_no_optimum_at_the_end():
    """Only a lambda that is better than all others, and outermost, asks for a wider range."""

    def line(averages, rule):
        points = tuple(
            Point(lam, {"t": Result("t", "accuracy", value, 0.0, 4, "light")})
            for lam, value in averages.items()
        )
        return Line(CoramConfig(), {"lam": rule}, points, {})

    assert not line({1.0: 0.5, 1.2: 0.5, 1.6: 0.5}, 1.6).at_edge
    assert not line({1.0: 0.25, 1.2: 0.5, 1.6: 0.5}, 1.6).at_edge
    assert not line({1.0: 0.5, 1.6: 0.5}, 1.0).at_edge
    assert line({1.0: 0.25, 1.2: 0.5, 1.6: 0.75}, 1.2).at_edge
    assert not line({1.6: 0.5}, 1.6).at_edge


def test_an_average_of_perfect_scores_is_still_uncertain():
    perfect = {name: Result(name, "accuracy", 1.0, 0.0, 4, "light") for name in ("a", "b")}
    low, high = proportion_interval(4, 4)
    assert Point(1.0, perfect).uncertainty == pytest.approx((2 * ((high - low) / 2) ** 2) ** 0.5 / 2)
    unknown = {"a": Result("a", "f1", 1.0, None, 4, "lm-eval")}
    assert Point(1.0, unknown).uncertainty is None


def proportion_interval(right, count):
    found = binomtest(right, count).proportion_ci(method="wilson")
    return found.low, found.high


def test_of_equal_optima_the_nearest_to_the_rule():
    def point(lam, value):
        return Point(lam, {"t": Result("t", "accuracy", value, None, 10, "x")})

    points = tuple(
        point(lam, value) for lam, value in ((1, 0.5), (1.4, 0.7), (1.6, 0.6), (2, 0.7), (2.4, 0.4))
    )
    line = Line(CoramConfig(), {"lam": 1.6}, points, {})
    assert (line.rule.lam, line.best.lam, line.at_edge) == (1.6, 1.4, False)
    assert line.gap == pytest.approx(0.1)
    assert Line(CoramConfig(), {"lam": 1.6}, points[2:], {}).best.lam == 2
    assert Line(CoramConfig(), {"lam": 2.4}, points[1:2] + points[-1:], {}).at_edge


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1.0:3.0:0.1", [round(1 + i / 10, 1) for i in range(21)]),
        ("0:1:0.3", [0, 0.3, 0.6, 0.9]),
        ("1:1:1", [1]),
        ("2,1, 1.5,1", [1, 1.5, 2]),
        ("1e0:1.2:1e-1", [1, 1.1, 1.2]),
    ],
)
def test_ranges(text, numbers):
    assert parse_lambdas(text) == numbers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1:2",
        "1:2:0",
        "2:1:0.1",
        "1:2:-1",
        "a:b:c",
        "1:2:3:4",
        "1,,2",
        "nan",
        "1:inf:1",
        "0:1:1e-9",
        "1;2",
    ],
)
def test_bad_ranges(suite, text, tmp_path):
    with pytest.raises(ValueError, match="lambda"):
        sweep(suite, lambdas=text, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": []}, "pass at least one"),
        ({"tasks": ["nowhere.jsonl"]}, "nowhere.jsonl"),
        ({"baselines": ["tise"]}, "unknown baseline 'tise'; did you mean 'ties'"),
        ({"limit": 0}, "limit must be a positive number"),
        ({"lambdas": [1.0, math.inf]}, "lambda must be a finite number"),
        ({"progres": True}, "did you mean 'progress'"),
    ],
)
def test_bad_options_are_named_before_any_work(suite, counted, tmp_path, options, message):
    with pytest.raises((ValueError, OSError), match=message.replace(".", r"\.")):
        sweep(suite, output=tmp_path / "out", **options)
    assert (counted["scores"], counted["merges"]) == (0, 0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "pass at least one"),
        (["full", "full"], "'full' is given twice"),
        (["ful"], "unknown branch or conflict mode 'ful'"),
        ([CoramConfig(lam=2.0)], "has lam=2"),
        ([CoramConfig(), CoramConfig.from_line("lr", balance="damp")], "the same weights, balance"),
    ],
)
def test_bad_lines_are_named(suite, lines, message):
    with pytest.raises(ValueError, match=message):
        run_sweep(*sources(suite), lines, lambdas=[1.0], tasks=task_files(suite))


def test_from_the_command_line(suite, whole, tmp_path):
    math_task, code_task = task_files(suite)
    given = (
        "sweep", suite / "base", suite / "math", suite / "code", "--line", LINES[0], "--line", LINES[1],
        "--lambda", LAMBDAS, "--tasks", f"{math_task},{code_task}", "--baseline", "ties",
    )  # fmt: skip
    run = coram_hf(*given, "-o", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert "| line" not in run.stdout, "the tables are in the folder"
    shown = summary(run.stdout)
    best = max(whole.lines, key=lambda line: line.best.average)
    ruled = max(whole.lines, key=lambda line: line.rule.average)
    assert shown["points scored"] == str(sum(len(line.points) for line in whole.lines))
    assert shown["base"] == f"{100 * whole.reference_averages['base']:.2f}"
    assert shown["best baseline"] == f"{100 * whole.reference_averages['ties']:.2f} (ties)"
    assert shown["best at the rule's lambda"].startswith(
        f"{100 * ruled.rule.average:.2f} ({ruled.name}, lambda 1.63"
    )
    assert shown["best at any lambda"].startswith(f"{100 * best.best.average:.2f} ({best.name}, lambda")
    assert shown["the rule alone saves"].startswith(f"{len(best.points) * 2 - 2} evaluations, ")
    assert shown["written to"] == str(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(suite / "whole")
    heights = coram_hf(
        "sweep", suite / "base", suite / "math", suite / "code", "--lambda", "1,2", "--tasks", math_task,
        "--slice-height", 4, "--slice-height", 16, "--no-baselines", "--limit", 5, "-o", tmp_path / "heights",
        "--branch", "lr",
    )  # fmt: skip
    assert heights.returncode == 0, heights.stderr
    numbers = json.loads((tmp_path / "heights" / "sweep.json").read_text())
    assert [line["line"] for line in numbers["lines"]] == ["lr (h=4)", "lr (h=16)"]
    assert list(numbers["references"]) == ["base"]
    assert numbers["references"]["base"]["math"]["questions"] == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lambda", "3:1:0.1"], "expected start <= stop and step > 0"),
        (["--lambda", "1", "--tasks", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--lambda", "1", "--line", "ful"], "unknown branch or conflict mode 'ful'"),
        (["--lambda", "1", "--baseline", "tise"], "did you mean 'ties'"),
        (["--lambda", "1", "--baseline", "ties", "--no-baselines"], "are mutually exclusive"),
        (["--lambda", "1", "--method", "ties"], "No such option"),
        (["./nowhere", "--lambda", "1"], "nowhere"),
        (["--lambda", "1", "--line", "full (h=4)", "--slice-height", "8"], "already given by the line"),
        ([], "name the lambdas to score"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(suite, tmp_path, arguments, message):
    task = task_files(suite)[0]
    run = coram_hf(
        "sweep", suite / "base", suite / "math", "--tasks", task, "-o", tmp_path / "out", *arguments
    )
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()


def test_losses_are_no_scores():
    class Loss:
        name, lower_is_better = "perplexity", True

    with pytest.raises(ValueError, match="'perplexity' has a lower-is-better metric"):
        check_scores([Loss()])
