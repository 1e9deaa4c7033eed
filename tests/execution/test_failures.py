"""What an error leaves behind: a refusal nothing, everything else the work that was done."""

import json
import math

import pytest
import torch
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama
from safetensors.torch import load_file, save_file

from coram_hf import CoramConfig, CoramError, CoramMerger, load_report
from coram_hf.hub import publish

LINE = CoramConfig.from_line("full.ta")


@pytest.fixture
def suite(tmp_path):
    on_disk(tmp_path, experts=(0.02, 0.02))
    return tmp_path


def merger(suite, config=LINE):
    return CoramMerger(suite / "base", [suite / "e0", suite / "e1"], config, progress=False)


def edit(path, name, change):
    """Change one tensor of a safetensors file."""
    tensors = load_file(path)
    change(tensors[name])
    save_file(tensors, path, {"format": "pt"})


def test_a_figure_that_cannot_be_drawn_loses_nothing(suite, monkeypatch, caplog):
    merger(suite).merge_to(suite / "expected")

    def broken(*_):
        raise TypeError("no such axis")

    with monkeypatch.context() as patched:
        patched.setattr(publish, "draw_updates", broken)
        with pytest.raises(TypeError, match="no such axis"):
            merger(suite).merge_to(suite / "merged")
    assert not (suite / "merged").exists()
    assert (suite / ".merged.coram" / "files" / "model.safetensors").is_file()
    assert "run the same command again to resume" in caplog.text

    with monkeypatch.context() as patched:
        patched.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("merged again"))
        merger(suite).merge_to(suite / "merged")
    for name in ("model.safetensors", "README.md"):
        assert (suite / "merged" / name).read_bytes() == (suite / "expected" / name).read_bytes()
    found, expected = (load_report(suite / folder).to_dict() for folder in ("merged", "expected"))
    assert {**found, "cost": None} == {**expected, "cost": None}
    assert not (suite / ".merged.coram").exists()


@pytest.mark.parametrize("value", [1e18, 1e30, 3e38])
def test_a_flipped_bit_makes_a_merge_odd_but_whole(suite, value, real_figures):
    name = "model.layers.0.self_attn.q_proj.weight"
    edit(suite / "e0" / "model.safetensors", name, lambda tensor: tensor[0, 0].fill_(value))
    report = merger(suite).merge_to(suite / "merged")
    base, other = (load_file(suite / n / "model.safetensors") for n in ("base", "e1"))
    targets = [n for n in base if "layers" in n and n.endswith("proj.weight")]
    moved = math.sqrt(sum(float((other[n] - base[n]).double().square().sum()) for n in targets))
    assert report.dispersion == pytest.approx(value / moved, rel=1e-4)
    assert report.kappa == 0.5
    assert (suite / "merged" / "figures" / "updates.png").stat().st_size > 1000
    assert json.loads((suite / "merged" / "coram_report.json").read_text())["dispersion"] > 1e15


def test_a_refusal_before_the_first_byte_leaves_nothing(suite):
    before = sorted(suite.iterdir())
    same = CoramMerger(suite / "base", [suite / "base", suite / "e0"], progress=False)
    with pytest.raises(CoramError, match="does not differ from the base"):
        same.merge_to(suite / "merged")
    assert sorted(suite.iterdir()) == before


def test_a_damaged_weight_that_is_found_while_merging_keeps_the_work(suite):
    edit(suite / "e1" / "model.safetensors", "lm_head.weight", lambda tensor: tensor[3, 3].fill_(math.nan))
    with pytest.raises(CoramError, match=r"'e1', tensor 'lm_head\.weight': contains NaN.*again to resume"):
        merger(suite, CoramConfig(lam=1.0)).merge_to(suite / "merged")
    assert not (suite / "merged").exists()
    assert (suite / ".merged.coram" / "files").is_dir()


def test_models_in_memory_leave_nothing_behind(suite, monkeypatch):
    base = tiny_llama()
    experts = [fine_tuned(base, 0.02, seed) for seed in range(2)]
    before = sorted(suite.iterdir())
    monkeypatch.setattr(publish, "draw_updates", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        CoramMerger(base, experts, progress=False).merge_to(suite / "merged")
    assert sorted(suite.iterdir()) == before
