"""Merged folders in `pipeline()`, and configurations as files."""

import json

import pytest
import torch
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama, tiny_tokenizer
from huggingface_hub import ModelCard
from transformers import LlamaForSequenceClassification, pipeline

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.baselines import merge


def test_a_merged_folder_generates(tmp_path):
    sources = on_disk(tmp_path, tokenizer=tiny_tokenizer())
    CoramMerger(*sources, progress=False).merge_to(tmp_path / "merged")
    task = ModelCard.load(tmp_path / "merged" / "README.md").data.pipeline_tag
    assert task == "text-generation"
    generate = pipeline(task, model=str(tmp_path / "merged"))
    (answer,) = generate("1 + 1 =", max_new_tokens=3, do_sample=False)
    assert answer["generated_text"].startswith("1 + 1 =")


def test_a_merged_classifier_classifies(tmp_path):
    labels = {0: "no", 1: "yes"}
    config = tiny_llama(id2label=labels, label2id={v: k for k, v in labels.items()}, pad_token_id=0).config
    torch.manual_seed(0)
    base = LlamaForSequenceClassification(config)
    sources = on_disk(tmp_path, base, {"a": fine_tuned(base, 0.05, 1)}, tiny_tokenizer())
    merge(*sources, "ties", progress=False).save_pretrained(tmp_path / "merged")
    card = ModelCard.load(tmp_path / "merged" / "README.md").data
    assert card.pipeline_tag == "text-classification"
    (found,) = pipeline("text-classification", model=str(tmp_path / "merged"))("yes or no")
    assert found["label"] in ("yes", "no")


CONFIG = CoramConfig.from_line(
    "DEC(SS(nca,mean)).ties", weights=(1, [{"filter": "mlp", "value": [0, 1]}, {"value": -2}]), keep="lm_head"
)


def test_a_configuration_is_a_json_file(tmp_path):
    CONFIG.save_pretrained(tmp_path / "new" / "folder")
    path = tmp_path / "new" / "folder" / "coram_config.json"
    assert json.loads(path.read_text()) == CONFIG.to_dict()
    assert CoramConfig.from_pretrained(path.parent) == CoramConfig.from_pretrained(path) == CONFIG


def test_the_configuration_of_a_merge(tmp_path):
    sources = on_disk(tmp_path)
    config = CoramConfig.from_line("lr.ta", kappa=0.8)
    CoramMerger(*sources, config, progress=False).merge_to(tmp_path / "merged")
    assert CoramConfig.from_pretrained(tmp_path / "merged") == config
    merge(*sources, "ties", progress=False).save_pretrained(tmp_path / "ties")
    with pytest.raises(CoramError, match="made by ties, without a CoramConfig"):
        CoramConfig.from_pretrained(tmp_path / "ties")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "must hold a mapping"), ('{"kapa": 1}', "did you mean 'kappa'")],
)
def test_bad_files_are_named(tmp_path, text, message):
    (tmp_path / "coram_config.json").write_text(text)
    with pytest.raises(CoramError, match=message):
        CoramConfig.from_pretrained(tmp_path)
    with pytest.raises(CoramError, match=r"has no coram_config\.json"):
        CoramConfig.from_pretrained(tmp_path / "nowhere")
