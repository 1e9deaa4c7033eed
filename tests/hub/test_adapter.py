"""Adapters saved from merges: card, report and weights together, from memory and from files."""

import hashlib
import json
import math
import re
import shlex

import numpy as np
import pytest
import torch
from helpers.adapters import METHODS, adapted
from helpers.command import coram_hf
from helpers.folders import assert_same_tensors, on_disk
from helpers.models import fine_tuned, tiny_llama
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coram_hf import CoramConfig, CoramError, CoramMerger, load_report
from coram_hf.baselines import merge_oft, open_merger
from coram_hf.hub.again import command_line, python_code


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("sources"), experts={"math": 0.03, "code": 0.05})


def products(folder):
    """B A of every module, from the file alone."""
    found = load_file(folder / "adapter_model.safetensors")
    modules = {key.removesuffix(".lora_A.weight") for key in found if key.endswith("lora_A.weight")}
    return {
        module.removeprefix("base_model.model."): (
            found[f"{module}.lora_B.weight"].double() @ found[f"{module}.lora_A.weight"].double()
        ).numpy()
        for module in modules
    }


def nothing_else(folder):
    """No hidden leftovers of an unfinished folder."""
    return not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_an_adapter_finds_its_base_from_another_folder(sources, tmp_path, monkeypatch):
    monkeypatch.chdir(sources.base.parent)
    CoramMerger("base", ["math", "code"], progress=False).merge_adapter_to(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert model.get_base_model().config.hidden_size == tiny_llama().config.hidden_size


def test_card_and_report_of_a_lora_adapter(sources, tmp_path):
    result = CoramMerger(*sources, CoramConfig.from_line("lr", lambda_step=0.1), progress=False).merge()
    report = result.save_adapter(tmp_path / "adapter", rank=4)
    assert nothing_else(tmp_path)
    weights = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    (found,) = report.files.values()
    assert found == {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    base = AutoModelForCausalLM.from_pretrained(sources.base).state_dict()
    squares, lost = [], []
    for module, product in products(tmp_path / "adapter").items():
        w0, w = (state[f"{module}.weight"].double().numpy() for state in (base, result.model.state_dict()))
        squares.append(np.square(w - w0).sum())
        lost.append(np.square(w - w0 - product).sum())
        assert report.adapter_errors[module] == pytest.approx(math.sqrt(lost[-1] / squares[-1]), rel=1e-3)
    assert report.adapter == {
        "type": "LORA",
        "rank": 4,
        "energy": None,
        "error": pytest.approx(math.sqrt(sum(lost) / sum(squares)), rel=1e-3),
    }
    card = ModelCard.load(tmp_path / "adapter" / "README.md")
    assert (card.data.library_name, card.data.base_model_relation) == ("peft", "adapter")
    text = card.content
    for row in (
        f"| dispersion D | {report.dispersion:.4g} |",
        "| kappa | 1.15 |",
        "| lambda | 1.6 |",
        "| matrices | 14 |",
        "| kept | rank 4 |",
        f"| relative error over all matrices | {report.adapter['error']:.3g} |",
    ):
        assert row in text
    worst = max(report.adapter_errors, key=report.adapter_errors.__getitem__)
    listed = text.partition("| matrix | rank | relative error |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(listed) == 10 < len(report.adapter_errors)
    assert worst.replace("_", "&#95;") in listed[0]
    assert "PeftModel.from_pretrained(base" in text
    assert load_report(tmp_path / "adapter") == report


def test_the_card_s_code_and_command_repeat_the_adapter(sources, tmp_path, monkeypatch):
    config = CoramConfig.from_line("SS(ca+ave,variance)", lambda_step=0.1, kappa=0.9)
    report = CoramMerger(*sources, config, progress=False).merge_adapter_to(tmp_path / "first", energy=0.9)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "to").symlink_to(sources.base.parent)
    exec(python_code(report), {})
    assert_same_tensors(tmp_path / "merged", tmp_path / "first")
    words = shlex.split(command_line(report))
    assert words[-4:] == ["--adapter-out", "merged", "--energy", "0.9"]
    assert coram_hf(*words[1:], "--overwrite").returncode == 0
    assert_same_tensors(tmp_path / "merged", tmp_path / "first")
    assert load_report(tmp_path / "merged") == report


@pytest.mark.parametrize("line", ["full", "nca.ta"])
def test_one_by_one_is_the_same_as_from_the_kept_update(sources, tmp_path, line):
    config = CoramConfig.from_line(line)
    result = CoramMerger(*sources, config, progress=False).merge()
    kept = result.save_adapter(tmp_path / "kept")
    streamed = CoramMerger(*sources, config, progress=False).merge_adapter_to(tmp_path / "streamed")
    assert_same_tensors(tmp_path / "kept", tmp_path / "streamed")
    for name, value in kept.to_dict().items():
        expected = pytest.approx(value) if name == "retention" else value
        assert name == "cost" or streamed.to_dict()[name] == expected, name
    if line == "nca.ta":
        base = AutoModelForCausalLM.from_pretrained(sources.base).state_dict()
        whole = outside = 0.0
        for path in sources.experts.values():
            for name, tensor in AutoModelForCausalLM.from_pretrained(path).state_dict().items():
                square = float((tensor.double() - base[name].double()).square().sum())
                whole += square
                outside += 0.0 if "_proj" in name else square
        assert kept.left_at_base == pytest.approx(math.sqrt(outside / whole), rel=1e-6)
        assert any("residual pathway merged stay at the base" in warning for warning in kept.warnings)
        assert kept.counts["residual"] == 0 < result.report.counts["residual"]


def test_an_oft_adapter_from_files(tmp_path):
    base = tiny_llama()
    experts = {f"e{i}": adapted(base, METHODS["OFT, Cayley"](), i) for i in range(2)}
    where = on_disk(tmp_path, base, experts)
    merger = open_merger(*where, "orthomerge", space="oft", progress=False)
    report = merger.merge_adapter_to(tmp_path / "oft")
    merge_oft(*where, progress=False).save_adapter(tmp_path / "kept")
    assert_same_tensors(tmp_path / "oft", tmp_path / "kept")
    assert report.adapter == {"type": "OFT"}
    assert report.files.keys() == {"adapter_model.safetensors"}
    card = ModelCard.load(tmp_path / "oft" / "README.md")
    assert card.data.library_name == "peft"
    assert "an OFT adapter" in card.content
    with pytest.raises(CoramError, match="remove rank and energy"):
        merger.merge_adapter_to(tmp_path / "other", energy=0.5)


def test_a_folder_is_replaced_only_on_request_and_keeps_an_edited_card(sources, tmp_path):
    result = CoramMerger(*sources, progress=False).merge()
    target = tmp_path / "adapter"
    result.save_adapter(target, rank=2)
    card = target / "README.md"
    card.write_text(card.read_text() + "\nMine.\n")
    (target / "extra.txt").write_text("x")
    with pytest.raises(CoramError, match="exists; choose another folder"):
        result.save_adapter(target, rank=3)
    assert load_report(target).adapter["rank"] == 2
    result.save_adapter(target, rank=3, overwrite=True)
    assert card.read_text().endswith("\nMine.\n")
    assert "| kept | rank 3 |" in card.read_text()
    assert not (target / "extra.txt").exists()
    assert nothing_else(tmp_path)
    with pytest.raises(CoramError, match="contains an input of the merge"):
        result.save_adapter(sources.base, overwrite=True)
    with pytest.raises(CoramError, match="mutually exclusive"):
        result.save_adapter(tmp_path / "both", rank=2, energy=0.5)


def test_a_failed_adapter_leaves_nothing_behind(sources, tmp_path):
    result = CoramMerger(*sources, progress=False).merge()
    result.save_adapter(tmp_path / "old", rank=1)
    with pytest.raises(CoramError, match="nothing for an adapter"):
        result.with_lambda(0.0).save_adapter(tmp_path / "old", overwrite=True)
    with pytest.raises(CoramError, match="nothing for an adapter"):
        result.with_lambda(0.0).save_adapter(tmp_path / "new")
    assert load_report(tmp_path / "old").adapter["rank"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_the_command_line_writes_adapters(sources, tmp_path):
    words = ["merge", sources.base, *sources.experts.values(), "--line", "lr"]
    for wrong, message in (
        ([], "no output: pass -o"),
        (["-o", tmp_path / "m", "--rank", 2], "pass --adapter-out as well"),
        (["--adapter-out", tmp_path / "a", "--rank", 2, "--energy", 0.5], "mutually exclusive"),
        (["--adapter-out", tmp_path / "a", "--energy", 2], "energy must be a finite number above 0"),
        (["--adapter-out", sources.base], "exists; choose another folder"),
        (["--adapter-out", tmp_path / "a", "-o", tmp_path / "a"], "named for both outputs"),
    ):
        run = coram_hf(*words, *wrong)
        assert run.returncode == 2
        assert message in run.stderr
    run = coram_hf(*words, "--adapter-out", tmp_path / "a", "--dry-run")
    assert run.returncode == 0
    assert re.search(r"kappa +1\.15", run.stdout)
    assert not list(tmp_path.iterdir())
    run = coram_hf(*words, "--adapter-out", tmp_path / "a", "-o", tmp_path / "m", "--energy", 1)
    assert run.returncode == 0, run.stderr
    assert "with a relative error of" in run.stdout
    base = AutoModelForCausalLM.from_pretrained(sources.base)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokens = torch.arange(3, 12).unsqueeze(0)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        found = PeftModel.from_pretrained(base, tmp_path / "a").eval()(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["task_type"] == "CAUSAL_LM"


def test_other_options_need_an_adapter():
    base = tiny_llama()
    result = CoramMerger(base, [fine_tuned(base, 0.05, 0)], progress=False).merge()
    with pytest.raises(CoramError, match="pass adapter=True"):
        result.push_to_hub("me/x", rank=2)
