"""`save_pretrained`: a complete folder, or the one that was there before."""

import copy

import pytest
import torch
from helpers.folders import contents, on_disk
from helpers.models import fine_tuned, tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from coram_hf import CoramError, CoramMerger


@pytest.fixture(scope="module")
def result():
    base = tiny_llama()
    return CoramMerger(base, [fine_tuned(base, 0.03, 1), fine_tuned(base, 0.05, 2)]).merge()


def test_whoever_may_read_the_config_may_read_the_weights(result, tmp_path):
    for write in (result.save_pretrained, result.save_pretrained, result.save_adapter):
        folder = tmp_path / write.__name__
        write(folder)
        (weights,) = folder.glob("*.safetensors")
        assert weights.stat().st_mode == (folder / "README.md").stat().st_mode


def broken(monkeypatch):
    def fail(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr("coram_hf.hub.publish.file_hashes", fail)


def test_a_save_that_fails_leaves_no_folder(result, tmp_path, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(OSError, match="no space left"):
        result.save_pretrained(tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_leaves_the_old_folder(result, tmp_path, monkeypatch):
    result.save_pretrained(tmp_path / "merged")
    before = contents(tmp_path / "merged")
    card = (tmp_path / "merged" / "README.md").read_text()
    other = result.with_lambda(3.0)
    broken(monkeypatch)
    with pytest.raises(OSError, match="no space left"):
        other.save_pretrained(tmp_path / "merged")
    assert contents(tmp_path / "merged") == before
    assert (tmp_path / "merged" / "README.md").read_text() == card
    assert not list((tmp_path / "merged").glob(".*"))


def test_saving_again_replaces_weights_and_keeps_other_files(result, tmp_path):
    folder = tmp_path / "merged"
    result.save_pretrained(folder, max_shard_size="30KB")
    assert (folder / "model.safetensors.index.json").exists()
    (folder / "notes.txt").write_text("mine")
    (folder / "runs").mkdir()
    other = result.with_lambda(3.0)
    other.save_pretrained(folder)
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "runs").is_dir()
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in other.model.state_dict().items())


def test_the_folder_of_the_base_may_be_written_to(tmp_path):
    """Its weights are mapped into memory while the result is written."""
    sources = on_disk(tmp_path)
    result = CoramMerger(*sources).merge()
    expected = copy.deepcopy(result.model).state_dict()
    result.save_pretrained(sources.base)
    found = AutoModelForCausalLM.from_pretrained(sources.base).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_file_is_no_folder(result, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CoramError, match="is a file; the output must be a folder"):
        result.save_pretrained(tmp_path / "file")


def test_a_model_with_adapters_stands_for_them():
    """CoramMerger(base, peft_model)."""
    base = tiny_llama()
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="a")
    model.add_adapter("b", LoraConfig(r=2, target_modules=["v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    alone, listed = CoramMerger(base, model).merge(), CoramMerger(base, [model]).merge()
    assert list(alone.report.relative_updates) == ["a", "b"]
    assert all(
        torch.equal(alone.model.state_dict()[name], tensor)
        for name, tensor in listed.model.state_dict().items()
    )
