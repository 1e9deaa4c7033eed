"""Analyses across suites: on the paper's complete grid, recomputed here, and on small sweeps."""

import json
import re
from collections import Counter
from statistics import mean, median

import pytest
from helpers.command import coram_hf, summary
from helpers.paths import ROOT

from coram_hf.errors import CoramError
from coram_hf.evaluation.across import read_suites
from coram_hf.evaluation.analyse import analyse
from coram_hf.evaluation.analysis import (
    CELLS,
    by_threshold,
    components,
    distribution,
    distribution_of,
    gaps,
    held_out,
    one_configuration,
    without_spread_only,
)

GRID = ROOT / "examples" / "paper" / "grid.json"
RAW = json.loads(GRID.read_text())["suites"]
PRINTED = {
    "CORAM": (57.72, 42.75, 63.95, 54.49),
    "CORAM+RP": (None, 42.31, 64.38, 54.56),
    "CORAM+SS": (57.84, 42.93, 63.96, 54.15),
    "CORAM+SS+RP": (None, 43.30, 64.27, 54.71),
    "CORAM-C": (57.60, 42.96, 64.02, 54.32),
    "CORAM-C+RP": (None, 43.32, 64.20, 54.37),
    "CORAM-C+SS": (57.98, 42.99, 64.14, 53.77),
    "CORAM-C+SS+RP": (None, 43.48, 64.33, 54.41),
}
"""The paper's component table (tab:ablation), for T1 to T4."""


@pytest.fixture(scope="module")
def suites():
    return {suite.name: suite for suite in read_suites([GRID])}


def test_the_grid_is_complete(suites):
    rows = [row for suite in RAW.values() for row in suite["lines"]]
    assert len(rows) == 238
    assert sum(row["evaluated"] for row in rows) == 1645
    assert [len(suites[name].lines) for name in ("T1", "T2", "T3", "T4", "Gemma-2-2B")] == [31, 76, 61, 70, 0]


def test_component_cells_are_the_papers_but_for_the_slip_and_the_six_tasks_of_t3(suites):
    assert set(PRINTED) == set(CELLS)
    for i, name in enumerate(("T1", "T2", "T4")):
        found = components(suites[name].lines)
        for cell, printed in PRINTED.items():
            expected = printed[(0, 1, 3)[i]]
            if (name, cell) == ("T2", "CORAM+RP"):
                assert (found[cell].line, round(100 * found[cell].score, 2)) == ("lr.ties", 43.11)
                assert expected == 42.31
            elif expected is None:
                assert cell not in found
            else:
                assert round(100 * found[cell].score, 2) == expected, (name, cell)
    five = components(suites["T3"].lines)
    assert "CORAM+SS+RP" not in five
    assert all(round(100 * best.score, 2) < PRINTED[cell][2] for cell, best in five.items())


def test_best_lambdas_of_t4(suites):
    kept = without_spread_only(suites["T4"])
    found = distribution(kept)
    assert len(kept) == 45
    assert found.counts == {1.0: 16, 1.1: 10, 1.2: 9, 1.25: 4, 1.3: 6}
    assert found.median == 1.1
    by_hand = [
        row["best"]["lam"] for row in RAW["T4"]["lines"] if not row["table"].startswith("tab:grid_spread")
    ]
    assert found.counts == dict(sorted(Counter(by_hand).items()))
    assert found.median == median(by_hand)
    printed = list(suites["T4"].optima.values())
    assert (len(printed), distribution_of(printed).median) == (12, 1.2)


def test_kappa_of_the_other_bases_is_the_mean_of_midpoints(suites):
    found = {one.suite: one for one in held_out(list(suites.values()), 7.5, ("full",))}
    assert {name: round(one.kappa, 3) for name, one in found.items()} == {
        "T1": 1.107,
        "T2": 1.077,
        "T3": 1.103,
    }
    middle = {name: mean(RAW[name]["kappa_range"]) for name in RAW}
    assert found["T2"].kappa == pytest.approx((middle["T1"] + middle["T3"] + middle["Gemma-2-2B"]) / 3)
    assert (round(found["T1"].predicted, 2), found["T1"].lam, round(100 * found["T1"].gap, 2)) == (
        2.47,
        2.5,
        0,
    )
    assert (round(found["T2"].predicted, 2), found["T2"].lam, round(100 * found["T2"].gap, 2)) == (
        2.41,
        2.5,
        0.29,
    )
    lr = {one.suite: one for one in held_out(list(suites.values()), 7.5, ("lr",))}["T3"]
    assert (round(lr.predicted, 2), lr.lam, round(100 * lr.gap, 2)) == (1.91, 1.9, 0.36)


