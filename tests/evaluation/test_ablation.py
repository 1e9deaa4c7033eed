"""Ablations: grids, shared geometries, and the tables, against merges made one by one."""

import json
import math
from itertools import pairwise

import pytest
import torch
import yaml
from helpers.command import coram_hf
from helpers.suites import accuracy, make_suite, sources, task_files

from coram_hf import CoramConfig, CoramMerger
from coram_hf.errors import CoramError
from coram_hf.evaluation.ablation import pareto, run_ablation
from coram_hf.evaluation.bench import Bench
from coram_hf.evaluation.grids import changed, expand
from coram_hf.evaluation.memory import Memory
from coram_hf.merger import Merger


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_suite(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def suite(folder):
    path = folder / "suite.yaml"
    content = {"in_domain": {path.stem: str(path) for path in task_files(folder)},
               "out_of_domain": {"world": str(folder / "world.jsonl")}}  # fmt: skip
    path.write_text(yaml.safe_dump(content))
    return path


def test_grids_are_the_papers():
    full = CoramConfig()
    assert [one.line for one in expand(full, ["residual"])] == ["full", "full.ta", "full.ties", "full.tsvm"]
    assert [one.line for one in expand(full, ["conflict"])] == ["full", "nca", "nca+ave", "ca", "ca+ave"]
    assert {one.slice_height for one in expand(full, ["height"])} == {8, 16, 32, 64}
    lines = [one.line for one in expand(full, ["all"])]
    assert len(lines) == len(set(lines)) == 6 * 6 * 4 + 3
    geometries = [
        line.rpartition(".")[0] if line.endswith(("ta", "ties", "tsvm")) and "." in line else line
        for line in lines
    ]
    changes = sum(a != b for a, b in pairwise(geometries))
    assert changes == len(set(geometries)) - 1
    assert changed(full, CoramConfig(residual="ta")) == "residual"
    assert changed(full, CoramConfig(residual="ta", spread="mean")) is None
    with pytest.raises(CoramError, match="unknown grid 'hight'"):
        expand(full, ["hight"])


def test_a_shared_geometry_gives_the_weights_of_a_merge_of_its_own(folder, monkeypatch):
    merges = []
    merge = Merger.merge
    monkeypatch.setattr(
        Merger, "merge", lambda self, **options: merges.append(self) or merge(self, **options)
    )
    seen = {}

    class Watch:
        name = identity = "watch"

        def __call__(self, model, reader):
            from coram_hf.report.eval_results import Result

            seen[len(seen)] = {name: value.clone() for name, value in model.state_dict().items()}
            return [Result("watch", "score", 0.5, None, 1, "x")]

    bench = Bench(*sources(folder), Memory(None), CoramConfig().shared, {"progress": False})
    lines = ("full", "full.ta", "full.ties", "full", "lr.ta")
    for line in lines:
        bench.line(CoramConfig.from_line(line), (), [Watch()], share=True)
    assert len(merges) == 2
    for i, line in enumerate(lines):
        own = CoramMerger(*sources(folder), CoramConfig.from_line(line), progress=False).merge().model
        for name, value in own.state_dict().items():
            assert torch.equal(seen[i][name], value), (line, name)


def test_numbers_tables_and_resuming(folder, suite, monkeypatch):
    options = {"suite": suite, "baselines": ("linear",), "output": folder / "out", "progress": False}
    found = run_ablation(
        *sources(folder), "full", grids=["residual", "height"], lambdas=(1.0, 2.0), **options
    )
    names = [line.name for line in found.lines]
    rule = 1.15 * math.sqrt(2)
    for line in found.lines:
        config = CoramConfig.from_line(line.name.partition(" ")[0], slice_height=line.config.slice_height)
        model = CoramMerger(*sources(folder), config, progress=False).merge().model
        inside = [accuracy(model, path) for path in task_files(folder)]
        assert line.rule.average == pytest.approx(sum(inside) / 2), line.name
        expected = [rule, 1.10 * math.sqrt(2), *([1.0, 2.0] if line.name == "full" else [])]
        assert [point.lam for point in line.points] == pytest.approx(sorted(expected))
    text = (folder / "out" / "ablation.md").read_text()
    assert text == str(found)
    cells = {
        row.split("|")[1].strip(): row.split("|")[2].strip()
        for row in text.splitlines()
        if row.startswith("| CORAM")
    }
    best = max(found.lines[i].rule.average for i, name in enumerate(names) if "." in name)
    assert cells["CORAM+RP"] == f"{100 * best:.2f}"
    assert cells["CORAM"] == f"{100 * found.lines[0].rule.average:.2f}"
    assert cells["CORAM-C+SS+RP"] == "-"
    assert "## Matched pairs" in text
    assert "## Slice height" in text
    assert "## kappa 1.10" in text
    assert (folder / "out" / "ablation.png").stat().st_size > 5000
    monkeypatch.setattr(Merger, "merge", lambda *given, **options: pytest.fail("merged again"))
    again = run_ablation(
        *sources(folder), "full", grids=["residual", "height"], lambdas=(1.0, 2.0), **options
    )
    assert str(again) == text


def test_the_front_of_two_averages():
    points = {"a": (1.0, 0.0), "b": (0.5, 0.5), "c": (0.5, 0.4), "d": (0.2, 0.9), "e": (2.0, None)}
    assert pareto(points) == {"a", "b", "d"}


def test_the_command_takes_a_grid(folder, suite):
    base, experts = sources(folder)
    options = ("--suite", suite, "--no-baselines", "--limit", "4", "-o", folder / "branches")
    run = coram_hf("sweep", base, *experts, "--grid", "branch", *options)
    assert run.returncode == 0, run.stderr
    assert "merge it as well" not in run.stderr
    lines = json.loads((folder / "branches" / "ablation.json").read_text())["lines"]
    assert [line["line"] for line in lines][:2] == ["full", "lr"]
    assert len(lines) == 7
    run = coram_hf("sweep", base, *experts, "--suite", suite, "-o", folder / "none")
    assert run.returncode == 2
    assert "--grid all" in run.stderr
