"""Files that are whole or absent: links, devices and neighbours are left as they are."""

import os
import stat
from contextlib import suppress

import pytest
import torch
from helpers.models import fine_tuned, tiny_llama

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.cli.shared import split_tasks
from coram_hf.evaluation.tasks import check_scores
from coram_hf.outputs.files import replacing, write_whole
from coram_hf.report.diagnostics import contraction


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_what_is_no_file_stays_what_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "said")
    assert os.read(reader, 10) == b"said"
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_hidden_neighbour_is_left_alone(tmp_path):
    (tmp_path / ".numbers.json").write_text("mine")
    write_whole(tmp_path / "numbers.json", "new")
    assert (tmp_path / ".numbers.json").read_text() == "mine"
    with suppress(OSError), replacing(tmp_path / "numbers.json") as partial:
        partial.write_text("half")
        raise OSError("gone")
    assert (tmp_path / "numbers.json").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2


def test_long_lists_of_tasks_are_split():
    names = [f"task_{i}" for i in range(100)]
    assert split_tasks([", ".join(names)]) == names


def test_losses_are_no_scores():
    class Loss:
        name, lower_is_better = "perplexity", True

    with pytest.raises(ValueError, match="'perplexity' is measured by a number of which less is better"):
        check_scores([Loss()])


def test_weights_change_the_scale_that_c_rms_is_compared_with():
    base = tiny_llama()
    experts = [fine_tuned(base, 0.02, seed) for seed in range(3)]
    found = contraction(base, experts, CoramConfig(weights=(0.7, 0.2, 0.1)), progress=False)
    assert found["sqrt_n"] == pytest.approx(1 / (0.7**2 + 0.2**2 + 0.1**2) ** 0.5)


def test_inference_mode_is_no_obstacle():
    base = tiny_llama()
    experts = [fine_tuned(base, 0.02, seed) for seed in range(2)]
    expected = CoramMerger(base, experts, progress=False).merge().model.state_dict()
    with torch.inference_mode():
        inside = CoramMerger(base, experts, progress=False).merge().model.state_dict()
    after = CoramMerger(base, experts, progress=False).merge().model.state_dict()
    assert all(torch.equal(inside[name], expected[name]) for name in expected)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_a_check_refuses_what_the_merge_would(tmp_path):
    base = tiny_llama()
    merger = CoramMerger(base, [fine_tuned(base, 0.02, 0)], progress=False)
    with pytest.raises(CoramError, match="exists; choose another folder"):
        merger.check(tmp_path)
    merger.check(tmp_path / "new")
    with pytest.raises(CoramError, match=r"equal|infinite"):
        CoramMerger(base, [base, fine_tuned(base, 0.02, 0)], progress=False).check(tmp_path / "new")
