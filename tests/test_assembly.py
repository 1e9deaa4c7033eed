"""Kept updates: the merge at another lambda without the geometry, and what a merge costs."""

import json
import os

import pytest
import yaml
from helpers.command import coram_hf
from helpers.folders import assert_same_files, on_disk
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig, CoramError, CoramMerger, MergeReport, assemble
from coram_hf.baselines import open_merger
from coram_hf.geometry import kernel

LINES = ("SS(nca+ave,variance).ties", "DEC(full)")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    base = tiny_llama()
    return on_disk(
        tmp_path_factory.mktemp("sources"), base, {"math": 0.03, "code": fine_tuned(base, 0.05, 2)}
    )


def config(line, **options):
    return CoramConfig.from_line(line, **options)


@pytest.mark.parametrize("line", LINES)
def test_an_assembled_folder_is_the_merge_at_that_lambda(line, sources, tmp_path):
    merger = CoramMerger(*sources, config(line), progress=False)
    merger.merge_to(tmp_path / "first", keep_update=tmp_path / "update")
    CoramMerger(*sources, config(line), progress=False).merge_to(tmp_path / "plain")
    assert_same_files(tmp_path / "first", tmp_path / "plain")
    report = assemble(merger, tmp_path / "update", 2.2, tmp_path / "again")
    given = CoramMerger(*sources, config(line, lam=2.2), progress=False).merge_to(tmp_path / "given")
    assert_same_files(tmp_path / "again", tmp_path / "given")
    assert (report.lam, report.lam_source, report.config) == (2.2, "given", given.config)
    assert report.c_rms == given.c_rms
    assert report.relative_updates == given.relative_updates
    assert not list(tmp_path.glob(".*"))


def test_the_geometry_is_not_computed_again(sources, tmp_path, monkeypatch):
    merger = CoramMerger(*sources, config("lr"), progress=False)
    merger.merge_to(tmp_path / "first", keep_update=tmp_path / "update")

    def forbidden(*arguments, **options):
        raise AssertionError("the geometry ran")

    monkeypatch.setattr(kernel, "GramFrame", forbidden)
    assemble(merger, tmp_path / "update", 0.7, tmp_path / "again")
    with pytest.raises(AssertionError, match="the geometry ran"):
        merger.merge_to(tmp_path / "plain")


def test_the_command(sources, tmp_path):
    base, experts = sources
    words = [base, *(f"{name}={path}" for name, path in experts.items())]
    first, update = tmp_path / "first", tmp_path / "update"
    run = coram_hf("merge", *words, "--line", "nca.ta", "-o", first, "--keep-update", update)
    assert run.returncode == 0, run.stderr
    assert "peak memory" in run.stdout
    run = coram_hf("assemble", first, update, "--lambda", "1.25", "-o", tmp_path / "again")
    assert run.returncode == 0, run.stderr
    CoramMerger(*sources, config("nca.ta", lam=1.25), progress=False).merge_to(tmp_path / "given")
    assert_same_files(tmp_path / "again", tmp_path / "given")
    recipe = yaml.safe_load((tmp_path / "again" / "coram_recipe.yaml").read_text())
    assert recipe["lam"] == 1.25
    again = coram_hf("assemble", first, update, "--lambda", "1.25", "-o", tmp_path / "again")
    assert (again.returncode, "exists" in again.stderr) == (2, True)
    wrong = coram_hf("assemble", base, update, "--lambda", "1", "-o", tmp_path / "other")
    assert "has no coram_recipe.yaml" in wrong.stderr


def test_updates_of_another_merge_are_refused(sources, tmp_path):
    merger = CoramMerger(*sources, config("lr"), progress=False)
    update = tmp_path / "update"
    merger.merge_to(tmp_path / "first", keep_update=update)
    other = CoramMerger(*sources, config("nca"), progress=False)
    with pytest.raises(CoramError, match="the update of another merge, which differs in branch, conflict"):
        assemble(other, update, 1.0, tmp_path / "out")
    with pytest.raises(CoramError, match="exists; choose another folder"):
        merger.merge_to(tmp_path / "second", keep_update=update)
    with pytest.raises(CoramError, match="holds no kept updates; merge with keep_update"):
        assemble(merger, tmp_path / "first", 1.0, tmp_path / "out")
    with pytest.raises(CoramError, match="ties has no lambda"):
        open_merger(*sources, "ties", progress=False).merge_to(tmp_path / "ties", keep_update=tmp_path / "u")
    with pytest.raises(CoramError, match="only merges by CORAM"):
        assemble(open_merger(*sources, "ties", progress=False), update, 1.0, tmp_path / "out")
    path = sources.experts["math"] / "model.safetensors"
    seen = path.stat()
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns + 10**9))
    with pytest.raises(CoramError, match="differs in files"):
        assemble(CoramMerger(*sources, config("lr"), progress=False), update, 1.0, tmp_path / "out")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert not (tmp_path / "out").exists()


def test_the_report_has_the_cost(sources, tmp_path):
    merger = CoramMerger(*sources, config("lr", scale="c_rms"), progress=False)
    report = merger.merge_to(tmp_path / "out")
    seconds, memory = report.cost["seconds"], report.cost["peak_memory"]
    assert {"opening", "geometry", "merging"} <= seconds.keys()
    assert all(spent >= 0 for spent in seconds.values())
    assert memory > 2**20
    assert json.loads((tmp_path / "out" / "coram_report.json").read_text())["cost"] == report.cost
    lines = report.facts().single
    assert lines["evaluations saved"].startswith("10 to 12")
    assert lines["time"].endswith("merging " + lines["time"].rpartition(" ")[2])
    given = CoramMerger(*sources, config("lr", lam=1.0), progress=False).merge()
    assert {"norms", "merging"} <= given.report.cost["seconds"].keys()
    assert "evaluations saved" not in given.report.facts().single
    assert report == MergeReport.load(tmp_path / "out")