def test_gaps_by_threshold(suites):
    found = by_threshold(list(suites.values()), (2.0, 4.0, 12.0, 20.0))
    for threshold in (4.0, 12.0):
        left = {name: round(100 * gap, 2) for name, (_, gap) in found[threshold].items()}
        assert left == {"T1": 0.23, "T2": 0.0, "T3": 0.11, "T4": 0.28}
    assert found[20.0]["T4"] == (1.15, None)
    assert found[2.0]["T1"] == (0.5, None)
    worst = {
        f"{name} {row['line']}": round(row["best"]["average"] - row["rule"]["average"], 2)
        for name, suite in RAW.items()
        for row in suite["lines"]
    }
    above = [gap for gap in worst.values() if gap > 0.72]
    assert (len(above), max(above)) == (14, 2.05)
    ours = {name: gaps(suite.lines, 0.0072) for name, suite in suites.items() if suite.lines}
    assert sum(one.above for one in ours.values()) == 14
    assert sum(one.lines for one in ours.values()) == 238
    assert (ours["T4"].line, round(100 * ours["T4"].largest, 2)) == ("nca.tsvm", 2.05)
    assert max(ours.values(), key=lambda one: one.largest) is ours["T4"]
    assert ours["T2"].mean == pytest.approx(
        mean(row["best"]["average"] - row["rule"]["average"] for row in RAW["T2"]["lines"]) / 100
    )


def test_one_configuration_leaves_the_residual_out_where_none_applies(suites):
    found = {one.line: one for one in one_configuration(list(suites.values()))}
    named = [{row["line"] for row in RAW[name]["lines"]} for name in ("T2", "T3", "T4")]
    bare = {row["line"] for row in RAW["T1"]["lines"]}
    shared = set.intersection(*named)
    assert set(found) == {line for line in shared if re.sub(r"\.\w+$", "", line) in bare}
    full = {name: round(100 * score, 2) for name, score in found["full"].scores.items()}
    assert full == {"T1": 57.72, "T2": 42.75, "T3": 63.18, "T4": 54.33}
    assert found["lr.ta"].scores["T1"] == pytest.approx(0.5748)
    assert found["full"].behind["T4"] == pytest.approx(0.0038)
    order = [mean(one.behind.values()) for one in one_configuration(list(suites.values()))]
    assert order == sorted(order)


def own_sweep(folder, dispersion, best):
    """A sweep of two experts whose score falls off as the square of the distance from `best`."""
    points = [{"lam": lam, "average": 0.8 - (lam - best) ** 2 / 10} for lam in (0.5, 0.7, 1.0, 1.4, 1.6, 2.0)]
    top = max(points, key=lambda point: point["average"])
    rule = points[4] if dispersion < 7.5 else points[1]
    line = {
        "line": "full", "dispersion": dispersion, "sqrt_n": 2**0.5, "rule": rule, "best": top,
        "kappa_best": top["lam"] / 2**0.5, "points": points,
    }  # fmt: skip
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps({"lines": [line]}))
    return folder


def test_own_sweeps_stand_beside_the_papers_bases(tmp_path):
    paths = [own_sweep(tmp_path / "mine", 2.0, 1.4), own_sweep(tmp_path / "uneven", 20.0, 0.7)]
    found = analyse([*paths, GRID], thresholds=(7.5, 30), output=tmp_path / "out")
    numbers = json.loads((tmp_path / "out" / "analysis.json").read_text())
    rows = {row["suite"]: row for row in numbers["kappa_opt"]}
    assert rows["mine"]["lowest"] == rows["mine"]["highest"] == pytest.approx(1.4 / 2**0.5)
    assert [row["dispersion"] for row in numbers["kappa_opt"]] == sorted(
        r["dispersion"] for r in rows.values()
    )
    assert numbers["thresholds"]["30"]["uneven"] == [1.15, pytest.approx((1.6 - 0.7) ** 2 / 10)]
    assert numbers["thresholds"]["7.5"]["uneven"] == [0.5, pytest.approx(0)]
    held = {one["suite"]: one for one in numbers["held_out"]}
    assert "uneven" not in held
    assert held["mine"]["kappa"] == pytest.approx(mean((1.075, 1.165, 1.085, 1.07)))
    assert (tmp_path / "out" / "kappa.png").stat().st_size > 5000
    assert (tmp_path / "out" / "analysis.md").read_text() == str(found)
    alone = analyse(paths)
    assert {"Gemma-2-9B (paper)", "mine"} <= {row[0] for row in alone.kappas()}
    assert "needs two suites" in str(alone)


def test_the_command_prints_the_papers_components_and_refuses_other_files(tmp_path):
    run = coram_hf("analyse", GRID)
    assert run.returncode == 0
    printed = run.stdout
    assert (
        "| CORAM-C+SS+RP | n/a | 43.48 `SS(ca+ave,variance).ties` | 63.52 `SS(nca,variance).ta` |" in printed
    )
    assert "1: 16, 1.1: 10, 1.2: 9, 1.25: 4, 1.3: 6" in printed
    shown = summary(printed)
    gap = {
        (row["line"], suite): row["best"]["average"] - row["rule"]["average"]
        for suite, content in RAW.items()
        for row in content["lines"]
    }
    worst = max(gap, key=gap.get)
    assert shown["lines"] == "238"
    assert shown["mean gap of the rule"] == f"{mean(gap.values()):.2f}"
    assert shown["largest gap of the rule"] == f"{gap[worst]:.2f} ({', '.join(worst)})"
    assert shown["lines above 0.72"] == str(sum(value > 0.72 + 1e-9 for value in gap.values()))
    assert "written to" not in shown
    (tmp_path / "sweep.json").write_text('{"tasks": []}')
    with pytest.raises(CoramError, match="neither a sweep"):
        read_suites([tmp_path])
    with pytest.raises(CoramError, match="two suites are called 'T1'"):
        read_suites([GRID, GRID])
