"""Checkpoints on disk: read through memory maps, by the names that the model has in memory."""

import json
import os
import shutil

import pytest
import torch
from helpers.architectures import ARCHITECTURES
from helpers.folders import on_disk
from helpers.models import fine_tuned, tiny_llama
from safetensors.torch import load_file, save_file

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.inputs.checkpoint import open_checkpoint


@pytest.mark.parametrize("layout", ["original", "memory"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_is_what_from_pretrained_loads(architecture, layout, tmp_path):
    model = ARCHITECTURES[architecture].build().to(torch.bfloat16)
    model.save_pretrained(tmp_path, save_original_format=layout == "original", max_shard_size="20KB")
    expected = type(model).from_pretrained(tmp_path, dtype="auto")
    opened = open_checkpoint("the base", tmp_path)
    assert type(opened.model) is type(model)
    assert not opened.warnings
    assert opened.tied.keys() == {
        name
        for name, _ in expected.named_parameters(remove_duplicate=False)
        if name not in dict(expected.named_parameters())
    }
    state = expected.state_dict()
    assert {*opened, *opened.tied} == state.keys()
    for name in opened:
        assert torch.equal(opened[name], state[name]), name
        assert opened.original(name).shape == state[name].shape
        assert opened.original(name).dtype == state[name].dtype


def test_stacked_experts_are_made_when_asked_for(tmp_path):
    ARCHITECTURES["Mixtral"].build().save_pretrained(tmp_path)
    opened = open_checkpoint("the base", tmp_path)
    assert sum("experts" in name for name in opened.overrides) == 4
    assert all(opened.original(name).is_meta for name in opened.overrides)


def test_weights_that_config_ties_but_the_file_does_not(tmp_path):
    base = tiny_llama(tie_word_embeddings=True)
    base.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"] * 2
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    opened = open_checkpoint("the base", tmp_path)
    assert opened.tied == {}
    assert torch.equal(opened["lm_head.weight"], state["lm_head.weight"])
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_checkpoint("the base", tmp_path).tied == {"lm_head.weight": "model.embed_tokens.weight"}


def test_pickles_only_when_allowed(tmp_path):
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "old")
    state = load_file(tmp_path / "old" / "model.safetensors")
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(CoramError, match=r"pickled weights .*allow_pickle=True"):
        open_checkpoint("the base", tmp_path / "old")
    opened = open_checkpoint("the base", tmp_path / "old", allow_pickle=True)
    assert all(torch.equal(opened[name], tensor) for name, tensor in state.items())
    merged = CoramMerger(tmp_path / "old", [fine_tuned(base, 0.05, 0)], allow_pickle=True, progress=False)
    assert merged.merge().report.n_experts == 1
    torch.save(state, tmp_path / "old" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    opened = open_checkpoint("the base", tmp_path / "old", allow_pickle=True)
    assert all(torch.equal(opened[name], tensor) for name, tensor in state.items())
    torch.save({1: torch.ones(2)}, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(CoramError, match="not a dictionary of tensors by name"):
        open_checkpoint("the base", tmp_path / "old", allow_pickle=True)
    torch.save({"model.norm.weight": print}, tmp_path / "old" / "pytorch_model.bin")
    with pytest.raises(CoramError, match="contains more than tensors"):
        open_checkpoint("the base", tmp_path / "old", allow_pickle=True)


def header(path, edit):
    """Rewrite the header of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(edit(json.loads(data[8 : 8 + length]))).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def first_tensor(content):
    return next(entry for key, entry in content.items() if key != "__metadata__")


def overlap(content):
    entries = [entry for key, entry in content.items() if key != "__metadata__"]
    entries[1]["data_offsets"] = entries[0]["data_offsets"]
    return content


def resized(content):
    first_tensor(content)["shape"][0] += 1
    return content


def index(folder, edit):
    path = folder / "model.safetensors.index.json"
    path.write_text(edit(path.read_text()))


def config(folder, values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def loop(path):
    path.unlink()
    path.symlink_to(path.name)


SHARD = "model-00001-of-00002.safetensors"
HOSTILE = {
    "truncated": lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-10]),
    "empty shard": lambda f: (f / SHARD).write_bytes(b""),
    "header too long": lambda f: (f / SHARD).write_bytes(b"\xff" * 7 + b"\x00" + b"{}"),
    "overlapping offsets": lambda f: header(f / SHARD, overlap),
    "wrong size": lambda f: header(f / SHARD, resized),
    "parent path": lambda f: index(f, lambda t: t.replace(SHARD, "../../x.safetensors")),
    "absolute path": lambda f: index(f, lambda t: t.replace(SHARD, "/etc/passwd")),
    "missing shard": lambda f: (f / SHARD).unlink(),
    "tensor in two shards": lambda f: shutil.copy(f / SHARD, f / SHARD.replace("00001-", "00002-")),
    "name listed twice": lambda f: index(
        f, lambda t: t.replace('"weight_map": {', f'"weight_map": {{"lm_head.weight": "{SHARD}",')
    ),
    "index without a map": lambda f: index(f, lambda t: '{"weight_map": []}'),
    "index that is no JSON": lambda f: index(f, lambda t: t[:50]),
    "symlink loop": lambda f: loop(f / SHARD),
    "index is a loop": lambda f: loop(f / "model.safetensors.index.json"),
    "0-byte config": lambda f: (f / "config.json").write_bytes(b""),
    "config of nothing": lambda f: (f / "config.json").write_text("{}"),
    "unknown architecture": lambda f: (f / "config.json").write_text(
        (f / "config.json").read_text().replace("LlamaForCausalLM", "NoSuchModel")
    ),
    "config of another size": lambda f: (f / "config.json").write_text(
        (f / "config.json").read_text().replace('"vocab_size": 48', '"vocab_size": 47')
    ),
    "config of another kind": lambda f: config(f, {"architectures": ["pipeline"]}),
    "architecture that is no text": lambda f: config(f, {"architectures": [5]}),
    "another architecture": lambda f: config(f, {"architectures": ["BertModel"]}),
    "impossible size": lambda f: config(f, {"hidden_size": "abc"}),
    "impossible heads": lambda f: config(f, {"num_attention_heads": 0}),
    "quantised without a backend": lambda f: config(
        f, {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    ),
    "index that names a pickle": lambda f: index(f, lambda t: t.replace(SHARD, "x.bin")),
    "no weights": lambda f: [path.unlink() for path in f.glob("*.safetensors*")],
    "lacking a tensor": lambda f: header(
        f / SHARD, lambda c: {("x" if v is first_tensor(c) else k): v for k, v in c.items()}
    ),
}


@pytest.fixture
def sharded(tmp_path):
    on_disk(tmp_path, experts={"math": 0.03}, max_shard_size="40KB")
    assert len(list((tmp_path / "base").glob("*.safetensors"))) == 2
    return tmp_path


@pytest.mark.parametrize("harm", HOSTILE)
def test_hostile_files_are_one_clear_error(harm, sharded, monkeypatch):
    from helpers.command import coram_hf

    HOSTILE[harm](sharded / "math")
    before = sorted(sharded.rglob("*"))
    monkeypatch.chdir(sharded)
    run = coram_hf("merge", "base", "math", "-o", "out")
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "Traceback" not in run.stderr
    assert "math" in run.stderr or "model-0000" in run.stderr
    assert sorted(sharded.rglob("*")) == before
    assert not os.path.lexists(sharded.parent / "x.safetensors")


def test_tensors_without_a_place_are_warned_of(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "model.extra": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    merger = CoramMerger(tmp_path, [fine_tuned(tiny_llama(), 0.05, 0)], CoramConfig(lam=1.0), progress=False)
    assert any("'model.extra'" in warning for warning in merger.inspect().warnings)
