"""CoramCallback: merges at the end of real trainings, of whole models and of adapters, and a push."""

import pytest
import torch
from datasets import Dataset
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama, tiny_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from coram_hf import CoramCallback, CoramConfig, CoramError, CoramMerger


@pytest.fixture
def start(tmp_path):
    base = tiny_llama()
    on_disk(tmp_path, base, {"other": fine_tuned(base, 0.05, 3)}, tiny_tokenizer())
    return tmp_path


def train(folder, model, callback, steps=4, **options):
    rows = [{"input_ids": (ids := [(i * j) % 40 + 3 for j in range(1, 9)]), "labels": ids} for i in range(8)]
    options = {"save_steps": 2, "save_strategy": "steps", **options}
    arguments = TrainingArguments(
        output_dir=str(folder / "run"), max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no", **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    return trainer


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def same(found, expected, tolerance=1e-7):
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=0, atol=tolerance)


def test_checkpoints_of_a_training_are_averaged(start):
    callback = CoramCallback(method="linear", last=2, progress=False)
    train(start, loaded(start / "base"), callback, steps=6)
    assert callback.folder == start / "run" / "merged"
    assert list(callback.report.relative_updates) == ["checkpoint-4", "checkpoint-6"]
    states = [load_file(start / "run" / f"checkpoint-{step}" / "model.safetensors") for step in (4, 6)]
    merged = loaded(callback.folder).state_dict()
    for name, tensor in states[0].items():
        torch.testing.assert_close(merged[name], (tensor + states[1][name]) / 2, rtol=0, atol=1e-6)


def test_the_trained_model_is_merged_with_experts(start):
    config = CoramConfig.from_line("nca.ta", kappa=0.9)
    callback = CoramCallback({"other": start / "other"}, config=config, progress=False)
    trainer = train(start, loaded(start / "base"), callback)
    experts = {"other": start / "other", "trained": trainer.model}
    expected = CoramMerger(start / "base", experts, config, progress=False).merge()
    same(loaded(callback.folder), expected.model)
    assert callback.report.kappa == 0.9
    assert list(callback.report.relative_updates) == ["other", "trained"]


def test_adapters_that_were_trained(start):
    model = get_peft_model(loaded(start / "base"), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    callback = CoramCallback(folder=start / "out", progress=False)
    train(start, model, callback, save_steps=4)
    assert callback.report.expert_kinds == {"checkpoint-4": "LORA"}
    checkpoint = PeftModel.from_pretrained(loaded(start / "base"), start / "run" / "checkpoint-4")
    same(loaded(start / "out"), CoramMerger(start / "base", [checkpoint], progress=False).merge().model, 1e-6)


def test_the_merge_is_pushed(start, monkeypatch):
    pushed = []
    monkeypatch.setattr("coram_hf.callback.push_folder", lambda *where, **how: pushed.append((where, how)))
    callback = CoramCallback(
        {"other": start / "other"}, push_to_hub="me/merged", push_options={"private": True}, progress=False
    )
    train(start, loaded(start / "base"), callback, steps=1)
    assert pushed == [((start / "run" / "merged", "me/merged"), {"private": True, "fresh": True})]


@pytest.mark.parametrize(
    ("options", "training", "message"),
    [
        ({"config": CoramConfig(), "method": "ties"}, {}, "mutually exclusive"),
        ({"method": "tise"}, {}, "did you mean 'ties'"),
        ({"method": "ties", "parameters": {"densty": 1}}, {}, "did you mean 'density'"),
        ({"experts": ["a"]}, {}, "must be a dict"),
        ({"last": 0}, {}, "last must be a positive integer"),
        ({"experts": {"a": "a"}, "last": 2}, {}, "last selects checkpoints"),
        ({"push_options": {"privat": True}}, {}, "did you mean 'private'"),
        ({}, {"save_strategy": "no"}, "saves no checkpoints"),
        ({"folder": "other"}, {}, "other exists"),
    ],
)
def test_errors_come_before_the_training(start, monkeypatch, options, training, message):
    monkeypatch.chdir(start)
    model = loaded(start / "base")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CoramError, match=message):
        train(start, model, CoramCallback(**options), **training)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_without_origin_needs_a_base(start):
    with pytest.raises(CoramError, match="its base is unknown"):
        train(start, tiny_llama(), CoramCallback())


@pytest.mark.parametrize("adapter", [False, True])
def test_supervised_fine_tuning_with_trl_ends_in_a_merge(start, adapter):
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'coram-hf[trl]'")
    rows = Dataset.from_list([{"text": f"{i} + {i} = {2 * i}"} for i in range(8)])
    arguments = trl.SFTConfig(
        output_dir=str(start / "run"), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2,
        max_length=16, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, logging_strategy="no",
        save_strategy="no", gradient_checkpointing=False,
    )  # fmt: skip
    config = CoramConfig.from_line("full", lam=1.0)
    callback = CoramCallback({"other": start / "other"}, config=config, progress=False)
    trainer = trl.SFTTrainer(
        loaded(start / "base"), arguments, train_dataset=rows, callbacks=[callback],
        processing_class=AutoTokenizer.from_pretrained(start / "base"),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "up_proj"]) if adapter else None,
    )  # fmt: skip
    trainer.train()
    assert callback.report.expert_kinds["trained"] == ("LORA" if adapter else "full")
    assert callback.report.relative_updates["trained"] > 0
    experts = {"other": start / "other", "trained": trainer.model}
    same(loaded(callback.folder), CoramMerger(start / "base", experts, config, progress=False).merge().model)
