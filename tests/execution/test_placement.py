"""Placement by accelerate: results on CPU and disk have the bytes of plain ones, and generate at once."""

import gc
import json
import re
import runpy
import sys

import pytest
import torch
from helpers.architectures import ARCHITECTURES
from helpers.command import coram_hf
from helpers.folders import assert_same_files, contents, on_disk
from helpers.models import fine_tuned, tiny_llama
from helpers.paths import ROOT
from helpers.vocabulary import WORDS, word_tokenizer
from transformers import AutoModelForCausalLM

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.baselines import merge as merge_baseline

FAMILIES = ["Llama", "Qwen2.5-VL", "Gemma-2", "Mixtral", "T5"]
SPLIT = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}
TOKENS = torch.arange(3, 12).unsqueeze(0)


def merger(sources, line="full.ties", **options):
    return CoramMerger(*sources, CoramConfig.from_line(line), progress=False, **options)


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def generated(model):
    options = {"decoder_start_token_id": 0} if model.config.is_encoder_decoder else {}
    return model.generate(TOKENS, max_new_tokens=3, min_new_tokens=3, do_sample=False, **options).tolist()


def on_meta(model):
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A base and two experts in folders, their merge in `to`, and the plain result."""
    folder = tmp_path_factory.mktemp("llama")
    sources = on_disk(folder)
    merger(sources).merge_to(folder / "to")
    return folder, sources, merger(sources).merge()


def placed(folder, name, device_map=SPLIT):
    """A model that transformers has loaded with a device map."""
    return AutoModelForCausalLM.from_pretrained(
        folder / name, device_map=device_map, offload_folder=folder / f"offload-{name}"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_split_and_keeps_its_bytes(tmp_path, family):
    architecture = ARCHITECTURES[family]
    sources = on_disk(tmp_path, architecture.build())
    plain = merger(sources, "full.ta").merge()
    merger(sources, "full.ta").merge_to(tmp_path / "to")
    sizes = [parameter.nbytes for parameter in plain.model.parameters()]
    room = {"cpu": sum(sizes) * 3 // 4}
    options = {"device_map": "sequential", "max_memory": room, "offload_folder": tmp_path / "offload"}
    result = merger(sources, "full.ta", **options).merge()
    in_memory = sum(p.nbytes for p in result.model.parameters() if not p.is_meta)
    assert 0 < in_memory < room["cpu"]
    assert set(result.model.hf_device_map.values()) == {"cpu", "disk"}
    for _ in range(2):  # hooks put everything back after the first
        assert torch.equal(architecture.forward(result.model), architecture.forward(plain.model))
    assert generated(result.model) == generated(plain.model)
    result.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", tmp_path / "to")


def test_a_placed_base_gives_a_result_placed_as_it_is_and_is_left_alone(llama):
    folder, sources, plain = llama
    base = placed(folder, "base")
    experts = {"e0": placed(folder, "e0", {"": "disk"}), "e1": sources.experts["e1"]}
    held, before = on_meta(base), logits(base)
    result = merger((base, experts)).merge()
    assert result.model.hf_device_map == SPLIT
    assert on_meta(result.model) == held
    assert any(path.is_file() for path in (folder / "offload-base").rglob("*.safetensors"))
    assert torch.equal(logits(result.model), logits(plain.model))
    assert on_meta(base) == held
    assert torch.equal(logits(base), before)


def test_a_placed_base_keeps_its_placement_and_merge_overrides_it(llama, tmp_path, caplog):
    folder, sources, plain = llama
    made = merger((placed(folder, "base"), sources.experts), device_map="cpu")
    result = made.merge()
    assert result.model.hf_device_map == SPLIT
    assert "placed already" in caplog.text
    moved = made.merge(device_map={"": "disk"}, offload_folder=tmp_path / "elsewhere")
    assert on_meta(moved.model) == {name for name, _ in moved.model.named_parameters()}
    assert list((tmp_path / "elsewhere").iterdir())
    whole = made.merge(device_map="cpu")
    assert not on_meta(whole.model)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(whole.model.state_dict()[name], tensor), name
    assert torch.equal(logits(moved.model), logits(plain.model))


def test_loaded_models_without_a_placement_take_the_given_one(tmp_path):
    base = tiny_llama(dtype=torch.bfloat16)
    experts = [fine_tuned(base, 0.05, seed) for seed in range(2)]
    plain = merger((base, experts), dtype="float32").merge()
    options = {"device_map": SPLIT, "offload_folder": tmp_path / "offload", "dtype": "float32"}
    result = merger((base, experts), **options).merge()
    assert result.model.hf_device_map == SPLIT
    assert not on_meta(base)
    assert torch.equal(logits(result.model), logits(plain.model))


@pytest.mark.parametrize(("embeddings", "head"), [("cpu", "disk"), ("disk", "cpu"), ("disk", "disk")])
def test_tied_weights_across_places(tmp_path, embeddings, head):
    sources = on_disk(tmp_path, tiny_llama(tie_word_embeddings=True))
    merger(sources).merge_to(tmp_path / "to")
    device_map = SPLIT | {"model.embed_tokens": embeddings, "lm_head": head}
    plain = merger(sources).merge()
    result = merger(sources, device_map=device_map, offload_folder=tmp_path / "offload").merge()
    other = result.with_lambda(0.5)
    for _ in range(2):
        assert torch.equal(logits(result.model), logits(plain.model))
        assert torch.equal(logits(other.model), logits(plain.with_lambda(0.5).model))
    result.save_pretrained(tmp_path / "saved")
    assert_same_files(tmp_path / "saved", tmp_path / "to")
    assert b"lm_head" not in contents(tmp_path / "saved")["model.safetensors"]


def test_a_base_tied_on_the_disk_stays_tied(tmp_path):
    sources = on_disk(tmp_path, tiny_llama(tie_word_embeddings=True))
    merger(sources).merge_to(tmp_path / "to")
    base = placed(tmp_path, "base", SPLIT | {"model.embed_tokens": "disk"})
    merger((base, sources.experts)).merge_to(tmp_path / "again")
    assert_same_files(tmp_path / "again", tmp_path / "to")


def test_lambda_can_be_changed_without_touching_the_first_result(llama, tmp_path):
    _, sources, plain = llama
    result = merger(sources, device_map=SPLIT, offload_folder=tmp_path).merge()
    other = result.with_lambda(0.7)
    assert other.report == plain.with_lambda(0.7).report
    assert other.model.hf_device_map == SPLIT
    assert torch.equal(logits(other.model), logits(plain.with_lambda(0.7).model))
    assert torch.equal(logits(result.model), logits(plain.model))
    result.rescale_(0.7)
    assert torch.equal(logits(result.model), logits(other.model))


def test_the_offload_folder_is_empty_once_results_are_gone(llama, tmp_path):
    _, sources, _ = llama
    result = merger(sources, device_map=SPLIT, offload_folder=tmp_path).merge()
    other = result.with_lambda(0.7)
    assert len(list(tmp_path.iterdir())) == 2
    del result
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1
    assert logits(other.model).isfinite().all()
    del other
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_new_tokens_and_shards(tmp_path):
    base = tiny_llama(vocab_size=40)
    grown = fine_tuned(base, 0.05, 0)
    grown.resize_token_embeddings(43, mean_resizing=False)
    sources = on_disk(tmp_path, base, {"grown": grown, "other": 0.03}, word_tokenizer(WORDS))
    word_tokenizer(WORDS, ["x", "y", "z"]).save_pretrained(tmp_path / "grown")
    merger(sources, vocabulary="union").merge_to(tmp_path / "to", max_shard_size="30KB")
    options = {"device_map": SPLIT, "offload_folder": tmp_path / "offload", "vocabulary": "union"}
    result = merger(sources, **options).merge(keep_update=False)
    assert result.model.get_input_embeddings().weight.shape[0] == 43
    result.save_pretrained(tmp_path / "saved")
    result.save_pretrained(tmp_path / "saved", max_shard_size="30KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 2
    assert_same_files(tmp_path / "saved", tmp_path / "to")
    with pytest.raises(CoramError, match="not kept"):
        result.with_lambda(1.0)


def test_baselines_are_placed_too(llama, tmp_path):
    _, sources, _ = llama
    options = {"device_map": SPLIT, "offload_folder": tmp_path, "progress": False}
    result = merge_baseline(*sources, "ties", **options)
    plain = merge_baseline(*sources, "ties", progress=False)
    assert on_meta(result.model)
    assert torch.equal(logits(result.model), logits(plain.model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "automatic"}, "device_map: .*unknown value 'automatic'"),
        ({"device_map": {"": "cuda:3"}}, "device_map: .*'cuda' is not available"),
        ({"device_map": {"model": "cpu"}}, "device_map: .*lm_head"),
        ({"device_map": {"modle": "cpu", "lm_head": "cpu"}}, "did you mean 'model'"),
        ({"device_map": [1]}, "is not a device"),
        ({"max_memory": {"cpu": "1GB"}}, "pass device_map"),
        ({"device_map": "auto", "max_memory": "lots"}, "sizes by device"),
        ({"device_map": "cpu", "max_memory": {"cpu": "1GB"}}, "max_memory only applies"),
    ],
)
def test_what_cannot_be_placed_is_refused_before_the_merge(llama, options, message):
    with pytest.raises(CoramError, match=message):
        merger(llama[1], **options)


def test_the_command_line_and_recipes_take_the_options(llama, tmp_path):
    folder, sources, plain = llama
    options = {"device_map": "auto", "max_memory": "cpu=40KB", "offload_folder": tmp_path}
    result = merger(sources, **options).merge()
    assert "disk" in result.model.hf_device_map.values()
    assert torch.equal(logits(result.model), logits(plain.model))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    named = [f"{name}={path}" for name, path in sources.experts.items()]
    done = coram_hf("merge", sources.base, *named, "--line", "full.ties", "-o", tmp_path / "line", *words)
    assert done.returncode == 0, done.stderr
    assert_same_files(tmp_path / "line", folder / "to")
    recipe = {"base": str(sources.base), "experts": [str(path) for path in sources.experts.values()]}
    (tmp_path / "recipe.yaml").write_text(
        json.dumps({**recipe, "device_map": {"model": "cpu", "lm_hed": "disk"}})
    )
    refused = coram_hf("merge", "--config", tmp_path / "recipe.yaml", "-o", tmp_path / "no")
    assert refused.returncode == 2
    assert "did you mean 'lm_head'" in refused.stderr


def test_the_example_fits_in_a_quarter_of_the_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["placement.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "placement.py"), run_name="__main__")
    found = re.search(r"of ([\d.]+) MB, ([\d.]+) MB are in memory", capsys.readouterr().out)
    assert 0 < float(found[2]) <= float(found[1]) / 4
    assert (tmp_path / "merged" / "model.safetensors").is_file()
